"""How fast `hacpo convert` is, as a share of copying the same bytes.

    conversion_speed.py [--gigabytes 2.2] [--dir FOLDER]

In one run and one process: a random bf16 model of that size, `cp --reflink=never` of its files followed by
fsync, and the conversion to a Megatron checkpoint and back, which end with fsync, too. The start of the
interpreter is not counted; the pages of the source are in memory each time.
"""

import argparse
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from large_folder import write_large_folder
from transformers import LlamaConfig

from megatron_hacpo.convert import run
from megatron_hacpo.megatron.runtime import Layout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=2.2)
    parser.add_argument("--dir", type=Path, help="on the disk to measure; by default a temporary folder")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as folder:
        root = Path(folder)
        layers = 2 * math.ceil((arguments.gigabytes - 0.26) / 0.18)  # GB in two layers
        config = LlamaConfig(
            vocab_size=32000,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=layers,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        )
        total = write_large_folder(config, root / "hf", shard_bytes=1_000_000_000)
        print(f"{total / 1e9:.2f} GB in {layers} layers, {len(os.sched_getaffinity(0))} cores", flush=True)
        shares = [measure(root, total) for _ in range(arguments.repeat)]
        for name in shares[0]:
            print(f"{name}: median {statistics.median(s[name] for s in shares):.2f} of copying")


def measure(root: Path, total: int) -> dict[str, float]:
    """Speed as a share of copying, which is measured right before and right after."""
    steps = {
        "to Megatron": lambda: run(root / "hf", root / "converted", layout=Layout(tensor=2, pipeline=2)),
        "to Hugging Face": lambda: run(root / "converted", root / "back"),
    }
    shares = {}
    before = seconds(lambda: copy(root / "hf", root / "copy"))
    for name, step in steps.items():
        taken = seconds(step)
        after = seconds(lambda: copy(root / "hf", root / "copy"))
        shares[name] = (before + after) / 2 / taken
        speeds = [total / 1e9 / t for t in (before, taken, after)]
        print(
            f"{name}: copy {speeds[0]:.3f}, conversion {speeds[1]:.3f}, copy {speeds[2]:.3f} GB/s", flush=True
        )
        before = after
    shutil.rmtree(root / "converted")
    shutil.rmtree(root / "back")
    return shares


def seconds(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run(["cp", "--reflink=never", "-r", str(source), str(target)], check=True)
    for file in target.iterdir():
        with file.open("rb") as stream:
            os.fsync(stream.fileno())


if __name__ == "__main__":
    main()

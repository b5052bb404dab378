"""Speed and memory of the conversions between Hugging Face folders and Megatron checkpoints.

    python benchmarks/conversion_speed.py [--model llama-3.2-1b] [--repeats 3] [--dir DIR]

Writes a folder of random bfloat16 weights in the shape of a known model (`--model`), copies its weight files
with `cp` and syncs them, converts the folder to a checkpoint and the checkpoint back, `--repeats` times over;
compares the checkpoint with the first folder and the last one, tensor by tensor. Prints the median speed of
each, as a ratio to `cp`'s too, CPU seconds, and the peak memory above that of an interpreter with the same
imports (pages of mapped files included), as a ratio to the largest weight file. Both converters sync too.
Each runs in a process of its own, whose start is not counted. Everything is read once before it is measured;
a model that does not fit the page cache is read from the disk all the same. Needs three times the model's
bytes in `--dir`.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_hacpo.convert import keep_freed_memory
from megatron_hacpo.hf.families import tensor_shapes
from megatron_hacpo.hf.write import SHARD_BYTES, copy_companions, write_weights

ROOT = Path(__file__).parents[1]
COMPANIONS = ROOT / "examples" / "tiny" / "B"

_LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
_QWEN = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
_COMMON = {"rms_norm_eps": 1e-6, "max_position_embeddings": 4096, "rope_theta": 10000.0, "dtype": "bfloat16"}
MODELS: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA,
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen2.5-7b": {
        **_QWEN,
        "vocab_size": 152_064,
        "hidden_size": 3584,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}
"""The shapes; rotary parameters and names of tokens do not matter here."""

STEPS = ("to-megatron", "to-hf")


def model_bytes(model: str) -> int:
    """Of all weights, in bfloat16."""
    shapes = tensor_shapes(SimpleNamespace(**MODELS[model]))
    return 2 * sum(torch.Size(shape).numel() for shape in shapes.values())


def write_random_folder(model: str, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """A Hugging Face folder of random bfloat16 weights below 1, with the tokenizer of a tiny agent."""
    config = {**_COMMON, **MODELS[model]}
    folder.mkdir()
    copy_companions(COMPANIONS, folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    write_weights(_random_tensors(config), folder, shard_bytes=shard_bytes)


def _random_tensors(config: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    one = int(torch.tensor(1.0, dtype=torch.bfloat16).view(torch.int16))
    generator = torch.Generator().manual_seed(1)
    for name, shape in _by_layer(tensor_shapes(SimpleNamespace(**config))):
        bits = torch.randint(one, shape, dtype=torch.int16, generator=generator)
        yield name, bits.view(torch.bfloat16)


def _by_layer(shapes: dict[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """The order of published folders: the embedding, the layers, the final norm and the output layer."""
    first = "model.embed_tokens.weight"
    last = ("model.norm.weight", "lm_head.weight")
    layers = [name for name in shapes if name != first and name not in last]
    return [(name, shapes[name]) for name in [first, *layers, *last] if name in shapes]


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def measure(step: str, source: Path, target: Path, shard_bytes: int) -> dict[str, float]:
    """What the command does, in this process: seconds, CPU seconds, peak bytes above those after imports."""
    from megatron_hacpo.megatron.convert import hf_to_megatron, megatron_to_hf
    from megatron_hacpo.megatron.runtime import Layout

    keep_freed_memory()
    torch.set_num_threads(1)
    idle = resident("VmRSS")
    start, cpu = time.perf_counter(), time.process_time()
    if step == "to-megatron":
        hf_to_megatron(source, target, layout=Layout())
    else:
        megatron_to_hf(source, target, shard_bytes=shard_bytes)
    return {
        "seconds": time.perf_counter() - start,
        "cpu": time.process_time() - cpu,
        "peak": resident("VmHWM") - idle,
    }


def convert(step: str, source: Path, target: Path, shard_bytes: int = SHARD_BYTES) -> dict[str, float]:
    """`measure` in a process of its own; RuntimeError with its output if it fails."""
    command = [sys.executable, __file__, "--measure", step, str(source), str(target), str(shard_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{step} failed:\n{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def copy(source: Path, target: Path) -> dict[str, float]:
    """`cp` of the weight files and a sync of each copy."""
    target.mkdir()
    files = sorted(source.glob("*.safetensors"))
    start, cpu = time.perf_counter(), _cpu_seconds()
    subprocess.run(["cp", "--reflink=never", *map(str, files), str(target)], check=True)
    for file in files:
        descriptor = os.open(target / file.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.perf_counter() - start, "cpu": _cpu_seconds() - cpu, "peak": 0.0}


def _cpu_seconds() -> float:
    """Of this process and of those that it waited for."""
    both = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def read_all(folder: Path) -> None:
    """So that the files are in the page cache, as far as they fit; and nothing waits to be written."""
    os.sync()
    buffer = bytearray(2**24)
    for path in folder.iterdir():
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def compare(original: Path, checkpoint: Path) -> int:
    """How many tensors the two have; RuntimeError if one differs."""
    from megatron_hacpo.megatron.verify import verify_tensors

    return verify_tensors(original, checkpoint, lambda done: None)


def run(folder: Path, repeats: int, shard_bytes: int) -> dict[str, list[dict[str, float]]]:
    """All measurements by step, in a folder that has the original in `hf`."""
    original, checkpoint, back = folder / "hf", folder / "megatron", folder / "back"
    found: dict[str, list[dict[str, float]]] = {"cp": [], **{step: [] for step in STEPS}}
    for _ in range(repeats):
        # The first of two copies is not measured: in a virtual machine the first to write into memory that
        # has lain idle waits for it, and those that follow get the same memory again.
        for copies in ([], found["cp"]):
            read_all(original)
            copies.append(copy(original, folder / "copy"))
            shutil.rmtree(folder / "copy")
        for earlier in (checkpoint, back):
            shutil.rmtree(earlier, ignore_errors=True)
        read_all(original)
        found["to-megatron"].append(convert("to-megatron", original, checkpoint, shard_bytes))
        read_all(checkpoint)
        found["to-hf"].append(convert("to-hf", checkpoint, back, shard_bytes))
    print(f"{compare(original, checkpoint)} tensors of the checkpoint and of the first folder are equal")
    print(f"{compare(back, checkpoint)} tensors of the checkpoint and of the last folder are equal")
    return found


def report(found: dict[str, list[dict[str, float]]], size: int, largest: int) -> None:
    seconds = {step: statistics.median(run["seconds"] for run in runs) for step, runs in found.items()}
    print("step         seconds   GB/s  of cp's speed  range of it   CPU s  peak GB  of the largest file")
    for step, runs in found.items():
        ratios = sorted(c["seconds"] / r["seconds"] for c, r in zip(found["cp"], runs, strict=True))
        cpu = statistics.median(run["cpu"] for run in runs)
        peak = max(run["peak"] for run in runs)
        memory = f"{peak / 1e9:8.2f} {peak / largest:20.2f}" if peak else ""
        print(
            f"{step:11} {seconds[step]:8.2f} {size / 1e9 / seconds[step]:6.2f}"
            f" {seconds['cp'] / seconds[step]:14.2f} {ratios[0]:5.2f} to {ratios[-1]:.2f} {cpu:7.2f} {memory}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-3.2-1b")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shard-gb", type=float, default=1.0, help="largest weight file (default 1)")
    parser.add_argument("--dir", type=Path, help="where to write (default: a folder for temporary files)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)  # step, source, target, shard bytes
    options = parser.parse_args()
    if options.measure:
        step, source, target, shard_bytes = options.measure
        print(json.dumps(measure(step, Path(source), Path(target), int(shard_bytes))))
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder, shard_bytes = Path(name), int(options.shard_gb * 1e9)
        write_random_folder(options.model, folder / "hf", shard_bytes)
        files = [file.stat().st_size for file in (folder / "hf").glob("*.safetensors")]
        size, largest = sum(files), max(files)
        print(f"{options.model}: {size / 1e9:.2f} GB in {len(files)} files, largest {largest / 1e9:.2f} GB")
        report(run(folder, options.repeats, shard_bytes), size, largest)


if __name__ == "__main__":
    main()

"""How long saving and loading an agent takes, against copying as many bytes to the disk.

    python benchmarks/checkpoint_speed.py [--repeats 5] [--folder DIR]

A random Llama of 0.11 billion parameters in float32 with the states of Adam, one process. Turn by turn:
`cp --reflink=never` of a checkpoint's files with fsync; a save, from policy to synced files; hashing those
files, as for a manifest; a load into another policy. Then what a checkpoint delays a step: written before the
step goes on, and from a copy while it goes on. Prints medians, and medians of the ratios within a turn.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from random_llama import make_policy, write_folder

from megatron_hacpo.checkpoint.files import describe, sync_file
from megatron_hacpo.checkpoint.saver import Saver
from megatron_hacpo.checkpoint.state import AgentState
from megatron_hacpo.config import CheckpointConfig
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.policy import Policy


def seconds(action: Callable[[], object]) -> float:
    """Wall-clock time of a call."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def copy(source: Path, target: Path) -> None:
    """With the copies on the disk itself."""
    subprocess.run(["cp", "--reflink=never", "-r", str(source), str(target)], check=True)
    for file in target.rglob("*"):
        sync_file(file)


def save(policy: Policy, folder: Path) -> None:
    """All tensors, before training goes on; without hashes."""
    folder.mkdir()
    writing = policy.state_writing(folder, copy=False)
    writing.write()
    writing.collect()
    writing.describe()


def give_states(policy: Policy) -> None:
    """Adam's states, which random gradients make."""
    for part in policy._parts:
        for buffer in part.buffers:
            buffer.grad_data.normal_(std=1e-3)
    policy._optimizer.step()
    policy.updates = 1


def state(step: int) -> AgentState:
    return AgentState(
        agent="A",
        step=step,
        updates=1,
        capability={},
        warned=[],
        nonfinite_updates=0,
        wide_gap_steps=0,
        layout={},
    )


def delays(
    policy: Policy, model: Path, folder: Path, world: runtime.World, *, asynchronous: bool
) -> list[float]:
    """What two checkpoints delay their steps, hashes included; the first finds no buffers to use again."""
    settings = CheckpointConfig(asynchronous=asynchronous)
    saver = Saver(
        folder,
        "A",
        model,
        world,
        settings,
        None,
        finished=lambda step: None,
        warn=print,
        on_phase=lambda step, phase: None,
    )
    found = []
    for step in (1, 2):
        delay = seconds(lambda step=step: saver.begin(policy, state(step)))
        if asynchronous:
            while not saver.has_written():
                time.sleep(0.05)
        found.append(delay + seconds(lambda: saver.settle(wait=True)))
    shutil.rmtree(folder)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with (
        tempfile.TemporaryDirectory(dir=options.folder) as folder,
        runtime.alone(torch.device("cpu")) as world,
    ):
        measure(Path(folder), world, options.repeats)


def measure(folder: Path, world: runtime.World, repeats: int) -> None:
    """See the module."""
    model = folder / "model"
    write_folder(model)
    policy, other = make_policy(model, world), make_policy(model, world)
    give_states(policy)
    give_states(other)
    save(policy, folder / "first")
    size = sum(file.stat().st_size for file in (folder / "first").iterdir())
    copied, saved, hashed, loaded, waited, went_on = ([] for _ in range(6))
    for _ in range(repeats):
        copied.append(seconds(lambda: copy(folder / "first", folder / "copy")))
        # Pages that a file has freed are written faster than new ones: both begin with as many of them.
        shutil.rmtree(folder / "copy")
        saved.append(seconds(lambda: save(policy, folder / "saved")))
        hashed.append(seconds(lambda: [describe(file) for file in (folder / "saved").iterdir()]))
        loaded.append(seconds(lambda: other.load_state(folder / "saved", updates=1)))
        shutil.rmtree(folder / "saved")
        waited.append(delays(policy, model, folder / "run", world, asynchronous=False)[-1])
        went_on.append(delays(policy, model, folder / "run", world, asynchronous=True)[-1])
    median = statistics.median
    print(f"{size / 1e9:.2f} GB of weights and states; medians of {repeats}")
    for name, times in (("copied", copied), ("saved", saved), ("hashed", hashed), ("loaded", loaded)):
        print(f"{name:8} {median(times):6.2f} s  {size / 1e9 / median(times):5.2f} GB/s")
    print(f"save / copy, speed: {median(c / s for c, s in zip(copied, saved, strict=True)):.2f}")
    print(f"load / copy, speed: {median(c / s for c, s in zip(copied, loaded, strict=True)):.2f}")
    print(
        f"a checkpoint delays its step by {median(waited):.2f} s, written meanwhile {median(went_on):.2f} s"
    )
    print(f"meanwhile / before: {median(a / b for a, b in zip(went_on, waited, strict=True)):.2f}")


if __name__ == "__main__":
    main()

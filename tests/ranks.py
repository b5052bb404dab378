"""Worlds of real processes for tests: `python WORKER RANK PORT FOLDER [OPTION ...]` each."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_hacpo.megatron import runtime

TIMEOUT_SECONDS = 1800


def run_ranks(worker: str, ranks: int, folder: Path, *options: str) -> None:
    """Start `ranks` processes of tests/WORKER, which meet at a store on PORT, and wait for all of them.

    Their output goes to FOLDER/rankN.log; its ends are shown if one fails.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank{rank}.log" for rank in range(ranks)]
    processes = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(Path(__file__).with_name(worker)), str(rank), str(store.port)]
        with log.open("w") as file:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(
                subprocess.Popen([*command, str(folder), *options], stdout=file, stderr=file, env=environment)
            )
    codes = [process.wait(timeout=TIMEOUT_SECONDS) for process in processes]
    assert codes == [0] * ranks, "\n".join(log.read_text()[-3000:] for log in logs)


def join_world(name: str, store: dist.Store, rank: int, layout: runtime.Layout) -> runtime.World:
    """A worker's place in a world of the given layout; `name` keeps worlds on one store apart."""
    return runtime.start(
        store=dist.PrefixStore(name, store),
        rank=rank,
        layout=layout,
        seed=1,
        timeout=timedelta(minutes=5),
    )

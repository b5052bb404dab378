"""The processes of a run on this machine alone."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_hacpo.config import RunConfig
from megatron_hacpo.launch.folder import CONFIG
from megatron_hacpo.launch.placement import Node, Placement, rank_name, this_machine
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, read_code


class ThisMachine:
    """Implements `run.Machines`: one process for each rank; an agent's first one starts its servers."""

    blame_seconds = 1.5

    def __init__(self, host: str = "127.0.0.1") -> None:
        """host: address on which the processes meet."""
        self.host = host
        self.nodes: list[Node] = this_machine()
        self.note: dict[str, str] = {}

    def workers(
        self, config: RunConfig, placements: Sequence[Placement], store: str, start: int
    ) -> list[Worker]:
        return [
            worker(placement, rank, config.path, store, start)
            for placement in placements
            for rank in range(placement.world_size)
        ]

    def failures(self, worker: Worker, code: int | None) -> list[WorkerFailed]:
        return read_code(worker, code) if code is not None else []


def worker(placement: Placement, rank: int, run_dir: Path, store: str, start: int) -> Worker:
    """The process that trains as `rank` after step `start`; it reads the resolved configuration."""
    name = rank_name(placement.agent, rank)
    servers = placement.servers[0].first if placement.servers else 0
    return Worker(
        name,
        run_dir / "logs" / f"{name}.log",
        placement.agent,
        command=[sys.executable, *train_command(run_dir, placement.agent, start)],
        environment={
            **defaults(),
            "RANK": str(rank),
            "WORLD_SIZE": str(placement.world_size),
            "LOCAL_RANK": str(placement.ranks[0].first + rank),
            "HACPO_SERVER_GPU": str(servers),
            "HACPO_STORE": store,
        },
    )


def train_command(run_dir: Path, agent: str, start: int) -> list[str]:
    """Arguments of a Python that is one process of an agent."""
    config = str(run_dir / CONFIG)
    return ["-m", "megatron_hacpo", "train", config, "--agent", agent, "--from-step", str(start)]


def defaults() -> Mapping[str, str]:
    """What a process has in its environment where the launcher's does not say otherwise."""
    values = {
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "HACPO_TRACEBACK": "1",
        "NCCL_CUMEM_ENABLE": "0",  # as in SGLang's servers: who is in one group must have it alike
    }
    return {key: os.environ.get(key, value) for key, value in values.items()}

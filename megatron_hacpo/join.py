"""How a process finds its place in a run: from its environment to the others that it talks to."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.megatron import runtime
from megatron_hacpo.process.heartbeat import Heartbeat
from megatron_hacpo.process.network import use_interface_towards
from megatron_hacpo.process.store import STORE_VARIABLE, connect, store_address


@dataclass(frozen=True)
class Place:
    """Where one process of agent `name` stands in a run, and whom it talks to.

    sources: the agents that it exchanges with, itself included. store: the run's; None without a launcher.
    timeout: of all waiting for others. on_phase: tells the launcher the step and the phase that begins.
    """

    config: RunConfig
    name: str
    sources: list[str]
    store: dist.Store | None
    timeout: timedelta
    world: runtime.World
    on_phase: Callable[[int, str], None]

    @property
    def settings(self) -> AgentConfig:
        return self.config.agents[self.name]


def join(config: RunConfig, name: str) -> Place:
    """Meet the launcher, if there is one, and the agent's other processes.

    Raises ValueError for an environment that does not fit the configuration.
    """
    on_phase = _on_phase(f"{name}.rank{_number('RANK', 0)}")
    torch.set_num_threads(_number("OMP_NUM_THREADS", 1))
    sources = config.names if config.algorithm.share else [name]
    timeout = timedelta(minutes=config.exchange.timeout_minutes)
    store = _run_store(name, sources, timeout)
    layout = runtime.Layout(**config.agents[name].parallel.model_dump())
    world_store, rank = _world_store(store, name, layout.world_size)
    world = runtime.start(store=world_store, rank=rank, layout=layout, seed=config.run.seed, timeout=timeout)
    return Place(config, name, sources, store, timeout, world, on_phase)


def _on_phase(name: str) -> Callable[[int, str], None]:
    """Tells the launcher, if there is one, the step and the phase that begins; from now on it hears us."""
    address = store_address()
    return (lambda step, phase: None) if address is None else Heartbeat(address, name).phase


def _run_store(name: str, sources: list[str], timeout: timedelta) -> dist.Store | None:
    """Where all agents meet; None for one that meets nobody and was started without a launcher."""
    if (address := store_address()) is not None:
        use_interface_towards(address[0])
        return connect(address, timeout)
    if len(sources) > 1:
        raise ValueError(
            f"{STORE_VARIABLE}: not set, but {name} exchanges with {len(sources) - 1} other agents; "
            "start the run with `hacpo launch`, or set it to the host:port of the run's TCPStore"
        )
    return None


def _world_store(store: dist.Store | None, name: str, world_size: int) -> tuple[dist.Store, int]:
    """Where this agent's ranks meet, and this process's rank: the run's store, else torchrun's, else none."""
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise ValueError(f"RANK: {rank} is not below WORLD_SIZE = {size}; ranks count from 0")
    if size != world_size:
        raise ValueError(
            f"agents.{name}.parallel: its sizes multiply to {world_size}, but {size} processes were started; "
            "start as many as the product, or change the sizes"
        )
    if store is not None:
        return dist.PrefixStore(f"world/{name}", store), rank
    if "MASTER_ADDR" in os.environ:
        env_store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size))
        return env_store, rank
    if size > 1:
        raise ValueError(
            f"MASTER_ADDR: not set, but agent {name} has {size} processes; use torchrun or `hacpo launch`"
        )
    return dist.HashStore(), rank


def _number(variable: str, default: int) -> int:
    """A whole number from the environment; of a list such as OMP_NUM_THREADS=4,2 the first."""
    value = os.environ.get(variable, str(default)).split(",")[0]
    if not value.isdigit():
        raise ValueError(f"{variable}: {value!r} is not a whole number; correct the environment")
    return int(value)

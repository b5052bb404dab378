"""Servers on other nodes: a process there starts and ends one, as the leader orders in the store.

The leader has a `RemoteServer` for each, to be used as if it had started the server itself.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_hacpo.config import RunConfig
from megatron_hacpo.process.heartbeat import Heartbeat
from megatron_hacpo.process.network import joined, own_address, use_interface_towards
from megatron_hacpo.process.store import STORE_VARIABLE, connect, store_address
from megatron_hacpo.rollout.sglang.client import ServerClient
from megatron_hacpo.rollout.sglang.ports import Ports
from megatron_hacpo.rollout.sglang.server import (
    GPU_VARIABLE,
    POLL_SECONDS,
    ManagedServer,
    failure,
    last_lines,
    server_log,
    server_name,
    server_spec,
)

if TYPE_CHECKING:
    from torch.distributed import Store

KEY_VARIABLE = "HACPO_SERVER_KEY"
"""Environment variable: the API key of the servers of a run whose servers are started on their nodes; not set
where an agent's leader starts them itself."""

ORDER_SECONDS = 0.2


class _Keys:
    """In the store, of one server's place. order: the number of the process that is to run there, and the
    tokens of its cache or 0. started, ended and kill, each with such a number: that the process runs, has
    ended, or has to end."""

    def __init__(self, agent: str, number: int) -> None:
        place = f"servers/{agent}/{number}"
        self.address, self.order = f"{place}/address", f"{place}/order"
        self.started, self.ended, self.kill = f"{place}/started", f"{place}/ended", f"{place}/kill"


def serve(config: RunConfig, agent: str, number: int) -> None:
    """Run server `number` of an agent on this node, as its leader orders; ends with the run.

    Raises ValueError without the run's store and key.
    """
    import torch

    address, key = store_address(), os.environ.get(KEY_VARIABLE)
    if address is None or key is None:
        raise ValueError(
            f"{STORE_VARIABLE}, {KEY_VARIABLE}: not set; `hacpo launch --slurm` starts servers, or "
            "`rollout.sglang.addresses` names those that run already"
        )
    use_interface_towards(address[0])
    store = connect(address)
    host = own_address(address[0])
    ports = Ports(host, 2)
    spec = server_spec(
        config.agents[agent],
        context=config.longest(agent),
        host=host,
        first_gpu=int(os.environ.get(GPU_VARIABLE, "0")) if torch.cuda.is_available() else None,
        seed=config.server_seed(agent) + number,
        key=key,
    )
    keys = _Keys(agent, number)
    Heartbeat(address, server_name(agent, number)).phase(0, "serve")
    store.set(keys.address, joined(host, ports.first))
    server, current = None, -1
    while True:
        ordered, cache = map(int, store.get(keys.order).split()) if store.check([keys.order]) else (-1, 0)
        if ordered > current:
            if server is not None:
                server.kill()
            current = ordered
            log = server_log(config.path, agent, number, current)
            server = ManagedServer(spec.with_cache(cache or None), log, ports)
            store.set(f"{keys.started}/{current}", "")
        elif server is not None and store.check([f"{keys.kill}/{current}"]):
            server.kill()
        elif server is not None and not server.alive():
            store.set(f"{keys.ended}/{current}", "")
        time.sleep(ORDER_SECONDS)


class RemoteServer:
    """A server that another node has been ordered to start, and a client for it."""

    def __init__(
        self,
        store: "Store",
        address: str,
        key: str,
        log: Path,
        keys: _Keys,
        current: int,
        cache_tokens: int | None,
    ) -> None:
        """current: counts the processes that were ordered for this place."""
        self._store = store
        self._log = log
        self._keys = keys
        self._current = current
        self.client = ServerClient(f"http://{address}", key)
        store.set(keys.order, f"{current} {cache_tokens or 0}")

    async def ready(self, seconds: float) -> None:
        """As `ManagedServer.ready`."""
        deadline = time.monotonic() + seconds
        while not self._store.check([f"{self._keys.ended}/{self._current}"]):
            started = self._store.check(
                [f"{self._keys.started}/{self._current}"]
            )  # else its predecessor answers
            if started and await self.client.unhealthy(max(5.0, POLL_SECONDS)) is None:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(failure(self.client, self._log, f"does not answer after {seconds:g} s"))
            await asyncio.sleep(POLL_SECONDS)
        raise RuntimeError(failure(self.client, self._log, "ended while it was starting"))

    def kill(self) -> None:
        """Order its end; returns at once."""
        self._store.set(f"{self._keys.kill}/{self._current}", "")

    def last_lines(self) -> str:
        return last_lines(self._log)


class RemotePlace:
    """Where an agent's server runs that its leader does not start itself. Calling it starts a process."""

    def __init__(self, store: "Store", run_dir: Path, agent: str, number: int, key: str) -> None:
        """Waits until the node says where its server will listen."""
        self._store = store
        self._run_dir = run_dir
        self._agent, self._number = agent, number
        self._key = key
        self._keys = _Keys(agent, number)
        try:
            self._address = store.get(self._keys.address).decode()
        except RuntimeError as error:
            name = server_name(agent, number)
            raise RuntimeError(
                f"{name} has not started on its node; its log is {run_dir}/logs/{name}.srun.log"
            ) from error
        self._starts = 0

    def __call__(self, cache_tokens: int | None = None) -> RemoteServer:
        current, self._starts = self._starts, self._starts + 1
        log = server_log(self._run_dir, self._agent, self._number, current)
        return RemoteServer(self._store, self._address, self._key, log, self._keys, current, cache_tokens)

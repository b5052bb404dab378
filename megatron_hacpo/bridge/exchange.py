"""The only meeting point of the agents: every step, each gets what all of them contributed."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_hacpo.bridge.trajectory import Contribution, decode, encode, save_atomically

CHUNK_BYTES = 64 * 1024 * 1024


class Exchange:
    """All-gather of contributions among the agents' leaders, passed on to every rank of each agent's world.

    The leaders meet in a gloo group of their own over `store`. `timeout` must outlast the slowest agent's
    step: it is no sign of life. One agent alone needs no store and sends nothing.
    """

    def __init__(
        self,
        *,
        store: dist.Store | None,
        agents: Sequence[str],
        me: str,
        pool_dir: Path,
        keep: int,
        timeout: timedelta,
        generation: int = 0,
        is_leader: bool = True,
        broadcast: Callable[[bytes | None], bytes] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Join the exchange; a leader waits here for the other leaders.

        agents: all names, in the same order everywhere.
        pool_dir: own contributions are kept in `pool_dir/step_N/pool/ME`, those of the last `keep` steps.
        generation: counts the memberships of the run; a new one needs a new exchange.
        broadcast: gives the leader's bytes to every rank of this agent's world; None for a world of one rank.
        chunk_bytes: most bytes of each agent that are in flight at once.
        """
        assert me in agents
        assert len(set(agents)) == len(agents)
        assert keep >= 1
        assert chunk_bytes >= 1
        assert is_leader or broadcast is not None
        self.waited_seconds = 0.0
        self._agents = list(agents)
        self._me = me
        self._pool_dir = pool_dir
        self._keep = keep
        self._is_leader = is_leader
        self._broadcast = broadcast
        self._chunk_bytes = chunk_bytes
        self._arrivals: dist.Store | None = None
        self._group: Any = None  # torch's stubs lack the collectives of ProcessGroupGloo
        if is_leader and len(agents) > 1:
            assert store is not None, "several agents need the launcher's store"
            self._arrivals = dist.PrefixStore(f"arrivals/{generation}", store)
            prefixed = dist.PrefixStore(f"exchange/{generation}", store)
            self._group = dist.ProcessGroupGloo(prefixed, self._agents.index(me), len(agents), timeout)

    def all_gather(self, contribution: Contribution | None) -> list[Contribution]:
        """Everybody's contributions in agent order, on every rank; the leader gives its own, others None.

        Afterwards `waited_seconds` says how long this leader waited for the slowest agent.
        Raises ValueError, on every rank, if a contribution cannot be read, or an agent is in another
        generation or step or has other prompts.
        """
        parts: list[bytes | None] = [None] * len(self._agents)
        if self._is_leader:
            assert contribution is not None
            assert contribution.agent == self._me
            data = encode(contribution)
            self._keep_in_pool(contribution.step, data)
            parts = [*self._gather_bytes(data, contribution.step)]
        pool = []  # decoded one by one, so that each one's bytes are freed
        for i, agent in enumerate(self._agents):
            part, parts[i] = parts[i], None
            pool.append(self._read(agent, part))
        self._require_agreement(pool)
        return pool

    def close(self) -> None:
        """Leave together with the other leaders, at the end of a run that went well."""
        if self._group is not None:
            self._group.barrier().wait()
            self._group = None

    def _keep_in_pool(self, step: int, data: bytes) -> None:
        save_atomically(self._pool_dir / f"step_{step}" / "pool" / self._me, data)
        for file in self._pool_dir.glob(f"step_*/pool/{self._me}"):
            folder = file.parent.parent
            if int(folder.name.removeprefix("step_")) <= step - self._keep:
                file.unlink()
                with suppress(OSError):  # not empty while another agent's file is there
                    file.parent.rmdir()
                    folder.rmdir()

    def _gather_bytes(self, data: bytes, step: int) -> list[bytes]:
        if self._group is None:
            return [data]
        n = len(self._agents)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
        start = time.monotonic()
        assert self._arrivals is not None
        self._arrivals.set(f"{step}/{self._me}", "here")
        try:
            self._group.allgather([lengths], [torch.tensor([len(data)])]).wait()
        except RuntimeError as error:
            absent = [a for a in self._agents if not self._arrivals.check([f"{step}/{a}"])]
            if not absent:
                raise
            raise RuntimeError(
                f"step {step}: agents {', '.join(absent)} did not come to the exchange, which ended after "
                f"{time.monotonic() - start:.0f} s; dead, stopped, or slower than exchange.timeout_minutes"
            ) from error
        self.waited_seconds = time.monotonic() - start
        received = [bytearray(int(length)) for length in lengths]
        longest = max(len(buffer) for buffer in received)
        for offset in range(0, longest, self._chunk_bytes):
            size = min(self._chunk_bytes, longest - offset)
            chunk = bytearray(data[offset : offset + size].ljust(size, b"\0"))
            chunks = [torch.empty(size, dtype=torch.uint8) for _ in range(n)]
            self._group.allgather([chunks], [torch.frombuffer(chunk, dtype=torch.uint8)]).wait()
            for buffer, tensor in zip(received, chunks, strict=True):
                end = min(len(buffer), offset + size)
                if end > offset:
                    buffer[offset:end] = tensor[: end - offset].numpy().tobytes()
        return [bytes(buffer) for buffer in received]

    def _read(self, agent: str, part: bytes | None) -> Contribution:
        data = part if self._broadcast is None else self._broadcast(part)
        assert data is not None
        try:
            return decode(data)
        except ValueError as error:
            raise ValueError(f"agent {agent}: {error}") from error

    def _require_agreement(self, pool: Sequence[Contribution]) -> None:
        mine = pool[self._agents.index(self._me)]
        for agent, theirs in zip(self._agents, pool, strict=True):
            if theirs.agent != agent:
                raise ValueError(
                    f"agent {theirs.agent} is in the place of agent {agent}: list agents in one order"
                )
            for name in ("generation", "step", "prompts"):
                here, there = getattr(mine, name), getattr(theirs, name)
                if here != there:
                    raise ValueError(
                        f"agent {agent} has {name} {there}, agent {self._me} has {here}: "
                        "start all agents from one checkpoint with one config"
                    )

"""The only meeting point of the agents: every step, each gets what all of them contributed."""

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import msgspec
import torch
import torch.distributed as dist

from megatron_hacpo.bridge.members import START, Members, absence
from megatron_hacpo.bridge.trajectory import Contribution, decode, encode

CHUNK_BYTES = 64 * 1024 * 1024


class _Header(msgspec.Struct):
    """What every rank needs to know before the contributions: whose they are, and whose come next time."""

    pool: list[str]
    agents: list[str]


class Exchange:
    """All-gather of contributions among the agents' leaders, passed on to every rank of each agent's world.

    The leaders meet in a gloo group of their own over `store`. `timeout` must outlast the slowest agent's
    step: it is no sign of life. One agent alone needs no store and sends nothing.

    With `survives`, the others go on when an agent is lost: after an error the leaders form a new group with
    those whom the launcher announces (`bridge.members.announce`) and gather again. If some had completed the
    step, all are to train on the same responses: those who had not complete it with what the old members had
    saved, the lost one included.

    agents: the current members, in the same order everywhere. waited_seconds: how long this leader waited
    for the slowest agent in the last exchange.
    """

    def __init__(
        self,
        *,
        store: dist.Store | None,
        agents: Sequence[str],
        me: str,
        save: Callable[[int, bytes], None],
        load: Callable[[int, str], bytes | None],
        timeout: timedelta,
        survives: bool = False,
        loss_seconds: float = 60.0,
        is_leader: bool = True,
        broadcast: Callable[[bytes | None], bytes] | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Join the exchange; a leader waits here for the other leaders.

        agents: all names, in the same order everywhere.
        save: called with the step and this agent's encoded contribution before it is sent, a second time if
            it is sent again.
        load: what an agent (named) saved for a step, None if there is nothing. Asked for the last exchanged
            step while others may have saved the next one already.
        loss_seconds: longest wait, after an error, for the launcher to announce who is left.
        broadcast: gives the leader's bytes to every rank of this agent's world; None for a world of one rank.
        chunk_bytes: most bytes of each agent that are in flight at once.
        Raises RuntimeError if somebody does not come within `timeout`.
        """
        assert me in agents
        assert len(set(agents)) == len(agents)
        assert chunk_bytes >= 1
        assert is_leader or broadcast is not None
        self.agents = list(agents)
        self.waited_seconds = 0.0
        self._me = me
        self._save = save
        self._load = load
        self._broadcast = broadcast
        self._chunk_bytes = chunk_bytes
        self._step = START
        self._members: Members | None = None  # on leaders
        if is_leader:
            self._members = Members(
                store, agents, me, timeout=timeout, loss_seconds=loss_seconds if survives else None
            )
            self._members.meet(START)

    def all_gather(self, contribution: Contribution | None) -> list[Contribution]:
        """Everybody's contributions in agent order, on every rank; the leader gives its own, others None.

        They are of those who were members when the step was exchanged (`Contribution.agent` says who);
        `agents` may have fewer afterwards. `generation` is filled in here.
        Raises ValueError, on every rank, if a contribution cannot be read, or an agent is in another
        generation or step or has other prompts. Raises RuntimeError on the leader if an agent is lost and
        the others cannot go on.
        """
        header, parts = None, None
        if self._members is not None:
            assert contribution is not None
            assert contribution.agent == self._me
            pool, parts = self._gather(self._members, contribution)
            header = msgspec.json.encode(_Header(pool, self._members.agents))
        agreed = msgspec.json.decode(self._share(header), type=_Header)
        self.agents = agreed.agents
        contributions = []  # decoded one by one, so that each one's bytes are freed
        for agent in agreed.pool:
            data = self._share(parts.pop(0) if parts is not None else None)
            contributions.append(_read(data, agent))
        self._require_agreement(contributions, agreed.pool)
        return contributions

    def close(self) -> None:
        """Leave together with the other leaders, at the end of a run that went well."""
        if self._members is not None:
            self._members.leave(self._step + 1)

    def _share(self, data: bytes | None) -> bytes:
        """The leader's bytes on every rank."""
        shared = data if self._broadcast is None else self._broadcast(data)
        assert shared is not None
        return shared

    def _gather(self, members: Members, contribution: Contribution) -> tuple[list[str], list[bytes]]:
        """The members of the step's exchange and what they contributed; again for as long as one is lost."""
        step, start = contribution.step, time.monotonic()
        self._step = step
        agents, data = members.agents, encode(contribution)
        while True:
            if members.meet(step):
                # The others will not meet for this step again. They have got it from all who were members at
                # this leader's last attempt: an exchange is completed only if all take part in it.
                self.waited_seconds = time.monotonic() - start
                return agents, [data if a == self._me else self._saved(step, a) for a in agents]
            agents = members.agents
            data = encode(msgspec.structs.replace(contribution, generation=members.generation))
            self._save(step, data)
            try:
                return agents, self._gather_bytes(members, data, step, start)
            except RuntimeError as error:
                members.advance(error)

    def _saved(self, step: int, agent: str) -> bytes:
        data = self._load(step, agent)
        if data is None:
            raise RuntimeError(
                f"step {step}: other agents have completed the exchange, but what agent {agent} contributed "
                "is not on disk; all agents must see one run.dir"
            )
        return data

    def _gather_bytes(self, members: Members, data: bytes, step: int, start: float) -> list[bytes]:
        n = len(members.agents)
        if n == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(n)]
        members.arrive(step)
        try:
            members.group.allgather([lengths], [torch.tensor([len(data)])]).wait()
        except RuntimeError as error:
            absent = members.absent(step)
            if not absent:
                raise
            raise absence(step, absent, time.monotonic() - start) from error
        self.waited_seconds = time.monotonic() - start
        received = [bytearray(int(length)) for length in lengths]
        longest = max(len(buffer) for buffer in received)
        for offset in range(0, longest, self._chunk_bytes):
            size = min(self._chunk_bytes, longest - offset)
            chunk = bytearray(data[offset : offset + size].ljust(size, b"\0"))
            chunks = [torch.empty(size, dtype=torch.uint8) for _ in range(n)]
            members.group.allgather([chunks], [torch.frombuffer(chunk, dtype=torch.uint8)]).wait()
            for buffer, tensor in zip(received, chunks, strict=True):
                end = min(len(buffer), offset + size)
                if end > offset:
                    buffer[offset:end] = tensor[: end - offset].numpy().tobytes()
        return [bytes(buffer) for buffer in received]

    def _require_agreement(self, contributions: Sequence[Contribution], agents: Sequence[str]) -> None:
        mine = contributions[agents.index(self._me)]
        for agent, theirs in zip(agents, contributions, strict=True):
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


def _read(data: bytes, agent: str) -> Contribution:
    try:
        return decode(data)
    except ValueError as error:
        raise ValueError(f"agent {agent}: {error}") from error

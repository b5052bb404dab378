"""The servers of one agent: which there are, which hold the current weights, and how they come back."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from megatron_hacpo.rollout.sglang.client import ServerClient, ServerGone
from megatron_hacpo.rollout.sglang.remote import RemotePlace, RemoteServer
from megatron_hacpo.rollout.sglang.server import LocalPlace, ManagedServer

State = Literal["starting", "stale", "serving", "lost"]
"""starting: not answering yet. stale: healthy, with other weights than the policy's. serving: may generate.
lost: dead, and not to be started again."""

Memory = Literal["weights", "kv_cache"]
MEMORY: tuple[Memory, ...] = get_args(Memory)
"""What a server can give back; a started one has both."""


Server = ManagedServer | RemoteServer
Place = LocalPlace | RemotePlace
"""Calling it starts a server, with a cache of at most so many tokens if they are given."""


@dataclass(eq=False)
class Member:
    """One server's place. server: None for one that somebody else started. start: makes a new process.
    incarnation: counts the processes that had this place. holds: which of a GPU's memory it has.
    cache_tokens: size of the first one's cache, which the others get, too: where a trainer has left the GPU
    for a while, one that starts meanwhile must not take its place."""

    number: int
    client: ServerClient
    tensor: int
    server: Server | None = None
    start: Place | None = None
    restarts_left: int = 0
    state: State = "starting"
    incarnation: int = 0
    holds: set[Memory] = field(default_factory=lambda: set(MEMORY))
    cache_tokens: int | None = None
    why_lost: str = field(default="")

    @property
    def name(self) -> str:
        return f"server {self.number} ({self.client.url})"


class Members:
    """All servers of an agent. To be used in the event loop of their clients, but for the properties."""

    def __init__(
        self, members: Sequence[Member], *, start_seconds: float, warn: Callable[[str], None]
    ) -> None:
        """start_seconds: until one must answer. warn: told in one line of all that is lost or comes back."""
        self.all = list(members)
        self._start_seconds = start_seconds
        self._warn = warn
        self.changed = asyncio.Event()
        self._restarts: set[asyncio.Task[None]] = set()

    def of(self, *states: State) -> list[Member]:
        """Those in one of these states."""
        return [member for member in self.all if member.state in states]

    def describe_losses(self) -> str:
        """Why each is gone, a line each, below the ends of their logs."""
        logs = [member.server.last_lines() for member in self.all if member.server is not None]
        return "\n".join([*logs, *(f"{member.name}: {member.why_lost}" for member in self.all)])

    async def fail(self, member: Member, why: str, incarnation: int | None = None) -> None:
        """`member` is dead or hangs: end its process and, within its budget, have another one started.

        Returns at once; the new process becomes "stale" when it answers. Whoever notices first counts.
        incarnation: the process that it is said of; None: the present one.
        """
        if member.state in ("starting", "lost") or incarnation not in (None, member.incarnation):
            return
        member.state, member.why_lost = "starting", why
        if member.server is not None:
            member.server.kill()
        await member.client.close()
        if member.start is None or member.restarts_left == 0:
            member.state = "lost"
            self._warn(f"SGLang {member.name} is lost ({why})")
        else:
            member.restarts_left -= 1
            self._warn(f"SGLang {member.name} is started again ({why}); {member.restarts_left} more times")
            member.server = member.start(member.cache_tokens)
            member.client = member.server.client
            member.incarnation += 1
            member.holds = set(MEMORY)
            restart = asyncio.ensure_future(self._until_ready(member))
            self._restarts.add(restart)
            restart.add_done_callback(self._restarts.discard)
        self._notify()

    async def start_all(self) -> None:
        """Wait until all that are starting answer; raises RuntimeError if one does not."""
        starting = [m for m in self.of("starting") if m.server is not None]
        await asyncio.gather(*(m.server.ready(self._start_seconds) for m in starting if m.server is not None))
        for member in self.of("starting"):
            member.state = "stale"

    async def hold(self, tag: Memory, held: bool) -> None:
        """Have every server that lives take or give back memory, where it does not do so already: SGLang dies
        of taking what it has. One that does not answer is failed. What is given back is nobody's any more:
        those that are being started are waited for."""
        path = "/resume_memory_occupation" if held else "/release_memory_occupation"
        while self._restarts and not held:
            await asyncio.gather(*self._restarts, return_exceptions=True)
        asked = [m for m in self.of("stale", "serving") if (tag in m.holds) != held]
        posts = (m.client.post(path, {"tags": [tag]}) for m in asked)
        answers = await asyncio.gather(*posts, return_exceptions=True)
        for member, answer in zip(asked, answers, strict=True):
            if isinstance(answer, ServerGone):
                await self.fail(member, str(answer))
            elif isinstance(answer, BaseException):
                raise answer
            else:
                member.holds ^= {tag}
        if self._restarts and not held:
            await self.hold(tag, held)

    async def close(self) -> None:
        """End the run's own servers, which hold nothing that is worth waiting for."""
        for restart in self._restarts:
            restart.cancel()
        for member in self.all:
            await member.client.close()
            if member.server is not None:
                member.server.kill()

    async def _until_ready(self, member: Member) -> None:
        assert member.server is not None
        try:
            await member.server.ready(self._start_seconds)
        except RuntimeError as error:
            member.state = "stale"  # or `fail` would take it for one that is being started already
            await self.fail(member, str(error).splitlines()[-1])
            return
        member.state = "stale"
        self._notify()

    def _notify(self) -> None:
        self.changed.set()

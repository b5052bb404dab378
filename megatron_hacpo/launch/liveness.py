"""Which processes have stopped giving signs of life."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hacpo.process.heartbeat import ENDED, Beat, read_beats

if TYPE_CHECKING:
    from torch.distributed import Store

LONGEST_LOOK_SECONDS = 5.0
"""Time between two looks that counts at most: all may have been suspended together with the launcher."""


UNLIMITED = ("evaluate", "serve")
"""Phases in which nobody is waited for."""


@dataclass(frozen=True)
class Hung:
    """A process that hangs: `reason` is what is wrong with it, to follow its name."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


@dataclass
class _Seen:
    """Of a process's beats: the last number, and since when number and phase have been the same."""

    number: int
    phase: tuple[int, str]
    number_since: float
    phase_since: float


class Liveness:
    """Judges beats by the launcher's own clock: how long ago it saw them, or what they tell, change."""

    def __init__(
        self, store: "Store", names: Sequence[str], stale_seconds: float, phase_seconds: float
    ) -> None:
        """stale_seconds: longest silence of a living process; several times its seconds between beats.
        phase_seconds: longest stay in one phase of a step. Who waits for a process that hangs came to its
        phase later, so the one to blame is found first."""
        self._store = store
        self._names = list(names)
        self._stale_seconds = stale_seconds
        self._phase_seconds = phase_seconds
        self._looked: float | None = None
        self._watched = 0.0
        self._seen: dict[str, _Seen] = {}

    def look(self, now: float) -> list[Hung]:
        """Processes that have been silent, or in one phase, for too long; `now` is of `time.monotonic`. To be
        called often.

        Before its first beat a process is not silent, since starting takes long, nor after its last.
        """
        if self._looked is not None:
            self._watched += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        hung = []
        for name, beat in read_beats(self._store, self._names).items():
            if (reason := self._judge(name, beat)) is not None:
                hung.append(Hung(name, reason))
        return hung

    def _judge(self, name: str, beat: Beat | None) -> str | None:
        now = self._watched
        if beat is None:
            late = now > self._phase_seconds
            return f"has not started within {now:.0f} s (exchange.timeout_minutes)" if late else None
        if beat.phase == ENDED:
            return None
        phase = (beat.step, beat.phase)
        seen = self._seen.setdefault(name, _Seen(beat.number, phase, now, now))
        if beat.number != seen.number:
            seen.number, seen.number_since = beat.number, now
        if phase != seen.phase:
            seen.phase, seen.phase_since = phase, now
        if (silent := now - seen.number_since) > self._stale_seconds:
            return f"has given no sign of life for {silent:.0f} s (last: {beat.phase} of step {beat.step})"
        stayed = now - seen.phase_since
        if stayed > self._phase_seconds and beat.phase not in UNLIMITED:
            return (
                f"has been at {beat.phase} of step {beat.step} for {stayed:.0f} s (exchange.timeout_minutes)"
            )
        return None

"""Which processes have stopped giving signs of life."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_hacpo.process.heartbeat import Beat, read_beats

if TYPE_CHECKING:
    from torch.distributed import Store

LONGEST_LOOK_SECONDS = 5.0
"""Time between two looks that counts at most: all may have been suspended together with the launcher."""


@dataclass(frozen=True)
class Silent:
    """A process without a sign of life for `seconds` after its `last` one."""

    name: str
    seconds: float
    last: Beat

    @property
    def reason(self) -> str:
        """What is wrong with it, to follow its name."""
        return (
            f"has given no sign of life for {self.seconds:.0f} s (last: {self.last.phase} of step "
            f"{self.last.step})"
        )

    def __str__(self) -> str:
        return f"{self.name} {self.reason}"


class Liveness:
    """Judges beats by the launcher's own clock: how long ago it saw a process's count change."""

    def __init__(self, store: "Store", names: Sequence[str], stale_seconds: float) -> None:
        """stale_seconds: longest silence of a living process; several times its seconds between beats."""
        self._store = store
        self._names = list(names)
        self._stale_seconds = stale_seconds
        self._looked: float | None = None
        self._watched = 0.0
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, now: float) -> list[Silent]:
        """Processes that have been silent for too long; `now` is of `time.monotonic`. To be called often.

        Before its first beat a process is not silent: starting takes long. One that has ended is: the caller
        knows which still run.
        """
        if self._looked is not None:
            self._watched += min(now - self._looked, LONGEST_LOOK_SECONDS)
        self._looked = now
        silent = []
        for name, beat in read_beats(self._store, self._names).items():
            if beat is None:
                continue
            number, since = self._seen.get(name, (0, 0.0))
            if beat.number != number:
                since = self._watched
                self._seen[name] = beat.number, since
            if self._watched - since > self._stale_seconds:
                silent.append(Silent(name, self._watched - since, beat))
        return silent

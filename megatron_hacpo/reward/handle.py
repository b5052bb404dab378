"""A reward worker as its supervisor sees it: a process with a connection, a job and clocks."""

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Job:
    """One response: its number, which is the trainer's to choose, and what the worker gets. again: a worker
    has ended with it."""

    number: bytes
    payload: bytes
    again: bool = False


@dataclass
class Handle:
    """A worker that is a child of this process and leads a process group.

    job: what it is busy with. aside: another worker has its place. still: since when it stands still.
    """

    pid: int
    connection: Connection
    job: Job | None = None
    aside: bool = False
    still: float | None = None
    _since: float = 0.0
    _used_before: float = 0.0

    def give(self, job: Job) -> None:
        """Send it a job. Raises OSError if it is gone."""
        self.job, self.aside = job, False
        self._since, self._used_before = time.monotonic(), self._processor_time()
        self.connection.send_bytes(job.payload)

    def seconds(self, now: float) -> float:
        """How long it has been busy by the clock, without the time that it stood still."""
        return now - self._since

    def used(self) -> float:
        """Seconds of processor time that the job has taken."""
        return self._processor_time() - self._used_before

    def wants_to_run(self) -> bool:
        """Whether it runs or would, if it had a processor."""
        return Path(f"/proc/{self.pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"R"

    def resident(self) -> int:
        """Bytes of resident memory."""
        return resident(self.pid)

    def stand_still(self, now: float) -> None:
        """Stop the process and all that it has started."""
        self.still = now
        os.killpg(self.pid, signal.SIGSTOP)

    def go_on(self, now: float) -> None:
        """Let them run again."""
        assert self.still is not None
        self._since += now - self.still
        self.still = None
        os.killpg(self.pid, signal.SIGCONT)

    def bury(self) -> str:
        """Kill the process with all that it has started; returns how it ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.connection.close()
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def _processor_time(self) -> float:
        return time.clock_gettime(~self.pid << 3 | 2)  # of another process: clock_getcpuclockid(3)


def resident(pid: int | str) -> int:
    """Bytes of resident memory of a process, given by number or as "self"."""
    return int(Path(f"/proc/{pid}/statm").read_bytes().split()[1]) * _PAGE

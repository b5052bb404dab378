"""A child process with its own process group and log, which the kernel kills when its parent goes away."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")


class Child:
    """A started command, in a session and process group of its own: so its descendants can be reached.

    pidfd: readable once the process has ended.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """environment: all of it. log: gets stdout and stderr; its folder is made.

        To be called from a thread that lives as long as the child may: the kernel kills the child with it.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), *command],
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pidfd = os.pidfd_open(self._popen.pid)
        self.buried = False

    @property
    def pid(self) -> int:
        return self._popen.pid

    def has_ended(self) -> bool:
        """Asked without collecting it: while the leader is a zombie nobody else gets the group's number."""
        return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, at the latest after `seconds`."""
        return self.has_ended() or bool(wait([self.pidfd], timeout=seconds))

    def signal_group(self, signum: signal.Signals) -> None:
        """Reach the process and all descendants that kept its process group."""
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signum)

    def bury(self) -> int:
        """Kill what is left of the group and collect the leader; returns its exit code, -N for signal N."""
        self.signal_group(signal.SIGKILL)
        os.close(self.pidfd)
        self.buried = True
        return self._popen.wait()

"""Run a command that the kernel kills when its parent goes away: `python guard.py PARENT_PID COMMAND...`.

Started as a script of its own, because code between fork and exec may not run in a process with threads.
The standard library is all it needs, so it costs some 20 ms.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>; survives exec."""


def die_with_parent(parent: int) -> None:
    """Have this process killed when `parent` ends; ends it at once if `parent` is gone already."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for launchers: it may come to all processes of a job
    os.execvp(sys.argv[2], sys.argv[2:])

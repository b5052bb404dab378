"""Which of several failed processes is the cause: one that dies takes its peers along."""

import re
import signal
from collections.abc import Sequence
from pathlib import Path

from megatron_hacpo.launch.supervise import WorkerFailed

_TAIL_BYTES = 2**16

_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception)\b", re.MULTILINE)
"""The line with which a traceback ends."""

_LOST_CONNECTION = re.compile(
    r"connection (?:was )?(?:likely )?(?:closed|reset|refused|timed out)|connection abort|broken pipe"
    r"|socket (?:closed|timeout)|recvvalue failed|failed to recv"  # TCPStore's
    r"|timed out waiting \d+ms"  # gloo's
    r"|ncclremoteerror|remote process exit"
    r"|did not come to the exchange",  # bridge.members.absence
    re.IGNORECASE,
)


def find_cause(failures: Sequence[WorkerFailed]) -> WorkerFailed:
    """The first that a signal killed or that has a reason, else the first whose log does not end with a lost
    connection, else the first. SIGABRT is not meant: NCCL's watchdog sends it to those whose peer is gone."""
    return min(failures, key=_rank)


def _rank(failure: WorkerFailed) -> int:
    if failure.reason is not None or (failure.code < 0 and failure.code != -signal.SIGABRT):
        return 0
    return 2 if _ends_with_lost_connection(failure.worker.log) else 1


def _ends_with_lost_connection(log: Path) -> bool:
    """Of the last exception and what follows it; a process without a traceback, of the end of its log."""
    if not log.is_file():
        return False
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        text = file.read().decode("utf-8", errors="replace")
    last = max((match.start() for match in _EXCEPTION.finditer(text)), default=0)
    return _LOST_CONNECTION.search(text, last) is not None

"""Processes that live and die together: one fails, all stop; the launcher goes, all go."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType

from megatron_hacpo.process.child import Child

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Worker:
    """A process to start. environment: added to the launcher's own. log: gets its stdout and stderr."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path


class WorkerFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A worker ended otherwise than with exit code 0; the others were stopped. `code` as in subprocess."""

    def __init__(self, worker: Worker, code: int) -> None:
        how = f"exited with code {code}" if code > 0 else f"was killed by {signal.Signals(-code).name}"
        super().__init__(f"{worker.name} {how}")
        self.worker = worker
        self.code = code


class Interrupted(RuntimeError):  # noqa: N818 - reads as what happened
    """A signal asked the launcher to stop; all workers were stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class _Process(Child):
    """A started worker."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.command, {**os.environ, **worker.environment}, worker.log)
        self.worker = worker


def supervise(
    workers: Sequence[Worker],
    *,
    on_tick: Callable[[], None] = lambda: None,
    tick_seconds: float = 0.5,
    grace_seconds: float = 10.0,
) -> None:
    """Start all workers and wait until each has exited with code 0. To be called from the main thread.

    on_tick: called about every `tick_seconds` while they run. grace_seconds: between SIGTERM and SIGKILL.
    Raises WorkerFailed for the first worker that fails and Interrupted on SIGINT, SIGTERM or SIGHUP (a second
    one ends the grace); no worker and no descendant in a worker's process group is left in any case. If this
    process itself is killed, the kernel kills the workers.
    """
    processes: list[_Process] = []
    with _signals_noted() as received:
        try:
            for worker in workers:
                processes.append(_Process(worker))
            _watch(processes, received, on_tick, tick_seconds)
        finally:
            _stop(processes, received, grace_seconds)


def _watch(
    processes: Sequence[_Process], received: Sequence[int], on_tick: Callable[[], None], tick_seconds: float
) -> None:
    running = list(processes)
    while running:
        wait([process.pidfd for process in running], timeout=tick_seconds)
        if received:
            raise Interrupted(received[0])
        for process in [process for process in running if process.has_ended()]:
            running.remove(process)
            code = process.bury()
            if code != 0:
                raise WorkerFailed(process.worker, code)
        on_tick()


def _stop(processes: Sequence[_Process], received: Sequence[int], grace_seconds: float) -> None:
    """Leave no process: SIGTERM, time to end, SIGKILL. A signal that comes meanwhile ends the waiting."""
    running = [process for process in processes if not process.buried]
    for process in running:
        process.signal_group(signal.SIGTERM)
    before, deadline = len(received), time.monotonic() + grace_seconds
    while not all(process.has_ended() for process in running):
        if len(received) > before or time.monotonic() > deadline:
            break
        wait([process.pidfd for process in running if not process.has_ended()], timeout=0.1)
    for process in running:
        process.bury()


@contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Collect the stop signals instead of dying of them. What is ignored, as under nohup, stays ignored."""
    received: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        received.append(signum)

    heeded = [signum for signum in STOP_SIGNALS if signal.getsignal(signum) != signal.SIG_IGN]
    previous = {signum: signal.signal(signum, note) for signum in heeded}
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)

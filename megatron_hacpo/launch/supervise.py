"""Processes that live and die together: one fails, its group or all stop; the launcher goes, all go."""

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
class Process:
    """What can fail. log: gets its stdout and stderr. group: processes that cannot do without one another,
    such as those of one agent."""

    name: str
    log: Path
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class Worker(Process):
    """A process to start.

    environment: added to the launcher's own. parts: the processes that it stands for, if it only starts them
    (elsewhere). end_signal: on which it ends for certain, with all of these. attendant: serves its group: it
    is not waited for, and must not end before the others of its group have.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    parts: Sequence[Process] = ()
    end_signal: signal.Signals = signal.SIGKILL
    attendant: bool = False


class WorkerFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """A worker ended otherwise than with exit code 0; the others, or those of its group, were stopped.

    worker: or the part of one that failed. code: as in subprocess. reason: what is wrong, to follow its name,
    where that is more than the code.
    """

    def __init__(self, worker: Process, code: int, reason: str | None = None) -> None:
        how = f"exited with code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        super().__init__(f"{worker.name} {reason or how}")
        self.worker = worker
        self.code = code
        self.reason = reason


def read_code(worker: Worker, code: int) -> list[WorkerFailed]:
    """A worker that ended with another exit code than 0 has failed."""
    return [WorkerFailed(worker, code)] if code != 0 else []


class Interrupted(RuntimeError):  # noqa: N818 - reads as what happened
    """A signal asked the launcher to stop; all workers were stopped."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class _Process(Child):
    """A started worker. given_up: it was killed, and nobody waits for its end: the kernel may hold it."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.command, {**os.environ, **worker.environment}, worker.log)
        self.worker = worker
        self.given_up = False

    def give_up(self) -> None:
        self.signal_group(self.worker.end_signal)
        self.given_up = True


def supervise(
    workers: Sequence[Worker],
    *,
    on_tick: Callable[[], None] = lambda: None,
    find_failed: Callable[[], Sequence[WorkerFailed]] = tuple,
    on_loss: Callable[[str, WorkerFailed], bool] = lambda group, failure: False,
    read_end: Callable[[Worker, int], Sequence[WorkerFailed]] = read_code,
    blame: Callable[[Sequence[WorkerFailed]], WorkerFailed] = lambda failures: failures[0],
    tick_seconds: float = 0.5,
    blame_seconds: float = 1.5,
    grace_seconds: float = 10.0,
) -> None:
    """Start all workers and wait until each has ended well. To be called from the main thread.

    on_tick: called about every `tick_seconds` while they run.
    find_failed: called as often; failures of workers, or of their parts, that have not ended, as of one that
        hangs. Workers that still run are killed for it; failures of others are ignored.
    on_loss: called with a group and the failure to blame in it, unless no other group is left. True: the
        group's other workers are killed, and the other groups go on; it is not waited for any more.
    read_end: the failures that a worker's end with an exit code means; by default one if it is not 0.
    blame: which of several failures, in the order in which they were seen, is the cause of the others: a
        worker whose peer dies often fails too, and may be seen first. By default the first.
    blame_seconds: how long after a failure others are waited for that may be its cause; not after a hang, and
        not once all have ended. Longer where the news of a process's end takes longer.
    grace_seconds: between SIGTERM and SIGKILL.
    Raises WorkerFailed for the worker to blame for the failure that ends the run, and
    Interrupted on SIGINT, SIGTERM or SIGHUP (a second one ends the grace); no worker and no descendant in a
    worker's process group is left in any case, but those that SIGKILL cannot end. If this process itself is
    killed, the kernel kills the workers.
    """
    processes: list[_Process] = []
    with _signals_noted() as received:
        try:
            for worker in workers:
                processes.append(_Process(worker))
            _watch(
                processes,
                received,
                on_tick,
                find_failed,
                on_loss,
                read_end,
                blame,
                tick_seconds,
                blame_seconds,
            )
        finally:
            _stop(processes, received, grace_seconds)


def _watch(
    processes: Sequence[_Process],
    received: Sequence[int],
    on_tick: Callable[[], None],
    find_failed: Callable[[], Sequence[WorkerFailed]],
    on_loss: Callable[[str, WorkerFailed], bool],
    read_end: Callable[[Worker, int], Sequence[WorkerFailed]],
    blame: Callable[[Sequence[WorkerFailed]], WorkerFailed],
    tick_seconds: float,
    blame_seconds: float,
) -> None:
    running = list(processes)
    groups = {process.worker.group for process in processes}
    failures: list[WorkerFailed] = []
    decide_at = 0.0
    while running:
        wait([process.pidfd for process in running], timeout=tick_seconds)
        if received:
            raise Interrupted(received[0])
        found = [*_bury_ended(running, read_end), *_give_up_failed(running, find_failed())]
        if found and not failures:
            decide_at = time.monotonic() + blame_seconds
        failures += found
        if failures and (not running or time.monotonic() >= decide_at or any(f.reason for f in failures)):
            _lose_groups(failures, groups, running, on_loss, blame)
            failures = []
        for process in processes:
            if process.given_up and not process.buried and process.has_ended():
                process.bury()
        on_tick()


def _lose_groups(
    failures: Sequence[WorkerFailed],
    groups: set[str],
    running: list[_Process],
    on_loss: Callable[[str, WorkerFailed], bool],
    blame: Callable[[Sequence[WorkerFailed]], WorkerFailed],
) -> None:
    """Kill what is left of the groups that have failed; raises the failure that ends the run."""
    while failures:
        failure = blame(failures)
        group = failure.worker.group
        groups.remove(group)
        if not groups or not on_loss(group, failure):
            raise failure
        for process in [process for process in running if process.worker.group == group]:
            process.give_up()
            running.remove(process)
        failures = [other for other in failures if other.worker.group != group]


def _bury_ended(
    running: list[_Process], read_end: Callable[[Worker, int], Sequence[WorkerFailed]]
) -> list[WorkerFailed]:
    """Remove those that have ended, and attendants that nobody needs any more; returns the failures."""
    ended = [process for process in running if process.has_ended()]
    for process in ended:
        running.remove(process)
    served = {process.worker.group for process in running if not process.worker.attendant}
    failures: list[WorkerFailed] = []
    for process in ended:
        worker, code = process.worker, process.bury()
        if not worker.attendant:
            failures += read_end(worker, code)
        elif worker.group in served:
            early = WorkerFailed(worker, code, "has ended before those that it serves")
            failures += read_end(worker, code) or [early]
    for process in [p for p in running if p.worker.attendant and p.worker.group not in served]:
        process.give_up()
        running.remove(process)
    return failures


def _give_up_failed(running: list[_Process], found: Sequence[WorkerFailed]) -> list[WorkerFailed]:
    """Kill and remove those that have failed; returns the failures of those that still ran."""
    failures = []
    for process in list(running):
        names = {process.worker.name, *(part.name for part in process.worker.parts)}
        if own := [failure for failure in found if failure.worker.name in names]:
            process.give_up()
            running.remove(process)
            failures += own
    return failures


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
        if process.has_ended() or not process.given_up:
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

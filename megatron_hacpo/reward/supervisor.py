"""The process between a trainer and its reward workers: hands out responses, and kills who takes too long.

    python -m megatron_hacpo.reward.supervisor SETTINGS FD

It is started anew, not forked from the trainer, so it holds none of its threads, memory and devices. It loads
the verifier once and forks workers of itself, which costs milliseconds. It never looks into a response and
only waits for processes, so no response can hang it. It ends when the connection FD closes or its parent
dies, and the workers end with it.

A worker that takes far more processor time for a response than others did is set aside: another takes its
place, and it stands still while responses are waiting. When none is, it goes on until the response's
deadline, for which the time that it stood still does not count. So those that hang delay neither the others
nor each other. One that only waits for something (a remote judge) is set aside later and never stopped. The
deadline is by the clock, but nobody is ended who has hardly had a processor: how busy the machine is decides
no reward.
"""

import gc
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import NoReturn

import msgspec

from megatron_hacpo.process.guard import die_with_parent
from megatron_hacpo.reward.base import Outcome, Reason, Verifier, check_one
from megatron_hacpo.reward.handle import Handle, Job, resident
from megatron_hacpo.reward.registry import Spec, get_verifier
from megatron_hacpo.reward.worker import serve

TICK = 0.01
"""Seconds between looks at the busy workers' clocks and memory."""

FAR_MORE = 6
"""Times the usual processor time, after which a response lets others go first."""

LEAST_PATIENCE = 0.03
"""Seconds of processor time that it gets before that in any case."""

WAITING_SHARE = 0.1
"""Of the deadline, by the clock: after that it lets others go first even if it hardly ran."""

LEAST_SHARE = 0.1
"""Of the deadline, in processor time: what a response that wants to run gets in any case."""

ASIDE_PER_WORKER = 16
"""Workers that may be set aside, for each ordinary one; beyond that, responses wait for a deadline."""

SPARES = 4
"""Idle workers that are kept, for each ordinary one: a new one has to learn what sympy remembers."""

LEAST_ROOM = 64 << 20
"""Bytes that the cap has to leave to a response beside the verifier itself."""


class Settings(msgspec.Struct, frozen=True):
    """What a pool is asked for. deadline: seconds. memory: bytes. parent: process id."""

    verifier: Spec
    reward_range: tuple[float, float]
    workers: int
    deadline: float
    memory: int
    parent: int


class Started(msgspec.Struct, frozen=True):
    """The supervisor's first word. error: why it cannot work, for the user."""

    error: str | None = None
    name: str = ""
    needs_stop: bool = False
    finds_answers: bool = False


class _Supervisor:
    def __init__(self, settings: Settings, verifier: Verifier, trainer: Connection, used: int) -> None:
        self._settings = settings
        self._verifier = verifier
        self._trainer = trainer
        self._used = used
        self._queue: deque[Job] = deque()
        self._idle: list[Handle] = []
        self._busy: list[Handle] = []
        self._replies: list[bytes] = []
        self._collecting = False
        self._patience = 0.15

    def run(self) -> None:
        """Until the trainer is gone."""
        for _ in range(self._settings.workers):
            self._idle.append(self._start())
        while True:
            workers = (*self._busy, *self._idle)
            connections = [self._trainer, *(worker.connection for worker in workers)]
            ready = wait(connections, timeout=TICK if self._busy or self._queue else None)
            if self._trainer in ready and not self._listen():
                break
            for worker in workers:
                if worker.connection in ready:
                    self._receive(worker)
            self._hand_out()
            self._look(time.monotonic())
            if self._collecting and not self._busy and not self._queue:
                self._answer()
        for worker in (*self._busy, *self._idle):
            worker.bury()

    def _listen(self) -> bool:
        """Take a message: a job, or nothing, which asks for the replies. False when the trainer is gone."""
        try:
            message = self._trainer.recv_bytes()
        except (EOFError, OSError):
            return False
        if message:
            self._queue.append(Job(message[:8], message[8:]))
        else:
            self._collecting = True
        return True

    def _receive(self, worker: Handle) -> None:
        """Take the reply of a worker, or its death."""
        if worker.job is None:
            self._idle.remove(worker)
            worker.bury()
            return
        try:
            reply = worker.connection.recv_bytes()
        except (EOFError, OSError):
            self._crashed(worker)
            return
        self._replies.append(worker.job.number + reply[1:])
        self._learn(worker.used())
        self._busy.remove(worker)
        worker.job = None
        if worker.still is not None:  # it replied just before it was stopped
            worker.go_on(time.monotonic())
        if reply[0] or len(self._idle) == SPARES * self._settings.workers:
            worker.bury()
        else:
            self._idle.append(worker)

    def _learn(self, used: float) -> None:
        """Follow the usual processor time of a response; a long one counts as little more than usual."""
        wanted = FAR_MORE * min(used, self._patience)
        self._patience = max(LEAST_PATIENCE, 0.98 * self._patience + 0.02 * wanted)

    def _look(self, now: float) -> None:
        """End workers that are past deadline or memory; set aside, stop and wake those that take long."""
        settings = self._settings
        room = ASIDE_PER_WORKER * settings.workers - sum(worker.aside for worker in self._busy)
        for worker in list(self._busy):
            seconds = worker.seconds(now)
            if worker.still is not None:
                if not self._queue:
                    worker.go_on(now)
            elif seconds < LEAST_PATIENCE:
                continue
            elif seconds > settings.deadline and self._hangs(worker):
                self._fail(worker, "timeout", f"no verdict in {settings.deadline:g} s")
            elif (size := worker.resident()) > settings.memory:
                self._fail(worker, "memory", f"took {size >> 20} MiB")
            else:
                runs = worker.used() > self._patience
                if not worker.aside and room > 0 and (runs or seconds > WAITING_SHARE * settings.deadline):
                    worker.aside = True
                    room -= 1
                if worker.aside and runs and self._queue:
                    worker.stand_still(now)

    def _hangs(self, worker: Handle) -> bool:
        """Whether one that is past its deadline has had a processor, or wants none, and has not replied."""
        had_its_share = worker.used() > LEAST_SHARE * self._settings.deadline
        # The reply is looked for last: it may come while we look, and then the worker wants nothing any more.
        return (had_its_share or not worker.wants_to_run()) and not worker.connection.poll()

    def _hand_out(self) -> None:
        """Give queued jobs to ordinary workers."""
        ordinary = sum(not worker.aside for worker in self._busy)
        while self._queue and ordinary < self._settings.workers:
            worker = self._idle.pop() if self._idle else self._start()
            self._busy.append(worker)
            ordinary += 1
            try:
                worker.give(self._queue.popleft())
            except OSError:
                self._crashed(worker)

    def _answer(self) -> None:
        for reply in self._replies:
            self._trainer.send_bytes(reply)
        self._trainer.send_bytes(b"")
        self._replies.clear()
        self._collecting = False

    def _crashed(self, worker: Handle) -> None:
        """Whoever ended the worker, its response gets another one; if it ends that too, it is its doing."""
        job = worker.job
        assert job is not None
        if job.again:
            self._fail(worker, "crash")
            return
        self._busy.remove(worker)
        worker.bury()
        self._queue.appendleft(Job(job.number, job.payload, again=True))

    def _fail(self, worker: Handle, reason: Reason, detail: str = "") -> None:
        assert worker.job is not None
        self._busy.remove(worker)
        end = worker.bury()
        outcome = Outcome(None, reason, detail or end)
        self._replies.append(worker.job.number + msgspec.json.encode(outcome))

    def _start(self) -> Handle:
        ours, theirs = Pipe()
        me = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._be_worker(theirs, me)
        with suppress(ProcessLookupError):  # on both sides, as either may be first
            os.setpgid(pid, pid)
        theirs.close()
        return Handle(pid, ours)

    def _be_worker(self, connection: Connection, parent: int) -> NoReturn:
        """The life of a forked worker. Its copy of the supervisor must not go on, whatever happens."""
        code = 1
        try:
            os.setpgid(0, 0)  # the group can be killed with all that the verifier has started
            die_with_parent(parent)
            for held in (self._trainer, *(worker.connection for worker in (*self._busy, *self._idle))):
                held.close()
            settings = self._settings
            serve(connection, self._verifier, settings.reward_range, settings.memory, self._used)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _prepare(settings: Settings) -> Verifier:
    """The verifier, loaded and warm. Raises ValueError, for the user, if it cannot work."""
    verifier = get_verifier(settings.verifier)
    for text, answer in verifier.warm_up:
        check_one(verifier, text, answer, settings.reward_range)
    used = resident("self")
    if used + LEAST_ROOM > settings.memory:
        raise ValueError(
            f"reward.memory_mb: {settings.memory >> 20}: the verifier {verifier.name} takes {used >> 20} MiB "
            f"itself; use at least {(used + LEAST_ROOM >> 20) + 1}"
        )
    return verifier


def main(arguments: Iterable[str]) -> None:
    """Serve one pool. See the module."""
    encoded, fd = arguments
    settings = msgspec.json.decode(encoded, type=Settings)
    die_with_parent(settings.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's to answer
    trainer = Connection(int(fd))
    try:
        verifier = _prepare(settings)
    except ValueError as error:
        trainer.send_bytes(msgspec.json.encode(Started(error=str(error))))
        return
    gc.collect()
    gc.freeze()  # workers then share what is loaded instead of copying it
    started = Started(
        name=verifier.name, needs_stop=verifier.needs_stop, finds_answers=verifier.answer is not None
    )
    trainer.send_bytes(msgspec.json.encode(started))
    _Supervisor(settings, verifier, trainer, resident("self")).run()


if __name__ == "__main__":
    main(sys.argv[1:])

"""Signs of life: every process of a run tells the run's store what it is doing, and that it still does."""

import atexit
import os
import socket
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from megatron_hacpo.process.store import connect

if TYPE_CHECKING:
    from torch.distributed import Store

STOP_KEY = "stop"
"""In the store: the launcher wants the run to end after a step."""

CLOSE_SECONDS = 1.0

ENDED = "ended"
"""The phase of a process's last beat."""


class Beat(msgspec.Struct, frozen=True, kw_only=True):
    """One sign of life.

    name: the process's. step, phase: what it is at, since wall time `since` (seconds since the epoch, by the
    clock of `host`). number: counts the process's beats.
    """

    name: str
    pid: int
    host: str
    step: int
    phase: str
    number: int
    since: float


class Heartbeat:
    """Writes this process's beats from a thread: at once when step or phase change, else regularly.

    It ends by itself when the store is gone. A call that holds the interpreter's lock holds up the beats too.
    """

    def __init__(self, store_address: tuple[str, int], name: str, seconds: float = 5.0) -> None:
        """store_address: host and port of the run's store. seconds: between beats.

        The first phase is `start`, of step 0.
        """
        # Not the main thread's connection, which waits for other processes.
        self._store = connect(store_address)
        self._name = name
        self._seconds = seconds
        self._state = (0, "start", time.time())
        self._changed = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        # A daemon thread that is in the store's C++ when the interpreter goes may abort the process.
        atexit.register(self.close)

    def phase(self, step: int, phase: str) -> None:
        """Tell what this process is at from now on; returns at once."""
        self._state = (step, phase, time.time())
        self._changed.set()

    def close(self) -> None:
        """Stop beating, after a last beat; waits for that, though not long."""
        atexit.unregister(self.close)
        self._closed = True
        self._changed.set()
        self._thread.join(timeout=CLOSE_SECONDS)

    def _run(self) -> None:
        number, pid, host = 0, os.getpid(), socket.gethostname()
        while True:
            self._changed.clear()  # before anything is read, so that no change goes unseen
            closed = self._closed
            step, phase, since = (self._state[0], ENDED, time.time()) if closed else self._state
            number += 1
            beat = Beat(
                name=self._name, pid=pid, host=host, step=step, phase=phase, number=number, since=since
            )
            try:
                self._store.set(_key(self._name), msgspec.json.encode(beat).decode())
            except RuntimeError:
                return  # the launcher is gone, and this process goes with it
            if closed:
                return
            self._changed.wait(self._seconds)


def read_beats(store: "Store", names: Iterable[str]) -> dict[str, Beat | None]:
    """The latest beat of each process, None before its first one; does not wait for any."""
    beats: dict[str, Beat | None] = dict.fromkeys(names)
    present = [name for name in beats if store.check([_key(name)])]
    if present:
        data = store.multi_get([_key(name) for name in present])
        beats |= {name: msgspec.json.decode(d, type=Beat) for name, d in zip(present, data, strict=True)}
    return beats


def _key(name: str) -> str:
    return f"beats/{name}"

"""Signs of life, through a real store."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from megatron_hacpo.process.heartbeat import Beat, Heartbeat, read_beats

ROOT = Path(__file__).parent.parent


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.01)


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def heartbeat(store: TCPStore) -> Iterator[Heartbeat]:
    """Beats once a minute, and when something changes."""
    heart = Heartbeat(("127.0.0.1", store.port), "A.rank0", seconds=60.0)
    yield heart
    heart.close()


def beat_of(store: TCPStore) -> Beat | None:
    return read_beats(store, ["A.rank0"])["A.rank0"]


def test_a_change_is_told_at_once(store: TCPStore, heartbeat: Heartbeat) -> None:
    wait_until(lambda: beat_of(store) is not None)
    first = beat_of(store)
    assert first is not None
    assert (first.step, first.phase, first.number) == (0, "start", 1)
    assert (first.name, first.pid, first.host) == ("A.rank0", os.getpid(), socket.gethostname())
    before = time.time()
    heartbeat.phase(7, "update")
    wait_until(lambda: beat_of(store) != first, seconds=5)
    second = beat_of(store)
    assert second is not None
    assert (second.step, second.phase, second.number) == (7, "update", 2)
    assert before <= second.since <= time.time()


def test_telling_takes_no_time(heartbeat: Heartbeat) -> None:
    durations = []
    for step in range(20):
        start = time.perf_counter()
        heartbeat.phase(step, "update")
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.001


def test_beats_go_on_while_nothing_changes(store: TCPStore) -> None:
    heart = Heartbeat(("127.0.0.1", store.port), "A.rank0", seconds=0.02)
    wait_until(lambda: (beat := beat_of(store)) is not None and beat.number > 5)
    heart.close()
    last = beat_of(store)
    time.sleep(0.1)
    assert beat_of(store) == last
    assert last is not None
    assert last.phase == "ended"


def test_who_has_not_begun_is_not_waited_for(store: TCPStore, heartbeat: Heartbeat) -> None:
    wait_until(lambda: beat_of(store) is not None)
    assert read_beats(store, ["B.rank0", "A.rank0"]) == {"B.rank0": None, "A.rank0": beat_of(store)}
    assert read_beats(store, ["B.rank0"]) == {"B.rank0": None}


def test_nothing_is_raised_when_the_store_is_gone() -> None:
    stores = [TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)]
    heart = Heartbeat(("127.0.0.1", stores[0].port), "A.rank0", seconds=0.02)
    wait_until(lambda: beat_of(stores[0]) is not None)
    stores.clear()
    wait_until(lambda: not heart._thread.is_alive())
    heart.phase(1, "rollout")
    heart.close()


def test_a_process_with_a_heartbeat_fails_as_others_do(store: TCPStore) -> None:
    code = (
        "from megatron_hacpo.process.heartbeat import Heartbeat\n"
        f"Heartbeat(('127.0.0.1', {store.port}), 'A.rank0', seconds=0.0)\n"
        "raise SystemExit(3)"
    )
    process = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, timeout=60)
    assert (process.returncode, process.stderr) == (3, b"")

"""Who is silent: judged with made-up beats and clocks, then a process that is stopped."""

import os
import signal
import sys
import time
from pathlib import Path

import msgspec
import pytest
from torch.distributed import HashStore, TCPStore

from megatron_hacpo.launch.liveness import Liveness
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, supervise
from megatron_hacpo.process.heartbeat import Beat

ROOT = Path(__file__).parent.parent


def beat(store: HashStore, name: str, number: int, step: int = 7, phase: str = "update") -> None:
    made = Beat(name=name, pid=1, host="h", step=step, phase=phase, number=number, since=0.0)
    store.set(f"beats/{name}", msgspec.json.encode(made).decode())


def test_silence_is_counted_from_the_last_change() -> None:
    store = HashStore()
    liveness = Liveness(store, ["A.rank0", "B.rank0", "C.rank0"], stale_seconds=30.0, phase_seconds=1e9)
    beat(store, "A.rank0", 1)
    for second in range(1000, 1101):
        beat(store, "B.rank0", second)
        if second == 1040:
            beat(store, "A.rank0", 2)
        silent = liveness.look(float(second))
        late = 1030 < second < 1040 or second > 1070
        assert [s.name for s in silent] == (["A.rank0"] if late else [])
        if second == 1072:
            assert [str(s) for s in silent] == [
                "A.rank0 has given no sign of life for 32 s (last: update of step 7)"
            ]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    store = HashStore()
    beat(store, "A.rank0", 1)
    liveness = Liveness(store, ["A.rank0"], stale_seconds=30.0, phase_seconds=1e9)
    assert liveness.look(0.0) == []
    assert liveness.look(3600.0) == [], "launcher and processes may have been suspended together"


def test_a_process_that_beats_but_stays_in_one_phase_hangs() -> None:
    store = HashStore()
    liveness = Liveness(store, ["A.rank0", "B.rank0"], stale_seconds=30.0, phase_seconds=600.0)
    for second in range(0, 1000, 5):
        beat(store, "A.rank0", second)
        beat(store, "B.rank0", second, step=8 if second > 300 else 7)
        hung = liveness.look(float(second))
        assert [h.name for h in hung] == (["A.rank0"] if 600 < second <= 905 else ["A.rank0", "B.rank0"])[
            : 2 * (second > 600)
        ]
    assert str(hung[0]) == "A.rank0 has been at update of step 7 for 995 s (exchange.timeout_minutes)"


def test_one_that_never_began_hangs_and_one_that_has_ended_does_not() -> None:
    store = HashStore()
    liveness = Liveness(store, ["A.rank0", "B.rank0"], stale_seconds=30.0, phase_seconds=600.0)
    for second in range(0, 700, 5):
        beat(store, "A.rank0", 7, phase="ended")
        hung = liveness.look(float(second))
        assert [h.name for h in hung] == (["B.rank0"] if second > 600 else [])
    assert str(hung[0]) == "B.rank0 has not started within 695 s (exchange.timeout_minutes)"


BEATING = """
import os, sys
from megatron_hacpo.process.heartbeat import Heartbeat
heart = Heartbeat(("127.0.0.1", int(sys.argv[1])), "A.rank0", seconds=0.1)
heart.phase(3, "rollout")
print(os.getpid(), flush=True)
import time; time.sleep(60)
"""


def test_a_stopped_process_is_found_and_killed(tmp_path: Path) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    log = tmp_path / "log"
    command = [sys.executable, "-c", BEATING, str(store.port)]
    worker = Worker("A.rank0", log, "A", command=command, environment={"PYTHONPATH": str(ROOT)})
    liveness = Liveness(store, ["A.rank0"], stale_seconds=1.5, phase_seconds=60.0)
    pids: list[int] = []

    def stop_once() -> None:
        if not pids and liveness._seen and log.read_text():
            pids.append(int(log.read_text()))
            os.kill(pids[0], signal.SIGSTOP)

    def find_failed() -> list[WorkerFailed]:
        hung = liveness.look(time.monotonic())
        return [WorkerFailed(worker, -signal.SIGKILL, silent.reason) for silent in hung]

    message = r"^A.rank0 has given no sign of life for \d s \(last: rollout of step 3\)$"
    with pytest.raises(WorkerFailed, match=message) as caught:
        supervise([worker], on_tick=stop_once, find_failed=find_failed, tick_seconds=0.1)
    assert caught.value.code == -signal.SIGKILL
    assert pids

"""Real processes: they end together, whoever fails, stops or kills what."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import psutil
import pytest
from rich.console import Console

from megatron_hacpo.checkpoint.identity import Identity
from megatron_hacpo.config import ConfigError, RunConfig, load
from megatron_hacpo.launch.cause import find_cause
from megatron_hacpo.launch.folder import lock_run, prepare_run_dir
from megatron_hacpo.launch.local import worker
from megatron_hacpo.launch.placement import Block, DoesNotFit, Node, Placement, nodes_needed, place
from megatron_hacpo.launch.run import describe_failure, serve_store
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, supervise
from megatron_hacpo.launch.view import RunView
from megatron_hacpo.process.child import GUARD
from megatron_hacpo.report.files import write_row

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "examples" / "tiny" / "pair.yaml"

WAIT = "import time; time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); " + WAIT
PARENT = "import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {code!r}]).pid, flush=True); "

IDENTITY = Identity(config={}, data="", agents={}, versions={})


def python(name: str, code: str, folder: Path, **environment: str) -> Worker:
    """A worker of the group that its name begins with."""
    log = folder / f"{name}.log"
    command = [sys.executable, "-c", code]
    return Worker(name, log, name.split(".")[0], command=command, environment=environment)


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.05)


def pid_in(log: Path) -> int:
    """The number on the log's first line, once it is there."""
    wait_until(lambda: log.is_file() and log.read_text().endswith("\n"))
    return int(log.read_text().split()[0])


def gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_workers_get_their_environment_and_leave_their_output(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['RANK'], flush=True); print('also', file=sys.stderr)"
    ticks: list[int] = []
    supervise(
        [python(f"w{i}", code, tmp_path / "logs", RANK=str(i)) for i in range(2)],
        on_tick=lambda: ticks.append(1),
    )
    assert [(tmp_path / "logs" / f"w{i}.log").read_text().split() for i in range(2)] == [
        ["0", "also"],
        ["1", "also"],
    ]
    assert ticks


@pytest.mark.parametrize(
    "code, message, returncode",
    [
        ("import sys; sys.exit(3)", "bad exited with code 3", 3),
        ("import os; os.kill(os.getpid(), 9)", "bad was killed by SIGKILL", -9),
        ("raise OSError", "bad exited with code 1", 1),
    ],
)
def test_one_failure_stops_all_and_is_named(tmp_path: Path, code: str, message: str, returncode: int) -> None:
    others = [
        python(f"good{i}", f"import os; print(os.getpid(), flush=True); {WAIT}", tmp_path) for i in range(2)
    ]
    logs = [str(other.log) for other in others]
    bad = f"import os, time\nwhile not all(map(os.path.getsize, {logs})): time.sleep(0.02)\n{code}"
    start = time.monotonic()
    with pytest.raises(WorkerFailed) as caught:
        supervise([others[0], python("bad", bad, tmp_path), others[1]])
    assert str(caught.value) == message
    assert caught.value.code == returncode
    assert time.monotonic() - start < 9, "SIGTERM is enough for the others"
    assert all(gone(pid_in(other.log)) for other in others)


def test_the_deaf_are_killed_after_the_grace_and_descendants_too(tmp_path: Path) -> None:
    parent = python("parent", PARENT.format(code=DEAF) + WAIT, tmp_path)
    log = tmp_path / "parent.log"
    bad = f"import time\nwhile 'deaf' not in open({str(log)!r}).read(): time.sleep(0.02)\nraise SystemExit(1)"
    with pytest.raises(WorkerFailed):
        supervise([parent, python("bad", bad, tmp_path)], grace_seconds=0.5)
    wait_until(lambda: gone(pid_in(log)))


def test_a_finished_worker_leaves_no_descendant(tmp_path: Path) -> None:
    supervise([python("parent", PARENT.format(code=DEAF), tmp_path)])
    wait_until(lambda: gone(pid_in(tmp_path / "parent.log")))


def test_the_loss_of_a_group_can_be_survived(tmp_path: Path) -> None:
    deaf = python("A.rank1", f"import os; print(os.getpid(), flush=True); {DEAF}", tmp_path)
    until_deaf = f"import time\nwhile 'deaf' not in open({str(deaf.log)!r}).read(): time.sleep(0.02)\n"
    gone_file = tmp_path / "A is gone"
    until_gone = f"import os, time\nwhile not os.path.exists({str(gone_file)!r}): time.sleep(0.02)"
    lost: list[str] = []

    def on_loss(group: str, failure: WorkerFailed) -> bool:
        lost.append(f"{group}: {failure}")
        return True

    def tick() -> None:
        if lost and gone(pid_in(deaf.log)):
            gone_file.touch()

    start = time.monotonic()
    supervise(
        [
            python("A.rank0", f"{until_deaf}raise SystemExit(3)", tmp_path),
            deaf,
            python("B.rank0", until_gone, tmp_path),
            python("C.rank0", "", tmp_path),
        ],
        on_tick=tick,
        on_loss=on_loss,
        tick_seconds=0.1,
        grace_seconds=30.0,
    )
    assert lost == ["A: A.rank0 exited with code 3"]
    assert time.monotonic() - start < 20, "the others of the group have no grace"


def test_the_loss_of_the_last_group_is_raised(tmp_path: Path) -> None:
    lost: list[str] = []
    fail_after_a = f"import os, time\nwhile os.path.exists({str(tmp_path / 'flag')!r}): time.sleep(0.02)\n1/0"
    (tmp_path / "flag").touch()

    def on_loss(group: str, failure: WorkerFailed) -> bool:
        lost.append(group)
        (tmp_path / "flag").unlink()
        return True

    workers = [python("A.rank0", "1/0", tmp_path), python("B.rank0", fail_after_a, tmp_path)]
    with pytest.raises(WorkerFailed, match=r"^B.rank0 exited with code 1$"):
        supervise(workers, on_loss=on_loss, tick_seconds=0.1)
    assert lost == ["A"]


def test_the_caller_decides_which_loss_ends_the_run(tmp_path: Path) -> None:
    waiting = python("B.rank0", f"import os; print(os.getpid(), flush=True); {WAIT}", tmp_path)
    fail = f"import os, time\nwhile not os.path.getsize({str(waiting.log)!r}): time.sleep(0.02)\n1/0"
    lost: list[str] = []

    def on_loss(group: str, failure: WorkerFailed) -> bool:
        lost.append(group)
        return False

    with pytest.raises(WorkerFailed, match=r"^A.rank0 exited with code 1$"):
        supervise([waiting, python("A.rank0", fail, tmp_path)], on_loss=on_loss)
    assert lost == ["A"]
    assert gone(pid_in(waiting.log))


def test_the_cause_is_blamed_and_not_who_was_seen_first(tmp_path: Path) -> None:
    """A's connection to B is closed a moment before B has ended."""
    log = tmp_path / "B.rank0.log"
    victim = (
        f"import os, time\nwhile not os.path.getsize({str(log)!r}): time.sleep(0.02)\n"
        "raise RuntimeError('Connection closed by peer [127.0.0.1]:33')"
    )
    guilty = "import os, time; print(flush=True); time.sleep(0.4); os.kill(os.getpid(), 9)"
    workers = [python("A.rank0", victim, tmp_path), python("B.rank0", guilty, tmp_path)]
    workers.append(python("C.rank0", WAIT, tmp_path))
    with pytest.raises(WorkerFailed, match=r"^B.rank0 was killed by SIGKILL$"):
        supervise(workers, blame=find_cause, tick_seconds=0.1, blame_seconds=2.5)


@pytest.mark.parametrize(
    ("ends", "guilty"),
    [
        (
            [(1, "x\nRuntimeError: [pair.cc:5] Connection closed by peer [::1]:3"), (1, "OSError: no space")],
            1,
        ),
        ([(1, "RuntimeError: step 3: agents B did not come to the exchange, which ..."), (2, "")], 1),
        ([(1, "DistBackendError: NCCL error\nncclRemoteError: A call failed"), (-9, "")], 1),
        ([(-6, "[E] watchdog: recvValue failed on SocketImpl"), (1, "ValueError: x")], 1),
        ([(1, "warning: Connection reset by peer\nValueError: x"), (1, "RuntimeError: Broken pipe")], 0),
        ([(1, "torch.OutOfMemoryError: CUDA out of memory"), (-6, "Connection reset by peer")], 0),
        ([(1, "RuntimeError: Connection reset"), (1, "RuntimeError: Broken pipe")], 0),
    ],
)
def test_the_cause_is_told_by_signal_and_log(
    ends: list[tuple[int, str]], guilty: int, tmp_path: Path
) -> None:
    failures = []
    for number, (code, text) in enumerate(ends):
        worker = python(f"w{number}", "", tmp_path)
        worker.log.write_text(text)
        failures.append(WorkerFailed(worker, code))
    assert find_cause(failures) is failures[guilty]


def hangs(worker: Worker, reason: str) -> WorkerFailed:
    return WorkerFailed(worker, -signal.SIGKILL, reason)


def test_a_worker_that_hangs_is_killed_and_has_failed(tmp_path: Path) -> None:
    hanging = python("A.rank0", PARENT.format(code=DEAF) + WAIT, tmp_path)
    done = python("B.rank0", "", tmp_path)

    def find_failed() -> list[WorkerFailed]:
        if not done.log.exists() or "deaf" not in hanging.log.read_text():
            return []
        return [
            hangs(done, "has ended, which is no hanging"),
            hangs(python("A.rank7", "", tmp_path), "is nobody"),
            hangs(hanging, "has given no sign of life for 32 s (last: update of step 7)"),
        ]

    message = r"^A.rank0 has given no sign of life for 32 s \(last: update of step 7\)$"
    with pytest.raises(WorkerFailed, match=message) as caught:
        supervise([hanging, done], find_failed=find_failed, tick_seconds=0.1)
    assert caught.value.code == -signal.SIGKILL
    wait_until(lambda: gone(pid_in(hanging.log)))


def test_a_group_that_hangs_can_be_lost_as_well(tmp_path: Path) -> None:
    losses: list[WorkerFailed] = []

    def on_loss(group: str, failure: WorkerFailed) -> bool:
        losses.append(failure)
        return True

    hanging = [python(f"A.rank{i}", WAIT, tmp_path) for i in range(2)]
    supervise(
        [*hanging, python("B.rank0", "", tmp_path)],
        find_failed=lambda: [hangs(worker, "hangs") for worker in hanging],
        on_loss=on_loss,
    )
    assert [str(failure) for failure in losses] == ["A.rank0 hangs"]


def test_an_error_of_the_launchers_own_stops_all(tmp_path: Path) -> None:
    log = tmp_path / "one.log"

    def tick() -> None:
        if log.read_text():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        supervise(
            [python("one", f"import os; print(os.getpid(), flush=True); {WAIT}", tmp_path)], on_tick=tick
        )
    assert gone(pid_in(log))


LAUNCHER = """
import signal
import sys
from pathlib import Path
from megatron_hacpo.launch.supervise import Interrupted, STOP_SIGNALS, Worker, supervise
for signum in STOP_SIGNALS:  # under nohup or in a background job they are ignored, and stay so
    signal.signal(signum, signal.SIG_DFL)
folder = Path(sys.argv[1])
code = sys.argv[2]
try:
    command = [sys.executable, "-c", code]
    supervise(
        [Worker(f"w{i}", folder / f"w{i}.log", command=command, environment={}) for i in range(2)]
    )
except Interrupted as stop:
    print(stop)
    sys.exit(128 + stop.signum)
"""


def start_launcher(folder: Path, code: str) -> tuple[subprocess.Popen[str], list[int]]:
    """A launcher process with two workers, and the workers' process ids."""
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(folder), f"import os; print(os.getpid(), flush=True); {code}"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    return launcher, [pid_in(folder / f"w{i}.log") for i in range(2)]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_all(tmp_path: Path, signum: signal.Signals) -> None:
    launcher, pids = start_launcher(tmp_path, WAIT)
    launcher.send_signal(signum)
    output, _ = launcher.communicate(timeout=20)
    assert launcher.returncode == 128 + signum
    assert output == f"stopped by {signum.name}\n"
    assert all(gone(pid) for pid in pids)


def test_a_second_signal_ends_the_grace(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, DEAF)
    wait_until(lambda: all("deaf" in (tmp_path / f"w{i}.log").read_text() for i in range(2)))
    start = time.monotonic()
    launcher.send_signal(signal.SIGINT)
    time.sleep(1)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert time.monotonic() - start < 8
    assert all(gone(pid) for pid in pids)


def test_workers_do_not_outlive_a_killed_launcher(tmp_path: Path) -> None:
    launcher, pids = start_launcher(tmp_path, DEAF)
    launcher.kill()
    launcher.communicate(timeout=20)
    wait_until(lambda: all(gone(pid) for pid in pids))


def test_a_worker_whose_launcher_is_gone_already_does_not_start() -> None:
    someone_else = str(os.getpid() + 1)
    result = subprocess.run(
        [sys.executable, "-I", "-S", str(GUARD), someone_else, "echo", "started"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, "")


HERE = Node("here", sys.maxsize)


def test_a_rank_is_one_train_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    placement = Placement("B", (Block(HERE, 2, 2),), (Block(HERE, 6, 1), Block(HERE, 7, 1)))
    made = worker(placement, 1, Path("runs/x"), "127.0.0.1:5", 7)
    assert made.command[1:] == [
        *("-m", "megatron_hacpo", "train", "runs/x/config.yaml"),
        *("--agent", "B", "--from-step", "7"),
    ]
    environment = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "3", "HACPO_STORE": "127.0.0.1:5"}
    environment["HACPO_SERVER_GPU"] = "6"
    assert made.environment.items() >= {**environment, "OMP_NUM_THREADS": "1"}.items()
    assert (made.name, made.group, made.log) == ("B.rank1", "B", Path("runs/x/logs/B.rank1.log"))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert worker(placement, 1, Path("runs/x"), "h:5", 0).environment["OMP_NUM_THREADS"] == "4"


SERVERS = "rollout={engine: sglang, sglang: {python: /p, servers: 2, tensor: 2}}"


def placed(nodes: list[Node], *settings: str) -> list[str]:
    """AGENT RANKS / SERVERS, for each agent."""
    return [
        f"{p.agent} {' '.join(map(str, p.ranks))}"
        + (f" / {' '.join(map(str, p.servers))}" if p.servers else "")
        for p in place(load(PAIR, settings), nodes)
    ]


def nodes(*devices: int) -> list[Node]:
    return [Node(f"n{i}", count) for i, count in enumerate(devices)]


@pytest.mark.parametrize(
    "room, settings, expected",
    [
        ([HERE], ["agents.A.parallel={tensor: 2, data: 2}", "agents.C={model: m}"],
         ["A here:0-3", "B here:4", "C here:5"]),
        ([HERE], ["agents.A.parallel.data=2", SERVERS],
         ["A here:0-1 / here:3-4 here:5-6", "B here:2 / here:7-8 here:9-10"]),
        ([HERE], ["agents.B.parallel.data=4", "agents.B.placement.colocated=true", SERVERS],
         ["A here:4 / here:5-6 here:7-8", "B here:0-3 / here:0-1 here:2-3"]),
        (nodes(8, 8), ["agents.A.parallel.data=8", "agents.B.parallel.data=8"], ["A n0:0-7", "B n1:0-7"]),
        (nodes(2, 2), [], ["A n0:0", "B n1:0"]),
        (nodes(8, 8), ["agents.C={model: m, parallel: {data: 8}}", "agents.A.parallel.data=4",
                       "agents.B.parallel.data=4"], ["A n1:0-3", "B n1:4-7", "C n0:0-7"]),
        (nodes(8, 8, 8), ["agents.A.parallel={tensor: 4, data: 4}", "agents.B.parallel.data=6"],
         ["A n0:0-7 n1:0-7", "B n2:0-5"]),
        (nodes(8, 8, 8), ["agents.A.parallel={data: 12}", "agents.B.parallel.data=8"],
         ["A n0:0-5 n1:0-5", "B n2:0-7"]),
        (nodes(6, 6), ["agents.A.parallel.data=3", "agents.B.parallel.data=3",
                       *(f"agents.{name}={{model: m, parallel: {{data: 2}}}}" for name in "CDE")],
         ["A n0:0-2", "B n0:3-5", "C n1:0-1", "D n1:2-3", "E n1:4-5"]),
        (nodes(4, 4), ["agents.A.parallel.data=2", "agents.B.parallel.data=4",
                       "agents.A.rollout={engine: sglang, sglang: {python: /p, tensor: 2}}"],
         ["A n1:0-1 / n1:2-3", "B n0:0-3"]),
        (nodes(2, 2), ["agents.A.parallel.data=2",
                       "agents.A.rollout={engine: sglang, sglang: {python: /p}}"],
         ["A n0:0-1 / n1:1", "B n1:0"]),
    ],
)  # fmt: skip
def test_placement(room: list[Node], settings: list[str], expected: list[str]) -> None:
    assert placed(room, *settings) == expected


def test_gpu_memory_is_not_handed_over_between_nodes() -> None:
    servers = "agents.A.rollout={engine: sglang, sglang: {python: /p, servers: 4}}"
    settings = ["agents.A.parallel.data=4", "agents.A.placement.colocated=true", servers]
    with pytest.raises(ConfigError, match=r"transport: auto: .* are on n0, n1; use disk"):
        placed(nodes(2, 2, 1), *settings)
    assert placed(nodes(4, 1), *settings)[0] == "A n0:0-3 / n0:0 n0:1 n0:2 n0:3"


def test_colocated_servers_lie_on_all_nodes_of_their_agent() -> None:
    servers = (
        "agents.A.rollout={engine: sglang, sglang: {python: /p, tensor: 2, servers: 4, transport: disk}}"
    )
    settings = ["agents.A.parallel.data=8", "agents.A.placement.colocated=true", servers]
    assert placed(nodes(4, 4, 1), *settings) == [
        "A n0:0-3 n1:0-3 / n0:0-1 n0:2-3 n1:0-1 n1:2-3",
        "B n2:0",
    ]


def test_components_of_a_heterogeneous_job_are_the_agents(tmp_path: Path) -> None:
    room = [Node("small", 2, 0), Node("big", 8, 1)]
    assert placed(room, "agents.B.parallel.data=8") == ["A small:0", "B big:0-7"]
    with pytest.raises(DoesNotFit, match=r"agents.A.parallel: its 3 processes.*there are 2 \(small 2\)"):
        placed(room, "agents.A.parallel.data=3")
    with pytest.raises(ConfigError, match="3 agents, but the job has 2 components"):
        placed(room, "agents.C={model: m}")


@pytest.mark.parametrize(
    "room, settings, message",
    [
        (nodes(2, 2), ["agents.A.parallel.tensor=4"],
         "agents.A.parallel.tensor: 4 processes that belong on one node; there are 4 (n0 2, n1 2)"),
        (nodes(2, 2), ["agents.A.parallel.data=4"],
         "agents.B.parallel: its 1 processes fit neither one node nor whole nodes in equal parts, each with "
         "whole tensor-parallel groups; the run needs 5 devices (A 4, B 1); there are 4 (n0 2, n1 2)"),
        (nodes(4, 4), ["agents.B.parallel.data=4", "agents.A.rollout={engine: sglang, sglang: {python: /p, "
                       "servers: 2, tensor: 2}}"],
         "agents.A.rollout.sglang.servers: no room for server 1 of 2: it needs 2 devices of one node; the "
         "run needs 9 devices (A 1, B 4, servers of A 4); there are 8 (n0 4, n1 4)"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_numbers(
    room: list[Node], settings: list[str], message: str
) -> None:
    with pytest.raises(DoesNotFit) as caught:
        placed(room, *settings)
    assert str(caught.value) == message


def test_nodes_that_a_run_needs() -> None:
    both = ["agents.A.parallel={tensor: 2, data: 4}", "agents.B.parallel.data=8"]
    assert nodes_needed(load(PAIR, both), 8) == 2
    assert nodes_needed(load(PAIR, both), 16) == 1
    assert nodes_needed(load(PAIR, both), 4) == 4
    with pytest.raises(DoesNotFit, match="tensor: 2 processes that belong on one node"):
        nodes_needed(load(PAIR, both), 1)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_store_serves_other_processes_on_one_address_alone(host: str) -> None:
    store = serve_store(host)
    listening = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [c.laddr.ip for c in listening if c.laddr.port == store.port] == [host]
    client = f"TCPStore({host!r}, {store.port}, is_master=False)"
    code = f"from torch.distributed import TCPStore; {client}.set('key', 'value')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert store.get("key") == b"value"


@pytest.mark.parametrize("early", ["", "raise SystemExit(3)"])
def test_an_attendant_ends_with_those_it_serves_and_not_before(tmp_path: Path, early: str) -> None:
    serving = tmp_path / "serving"
    served = python(
        "A.rank0", f"import os, time\nwhile not os.path.exists({str(serving)!r}): time.sleep(0.02)", tmp_path
    )
    code = f"open({str(serving)!r}, 'w'); import time; time.sleep(60)"
    supervise([served, replace(python("A.server0", code, tmp_path), attendant=True)], tick_seconds=0.1)
    left = python("A.rank1", WAIT, tmp_path)
    ended = replace(python("A.server1", early, tmp_path), attendant=True)
    told = "exited with code 3" if early else "has ended before those that it serves"
    with pytest.raises(WorkerFailed, match=f"^A.server1 {told}$"):
        supervise([left, ended], tick_seconds=0.1)


def run_in(folder: Path, *overrides: str) -> RunConfig:
    return load(PAIR, [f"run.dir={folder}", *overrides])


def test_the_run_folder_holds_the_resolved_configuration(tmp_path: Path) -> None:
    config = run_in(tmp_path / "runs")
    prepare_run_dir(config, IDENTITY, overwrite=False)
    assert load(config.path / "config.yaml") == config


def test_an_earlier_run_is_kept_unless_overwritten(tmp_path: Path) -> None:
    config = run_in(tmp_path)
    prepare_run_dir(config, IDENTITY, overwrite=False)
    (config.path / "old").write_text("precious")
    with pytest.raises(ConfigError, match="holds a run; choose another name or --overwrite"):
        prepare_run_dir(config, IDENTITY, overwrite=False)
    assert (config.path / "old").exists()
    prepare_run_dir(config, IDENTITY, overwrite=True)
    assert sorted(path.name for path in config.path.iterdir()) == ["config.yaml", "identity.json"]


def test_overwrite_deletes_neither_strangers_nor_what_the_run_reads(tmp_path: Path) -> None:
    config = run_in(tmp_path)
    config.path.mkdir()
    (config.path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="is there and is not a run"):
        prepare_run_dir(config, IDENTITY, overwrite=True)
    (config.path / "config.yaml").write_text("")
    config = run_in(tmp_path, f"agents.A.model={tmp_path / 'tiny-pair' / 'A' / 'hf'}")
    with pytest.raises(
        ConfigError, match=r"agents.A.model: .*: lies in the run that --overwrite would delete"
    ):
        prepare_run_dir(config, IDENTITY, overwrite=True)
    assert (config.path / "thesis.tex").exists()


def test_a_run_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"^run.dir: .*: cannot make .*; choose another run.dir$"):
        prepare_run_dir(run_in(tmp_path / "file"), IDENTITY, overwrite=False)


def test_a_failure_shows_the_end_of_the_log_or_the_users_mistake(tmp_path: Path) -> None:
    failed = python("A.rank0", "", tmp_path)
    failed.log.write_text("".join(f"line {n}\n" for n in range(100)))
    crash = describe_failure(WorkerFailed(failed, 1))
    assert crash[0] == f"error: A.rank0 exited with code 1; the others were stopped; the end of {failed.log}:"
    assert crash[-1] == "  | line 99"
    assert len(crash) == 21
    failed.log.write_text("Traceback ...\nValueError\nerror: data.path: x: y; z\n")
    assert describe_failure(WorkerFailed(failed, 2)) == [
        f"error: data.path: x: y; z (found by A.rank0; more in {failed.log})"
    ]


def report_step(folder: Path, step: int) -> None:
    for name, reward in (("A", 0.25), ("B", 0.5)):
        (folder / name).mkdir(exist_ok=True)
        with (folder / name / "metrics.jsonl").open("a") as file:
            write_row(file, {"step": step, "reward/mean": reward, "time/step": 1.5, "time/rollout": 0.75})


def test_plain_lines_off_a_terminal(tmp_path: Path) -> None:
    out = StringIO()
    view = RunView(tmp_path, ["A", "B"], 10, Console(file=out, width=80), line_seconds=0.0)
    with view:
        view.tick()
        assert out.getvalue() == "", "nothing has happened yet"
        report_step(tmp_path, 1)
        with (tmp_path / "A" / "eval.jsonl").open("a") as file:
            write_row(file, {"step": 0, "sampled": 0.256, "greedy": 0.3})
        view.tick()
        view.tick()
    first, second = out.getvalue().splitlines()
    assert first == "A at step 0: accuracy 0.256 sampled, 0.300 greedy"
    assert second.startswith("step 1/10  A reward 0.250  B reward 0.500  1.50 s/step: rollout 0.75 reward - ")


def test_live_table_on_a_terminal(tmp_path: Path) -> None:
    out = StringIO()
    view = RunView(tmp_path, ["A", "B"], 10, Console(file=out, width=120, force_terminal=True))
    report_step(tmp_path, 1)
    with view:
        view.tick()
    screen = out.getvalue()
    for part in ("1/10", "rollout", "waiting", "sync", "0.250", "0.500", "1.50"):
        assert part in screen


def test_a_half_written_row_waits(tmp_path: Path) -> None:
    view = RunView(tmp_path, ["A"], 10, Console(file=StringIO()))
    (tmp_path / "A").mkdir()
    with (tmp_path / "A" / "metrics.jsonl").open("w") as file:
        file.write('{"step": 1, "reward/')
        file.flush()
        view.tick()
        assert view._agents["A"].steps == 0
        file.write('mean": 1.0}\n')
        file.flush()
        view.tick()
        assert view._agents["A"].steps == 1


def test_a_run_that_is_going_on_is_not_overwritten(tmp_path: Path) -> None:
    config = load(PAIR, [f"run.dir={tmp_path}"])
    held = lock_run(config)
    with pytest.raises(ConfigError, match="a run of this name is going on"):
        lock_run(config)
    held.close()
    lock_run(config).close()

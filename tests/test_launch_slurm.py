"""What Slurm says, read: nodes, ends of steps, partitions; and how a step is asked for."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from test_launch import PAIR, nodes

from megatron_hacpo.config import ConfigError, load
from megatron_hacpo.launch import slurm, submit
from megatron_hacpo.launch.cause import find_cause
from megatron_hacpo.launch.placement import DoesNotFit, Node, place
from megatron_hacpo.launch.slurm import Job, SlurmJob, current_job, how_it_ended, numbers
from megatron_hacpo.launch.supervise import Worker

SERVER = "agents.A.rollout={engine: sglang, sglang: {python: /p}}"


def job(*devices: int, ids: tuple[str, ...] = ("7",)) -> Job:
    room = nodes(*devices)
    if len(ids) > 1:
        room = [Node(node.name, node.devices, i) for i, node in enumerate(room)]
    return Job("7", ids, tuple(replace(node, has_gpus=True) for node in room), 0)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> SlurmJob:
    monkeypatch.setattr(slurm, "own_address", lambda towards: f"towards {towards}")
    monkeypatch.setattr(slurm, "_ask", lambda *command: f"NodeName={command[-1]} NodeAddr=10.0.0.2 X=1\n")
    made = SlurmJob(job(2, 2))
    assert made.host == "towards 10.0.0.2"
    return made


def test_lists_of_numbers() -> None:
    assert numbers("3") == [3]
    assert numbers("0,2-4,7-8") == [0, 2, 3, 4, 7, 8]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("Exited with exit code 2", (2, None)),
        ("Killed", (-signal.SIGKILL, None)),
        ("Segmentation fault (core dumped)", (-signal.SIGSEGV, None)),
        (
            "Out Of Memory",
            (-signal.SIGKILL, "was killed: its node had no memory left (Slurm's limit, --mem)"),
        ),
        ("Something new", (1, "ended: Something new")),
    ],
)
def test_how_a_task_ended(text: str, expected: tuple[int, str | None]) -> None:
    assert how_it_ended(text) == expected


def test_gpus_in_lists_of_generic_resources() -> None:
    assert submit.count_gpus("gpu:8(IDX:0-7)") == 8
    assert submit.count_gpus("gpu:h100:4(S:0-1),shard:h100:32(S:0),gpu:mig-1g.5gb:7(S:0)") == 11
    assert submit.count_gpus("(null)") == 0


def test_nodes_and_their_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A heterogeneous job of GPUs of two kinds, then a job without any."""
    said = {
        "5": "JobId=5 HetJobId=5 JobName=x Nodes=a[1-2] CPU_IDs=0-7 Mem=0 GRES=gpu:h100:8(IDX:0-7) Nodes=a3 "
        "CPU_IDs=0-3 Mem=0 GRES=gpu:h100:4(IDX:0-3) MinCPUsNode=1\n"
        "JobId=6 HetJobId=5 Nodes=b1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0)",
        "6": "JobId=6 HetJobId=5 JobName=x Nodes=b1 CPU_IDs=0 Mem=0 GRES=gpu:1(IDX:0) Min",
        "9": "JobId=9 JobName=x Nodes=c[1-2] CPU_IDs=0-3,8 Mem=0 GRES= MinCPUsNode=1",
        "a[1-2]": "a1\na2\n",
        "a3": "a3\n",
        "b1": "b1\n",
        "c[1-2]": "c1\nc2\n",
    }
    monkeypatch.setattr(slurm, "_ask", lambda *command: said[command[-1]])
    for name in ("SLURM_HET_SIZE", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv("SLURMD_NODENAME", "c1")
    plain = current_job()
    assert (plain.nodes, plain.restarts) == ((Node("c1", 5), Node("c2", 5)), 0)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    monkeypatch.setenv("SLURM_JOB_ID_HET_GROUP_0", "5")
    monkeypatch.setenv("SLURM_JOB_ID_HET_GROUP_1", "6")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    het = current_job()
    gpus = {"a1": (8, 0), "a2": (8, 0), "a3": (4, 0), "b1": (1, 1)}
    assert het.nodes == tuple(Node(name, *numbers, has_gpus=True) for name, numbers in gpus.items())
    assert (het.id, het.ids, het.restarts) == ("5", ("5", "6"), 1)
    monkeypatch.setenv("SLURMD_NODENAME", "a2")
    with pytest.raises(ConfigError, match="this is a2, but the job's first node is a1"):
        current_job()
    said["b1"] = "a1"
    monkeypatch.setenv("SLURMD_NODENAME", "a1")
    with pytest.raises(ConfigError, match="two components of the job share a node"):
        current_job()


def test_outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ConfigError, match="--slurm: this is no batch script"):
        current_job()


def test_a_step_for_each_agent_and_server(
    machines: SlurmJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HACPO_PYTHON", "python")
    monkeypatch.setenv("HACPO_SRUN_OPTIONS", "--container-image=i.sqsh --container-mounts='/a b'")
    monkeypatch.setenv("HACPO_WRAPPER", "apptainer exec --nv i.sif")
    config = load(PAIR, [f"run.dir={tmp_path}", "run.name=r", "agents.A.parallel.data=2", SERVER])
    a, b, server = machines.workers(config, place(config, machines.nodes), "h:1", 3)
    logs = tmp_path / "r/logs"
    assert [(w.name, w.group, w.log.name, w.attendant) for w in (a, b, server)] == [
        ("A", "A", "A.srun.log", False),
        ("B", "B", "B.srun.log", False),
        ("A.server0", "A", "A.server0.srun.log", True),
    ]
    assert [(part.name, part.log) for part in a.parts] == [
        (f"A.rank{i}", logs / f"A.rank{i}.log") for i in (0, 1)
    ]
    command = list(a.command)
    assert command[:6] == [
        *("srun", "--job-name=A", "--nodelist=n0", "--nodes=1", "--ntasks=2", "--ntasks-per-node=2")
    ]
    assert {"--gpus-per-node=2", "--gpu-bind=none", *slurm.OPTIONS} <= set(command)
    assert command[command.index(f"--output={logs}/A.rank%t.log") :] == [
        f"--output={logs}/A.rank%t.log",
        *("--container-image=i.sqsh", "--container-mounts=/a b", "apptainer", "exec", "--nv", "i.sif"),
        *("bash", "-c", slurm.STEP, "step", "python", "-m", "megatron_hacpo", "train"),
        *(f"{tmp_path}/r/config.yaml", "--agent", "A", "--from-step", "3"),
    ]
    assert a.environment.items() >= {"WORLD_SIZE": "2", "FIRST_DEVICE": "0", "HACPO_STORE": "h:1"}.items()
    assert "--nodelist=n1" in server.command
    assert server.environment["HACPO_SERVER_GPU"] == "1"
    assert len({w.environment["HACPO_SERVER_KEY"] for w in (a, b, server)}) == 1
    with pytest.raises(ConfigError, match="srun gives % a meaning"):
        machines.workers(load(PAIR, ["run.dir=100%"]), [], "h:1", 0)


def test_the_jobs_options_are_not_the_steps(machines: SlurmJob, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = (
        "SLURM_GPUS",
        "SLURM_NTASKS",
        "SLURM_CPUS_PER_TASK",
        "SLURM_MEM_PER_NODE",
        "SLURM_GPUS_PER_NODE",
        "SRUN_CPUS_PER_TASK",
        "SLURM_STEP_GRES",
        "SLURM_LABELIO",
    )
    ours = ("SLURM_JOB_ID", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE", "SLURM_JOB_NODELIST", "SLURM_CONF")
    for name in theirs + ours:
        monkeypatch.setenv(name, "1")
    SlurmJob(job(2, 2))
    assert not set(theirs) & set(os.environ)
    assert set(ours) <= set(os.environ)


def test_components_are_named_to_srun(machines: SlurmJob, tmp_path: Path) -> None:
    machines = SlurmJob(job(2, 2, ids=("7", "8")))
    config = load(PAIR, [f"run.dir={tmp_path}"])
    a, b = machines.workers(config, place(config, machines.nodes), "h:1", 0)
    assert "--het-group=0" in a.command
    assert "--het-group=1" in b.command
    assert [
        ("--het-group=0" in p.command, "--het-group=1" in p.command)
        for p in machines.probes([], "h:1", tmp_path)
    ] == [
        (True, False),
        (False, True),
    ]


def read(machines: SlurmJob, folder: Path, code: int | None, text: str) -> list[str]:
    """The failures of agent A's step, whose srun has printed `text`."""
    config = load(PAIR, [f"run.dir={folder}", "run.name=r", "agents.A.parallel.data=2"])
    worker = machines.workers(config, place(config, machines.nodes), "h:1", 0)[0]
    worker.log.parent.mkdir(parents=True, exist_ok=True)
    worker.log.write_text(text)
    return [str(failure) for failure in machines.failures(worker, code)]


@pytest.mark.parametrize(
    "code, text, expected",
    [
        (0, "srun: cluster configuration lacks support for cpu binding\n", []),
        (
            143,
            "srun: error: n0: task 1: Exited with exit code 2\n"
            "srun: launch/slurm: _step_signal: Terminating StepId=4.0\nsrun: error: n0: task 0: Terminated\n",
            ["A.rank1 exited with code 2"],
        ),
        (
            143,
            "srun: error: n0: task 1: Exited with exit code 2\n"
            "srun: Terminating job step 4.0\nsrun: error: n0: task 0: Terminated\n",
            ["A.rank1 exited with code 2"],
        ),
        (137, "srun: error: n0: tasks 0-1: Killed\n",
         ["A.rank0 was killed by SIGKILL", "A.rank1 was killed by SIGKILL"]),
        (0, "srun: error: Node failure on n0\n", ["A has lost its node n0"]),
        (137, "srun: error: Node failure on n0\nsrun: error: n0: task 1: Killed\n",
         ["A has lost its node n0"]),
        (0, "srun: error: task 0 launch failed: Slurmd could not connect IO\n",
         ["A was not started: task 0 launch failed: Slurmd could not connect IO"]),
        (1, "srun: error: Unable to create step for job 5: Memory required by task is not available\n",
         ["A exited with code 1"]),
    ],
)  # fmt: skip
def test_failures_of_a_step_that_has_ended(
    machines: SlurmJob, tmp_path: Path, code: int, text: str, expected: list[str]
) -> None:
    assert read(machines, tmp_path, code, text) == expected


def test_failures_are_known_before_a_step_has_ended(machines: SlurmJob, tmp_path: Path) -> None:
    """It stays until all its tasks are gone, which may take a minute."""
    assert read(machines, tmp_path, None, "srun: error: something else\n") == []
    killed = "srun: error: n0: task 1: Killed\n"
    assert read(machines, tmp_path, None, killed) == ["A.rank1 was killed by SIGKILL"]


def test_a_lost_node_is_blamed_before_those_who_notice(machines: SlurmJob, tmp_path: Path) -> None:
    log = tmp_path / "B.rank0.log"
    log.write_text("RuntimeError: Connection reset by peer\n")
    worker = Worker("B", tmp_path / "B.srun.log", "B", command=[], environment={}, parts=[])
    worker.log.write_text("srun: error: Node failure on n1\n")
    (lost,) = machines.failures(worker, 0)
    other = Worker("A", log, "A", command=[], environment={})
    (noticed,) = machines.failures(other, 1)
    assert find_cause([noticed, lost]) is lost


def test_a_run_that_does_not_fit_is_told_which_allocation_would_do() -> None:
    config = load(PAIR, ["agents.B.parallel.data=16"])
    with pytest.raises(DoesNotFit) as caught:
        slurm.place_in(job(8), config, ["x y.yaml", "--set", "run.seed=2"])
    assert caught.value.lines[1] == (
        "it fits 3 such nodes: sbatch --nodes=3 --gpus-per-node=8 slurm/hacpo_multinode.sh 'x y.yaml' "
        "--set run.seed=2"
    )


def test_what_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(PAIR, ["agents.A.parallel.data=2", SERVER])
    small = submit.request(config, submit.NodeKind(8, 64))
    assert (small.nodes, small.gpus) == (1, 4)
    assert submit.request(config, submit.NodeKind(2, 64)).nodes == 2
    asked = submit.request(config, submit.NodeKind(0, 2)).command(Path("s.sh"), ["c"], ["--time=1"])
    assert asked == ["sbatch", "--nodes=2", "--gpus-per-node=0", "--time=1", "s.sh", "c"]


def test_partitions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The default one, the one that env.sh names, and the one of an option."""
    script, environment = tmp_path / "job.sh", tmp_path / "env.sh"
    environment.write_text("")
    sinfo = tmp_path / "sinfo"
    sinfo.write_text(
        '#!/bin/bash\n[ -z "$3" ] && echo "cpu|9|(null)|64" && echo "gpu*|3|gpu:a100:4(S:0-1)|128+" '
        '&& echo "gpu*|30|gpu:h100:8(S:0-1)|96"\n'
        '[ "$3" = --partition=small ] && echo "small|1|gpu:1|4"\n'
        '[ "$3" = --partition=big ] && echo "big|2|gpu:16|4"\ntrue\n'
    )
    sinfo.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.delenv("SBATCH_PARTITION", raising=False)
    assert submit.usual_nodes([], script) == submit.NodeKind(8, 96)
    environment.write_text("export SBATCH_PARTITION=small\n")
    assert submit.usual_nodes([], script) == submit.NodeKind(1, 4)
    assert submit.usual_nodes(["--time=1", "-p big"], script) == submit.NodeKind(16, 4)
    assert submit.usual_nodes(["--partition=big"], script) == submit.NodeKind(16, 4)
    with pytest.raises(ConfigError, match="sinfo: no partition none; where Slurm is, name a partition"):
        submit.usual_nodes(["--partition=none"], script)

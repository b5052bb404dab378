"""The scripts of slurm/, by sbatch on a real cluster of two nodes, whose eight GPUs each are stand-ins."""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from sglang_servers import sglang_python
from slurm_cluster import Cluster, JobEnd, cluster, require
from test_end_to_end import SMALL, launch
from test_resume import assert_same, results, rows

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted(path for path in (ROOT / "slurm").glob("*.sh") if path.name != "env.sh")
MULTINODE, HET = "slurm/hacpo_multinode.sh", "slurm/hacpo_het.sh"
PAIR = "examples/tiny/pair.yaml"
TWO_RANKS = "agents.A.parallel.data=2"
FAR = "run.steps=100000"
SHARED = ("--oversubscribe", "--mem=1000", "--gpus-per-node=2")
"""Of a job that leaves room on its nodes for others."""

SECONDS = 300.0
NAMED_SECONDS = 60.0
"""Within which a job has to end of what killed a part of it."""

pytestmark = pytest.mark.slurm


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require()
    with cluster(tmp_path_factory.mktemp("slurm"), cpus=8, gpus=8) as up:
        yield up


@pytest.fixture
def ipv6(tmp_path: Path) -> Iterator[Cluster]:
    require()
    with cluster(tmp_path / "c", cpus=8, gpus=8, ip=6) as up:
        yield up


class Job:
    """A submitted job. output: what it has printed."""

    def __init__(
        self,
        slurm: Cluster,
        folder: Path,
        name: str,
        *arguments: str,
        script: str = MULTINODE,
        options: tuple[str, ...] = (),
    ) -> None:
        """arguments: the script's."""
        self._file = folder / f"{name}.out"
        self._slurm = slurm
        environment = {
            **os.environ,
            "HACPO_LAUNCHER_PYTHON": sys.executable,
            "HACPO_CPU": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.id = slurm.sbatch(f"--output={self._file}", *options, script, *arguments, env=environment)

    @property
    def output(self) -> str:
        return self._file.read_text() if self._file.is_file() else ""

    def end(self, seconds: float = SECONDS) -> JobEnd:
        """Wait; none of its processes may be left."""
        try:
            end = self._slurm.wait(self.id, seconds)
        except AssertionError:
            self._slurm.run("scancel", self.id)
            raise AssertionError(self.output) from None
        left = [p for node in self._slurm.nodes for p in self._slurm.processes(node, "megatron_hacpo")]
        psutil.wait_procs(left, timeout=10)
        assert not [p for p in left if p.is_running()]
        return end


def run_job(slurm: Cluster, folder: Path, name: str, *settings: str, **options: object) -> Job:
    """A small run as a job."""
    return Job(
        slurm,
        folder,
        name,
        PAIR,
        *sets(*SMALL, f"run.dir={folder}", f"run.name={name}", *settings),
        **options,
    )


def sets(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def ranks(slurm: Cluster, node: str, run: Path) -> list[psutil.Process]:
    """The processes of a run's agents on a node."""
    found = slurm.processes(node, f"train {run}/config.yaml")
    return [p for p in found if p.name() not in ("srun", "bash")]


def run_rows(run: Path, agent: str) -> list[dict[str, Any]]:
    return rows(run / agent / "metrics.jsonl")


def until(condition: Callable[[], object], job: Job) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, job.output
        time.sleep(0.1)


def reaches(folder: Path, step: int, job: Job) -> None:
    """Wait until agent B of a run has made a step."""
    until(lambda: (folder / "B/metrics.jsonl").is_file() and len(run_rows(folder, "B")) >= step, job)


def test_of_two_jobs_on_the_same_nodes_one_loses_a_rank_and_the_other_is_the_run_of_one_machine(
    slurm: Cluster, tmp_path: Path
) -> None:
    whole = run_job(slurm, tmp_path, "whole", TWO_RANKS, "run.steps=20", options=SHARED)
    killed = run_job(slurm, tmp_path, "killed", TWO_RANKS, FAR, options=SHARED)
    reaches(tmp_path / "killed", 1, killed)
    (rank,) = [p for p in ranks(slurm, "node1", tmp_path / "killed") if p.environ()["RANK"] == "1"]
    rank.kill()
    began = time.monotonic()
    assert slurm.wait(killed.id, NAMED_SECONDS) == JobEnd("FAILED", 1)
    print(f"{time.monotonic() - began:.1f} s from the kill to the job's end")
    assert "error: A.rank1 was killed by SIGKILL; the others were stopped; the end of" in killed.output
    assert whole.end() == JobEnd("COMPLETED", 0), whole.output
    assert_same(results(tmp_path / "whole"), results(launch(tmp_path, "here", TWO_RANKS, "run.steps=20")))
    assert whole.output.index("node1:0-1") < whole.output.index("logs in"), "placement comes before the start"
    assert f"logs in {tmp_path}/whole/logs" in whole.output
    logs = {path.name for path in (tmp_path / "whole/logs").iterdir()}
    assert logs == {"A.srun.log", "A.rank0.log", "A.rank1.log", "B.srun.log", "B.rank0.log"}


def test_a_node_that_is_down_ends_the_job(slurm: Cluster, tmp_path: Path) -> None:
    job = run_job(slurm, tmp_path, "down", FAR, options=SHARED)
    reaches(tmp_path / "down", 1, job)
    slurm.node_down("node2")
    try:
        began = time.monotonic()
        assert job.end(NAMED_SECONDS) == JobEnd("FAILED", 1)
        print(f"{time.monotonic() - began:.1f} s from the loss to the job's end")
        assert "error: B has lost its node node2; the others were stopped" in job.output
    finally:
        slurm.node_up("node2")


def test_a_heterogeneous_job_gives_each_agent_a_component(ipv6: Cluster, tmp_path: Path) -> None:
    """On nodes that have IPv6 alone."""
    job = run_job(ipv6, tmp_path, "het", TWO_RANKS, "run.steps=1", script=HET)
    assert job.end() == JobEnd("COMPLETED", 0), job.output
    assert "node1:0-1" in job.output
    assert "node2:0" in job.output
    assert [len(run_rows(tmp_path / "het", agent)) for agent in "AB"] == [1, 1]
    assert '"store": "[fd78::1]:' in (tmp_path / "het/launch.json").read_text()


@pytest.mark.sglang
def test_a_server_on_another_node_than_its_trainer(slurm: Cluster, tmp_path: Path) -> None:
    """It is killed, and comes back with the current weights; then its step is killed."""
    server = f"agents.A.rollout={{engine: sglang, sglang: {{python: {sglang_python()}, cache_tokens: 8192}}}}"
    job = run_job(slurm, tmp_path, "server", TWO_RANKS, FAR, server, options=SHARED)
    reaches(tmp_path / "server", 4, job)
    assert "node1:0-1" in job.output
    assert "node2:1" in job.output
    assert len({row["grad_norm"] for row in run_rows(tmp_path / "server", "A")}) > 1, "weights change"
    assert not slurm.processes("node1", "cpu_server.py")
    for process in slurm.processes("node2", "cpu_server.py"):
        with suppress(psutil.NoSuchProcess):
            process.kill()
    until(lambda: "SGLang server 0" in job.output and "is started again" in job.output, job)
    reaches(tmp_path / "server", len(run_rows(tmp_path / "server", "A")) + 2, job)
    assert (tmp_path / "server/logs/A.server0.1.log").is_file()
    for row in run_rows(tmp_path / "server", "A"):
        assert row["reward/count"] == 32
        assert row["logprob/engine_trainer_max_abs_diff"] < 1e-4
    (step,) = [p for p in slurm.processes("node2", " serve ") if p.name() != "srun"]
    step.kill()
    assert job.end(NAMED_SECONDS) == JobEnd("FAILED", 1)
    assert "error: A.server0 was killed by SIGKILL; the others were stopped" in job.output


def test_checkpoints_are_converted_and_measured_in_jobs(slurm: Cluster, tmp_path: Path) -> None:
    converting = Job(
        slurm,
        tmp_path,
        "convert",
        "to-megatron",
        "examples/tiny/A",
        f"{tmp_path}/A",
        script="slurm/convert.sh",
    )
    assert converting.end() == JobEnd("COMPLETED", 0), converting.output
    measuring = Job(
        *(slurm, tmp_path, "eval", PAIR, "--agent", "A", "--model", f"{tmp_path}/A"),
        *sets("evaluation.prompts=8"),
        script="slurm/eval.sh",
    )
    assert measuring.end() == JobEnd("COMPLETED", 0), measuring.output
    assert "greedy" in measuring.output


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_slurm_accepts_every_script(script: Path, slurm: Cluster) -> None:
    done = slurm.run("sbatch", "--test-only", str(script))
    assert done.returncode == 0, done.stderr


def test_shellcheck_has_nothing_to_say() -> None:
    assert SCRIPTS
    checker = shutil.which("shellcheck")
    if checker is None:
        assert not os.environ.get("CI"), "apt-get install shellcheck"
        pytest.skip("not installed: apt-get install shellcheck")
    done = subprocess.run(
        [checker, "--external-sources", *SCRIPTS, "slurm/env.sh"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_what_cannot_run_is_refused_before_a_model_is_loaded(slurm: Cluster, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    shutil.copy(ROOT / PAIR, hidden / "pair.yaml")
    mount = slurm.nodes["node2"].command("mount", "-t", "tmpfs", "none", str(hidden), cwd=ROOT)
    subprocess.run(mount, check=True)
    twice = tmp_path / "twice.yaml"
    twice.write_text((ROOT / PAIR).read_text().replace("  B:\n", "  A:\n"))
    launches = {
        "devices": [PAIR, *sets("agents.B.parallel.data=16")],
        "fits no node": [PAIR, *sets("agents.A.parallel.data=9")],
        "twice": [str(twice)],
        "hidden": [str(hidden / "pair.yaml")],
        "nowhere": ["no/such.yaml"],
    }
    script = tmp_path / "job.sh"
    lines = ["#!/bin/bash", "#SBATCH --nodes=2 --gpus-per-node=8 --ntasks-per-node=1"]
    for name, arguments in launches.items():
        command = [
            sys.executable,
            "-m",
            "megatron_hacpo",
            "launch",
            "--slurm",
            *arguments,
            *sets(f"run.dir={tmp_path}/runs"),
        ]
        out = shlex.quote(f"{tmp_path}/{name}.txt")
        lines.append(f'{shlex.join(command)} > {out} 2>&1; echo "code $?" >> {out}')
    script.write_text("\n".join(lines) + "\n")
    job = Job(slurm, tmp_path, "refused", script=str(script))
    job.end()
    told = {name: (tmp_path / f"{name}.txt").read_text() for name in launches}
    expected = {
        "devices": [
            "the run needs 17 devices (A 1, B 16); there are 16 (node1 8, node2 8)\n",
            "error: it fits 3 such nodes: sbatch --nodes=3 --gpus-per-node=8 slurm/hacpo_multinode.sh "
            f"{PAIR} --set agents.B.parallel.data=16 --set run.dir={tmp_path}/runs",
        ],
        "fits no node": [
            "error: agents.A.parallel: its 9 processes fit neither one node nor whole nodes in equal parts, "
        ],
        "twice": [f"error: config: {twice}:"],
        "hidden": [f"error   config: {hidden}/pair.yaml"],
        "nowhere": ["error: config: no/such.yaml: node1 does not see it"],
    }
    for name, wanted in expected.items():
        assert told[name].endswith("code 2\n"), told[name]
        assert all(line in told[name] for line in wanted), told[name]
        assert "Traceback" not in told[name]
    assert not list((tmp_path / "runs").glob("*")), "nothing was begun"


def test_submit_asks_for_what_the_run_needs(slurm: Cluster, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_hacpo", "submit", PAIR]
    dry = slurm.run(*command, *sets("agents.B.parallel.data=16"), "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert dry.stdout.splitlines()[-1] == (
        f"sbatch --nodes=3 --gpus-per-node=8 slurm/hacpo_multinode.sh {PAIR} --set agents.B.parallel.data=16"
    )
    real = slurm.run(*command, *sets("run.steps=1"), "--sbatch=--hold", f"--sbatch=--output={tmp_path}/out")
    assert real.returncode == 0, real.stderr
    assert (
        f"sbatch --nodes=1 --gpus-per-node=2 --hold --output={tmp_path}/out {MULTINODE} {PAIR}" in real.stdout
    )
    job = real.stdout.split()[-1]
    assert slurm.job(job)["NumNodes"].startswith("1")
    assert "gpu:2" in slurm.job(job)["TresPerNode"]
    slurm.run("scancel", job)


@pytest.mark.slow
def test_near_the_time_limit_a_job_saves_is_requeued_and_goes_on(slurm: Cluster, tmp_path: Path) -> None:
    name, steps = "requeued", "run.steps=40"
    job = run_job(slurm, tmp_path, name, TWO_RANKS, steps, options=SHARED)
    reaches(tmp_path / name, 2, job)
    slurm.run("scancel", "--batch", "--signal=USR1", job.id)
    until(lambda: slurm.job(job.id)["Restarts"] == "1", job)
    assert job.end() == JobEnd("COMPLETED", 0), job.output
    assert "stopped as asked after step" in job.output
    assert "requeued (1): the run goes on" in job.output
    assert_same(results(tmp_path / name), results(launch(tmp_path, "here", TWO_RANKS, steps)))

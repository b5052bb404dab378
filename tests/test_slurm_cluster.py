"""The cluster that the tests of Slurm jobs start."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from slurm_cluster import Cluster, JobEnd, cluster, require

pytestmark = pytest.mark.slurm

BATCH = "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=1\n"
SECONDS = 60.0


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require()
    with cluster(tmp_path_factory.mktemp("slurm")) as up:
        yield up


def submit(slurm: Cluster, folder: Path, script: str) -> str:
    """A job of two nodes that writes to `folder`/out."""
    file = folder / "job.sh"
    file.write_text(BATCH + script)
    return slurm.sbatch(f"--output={folder}/out", str(file), cwd=folder)


def test_a_job_has_two_hosts_with_gpus(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(
        slurm, tmp_path, "srun bash -c 'echo $SLURM_PROCID $(hostname) $CUDA_VISIBLE_DEVICES $PWD'\n"
    )
    assert slurm.wait(job, SECONDS) == JobEnd("COMPLETED", 0)
    lines = sorted((tmp_path / "out").read_text().splitlines())
    assert lines == [f"0 node1 0 {tmp_path}", f"1 node2 0 {tmp_path}"]


def test_two_jobs_share_the_nodes(slurm: Cluster, tmp_path: Path) -> None:
    meet = 'touch {0}; until [ -e {1} ]; do sleep 0.1; done; echo "$CUDA_VISIBLE_DEVICES"\n'
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    files = str(tmp_path / "first"), str(tmp_path / "second")
    jobs = [
        submit(slurm, tmp_path / "one", meet.format(*files)),
        submit(slurm, tmp_path / "two", meet.format(*reversed(files))),
    ]
    assert [slurm.wait(job, SECONDS).state for job in jobs] == ["COMPLETED", "COMPLETED"]
    assert {(tmp_path / name / "out").read_text() for name in ("one", "two")} == {"0\n", "1\n"}


def test_a_failed_jobs_code_arrives(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "srun bash -c 'exit $((3 * SLURM_PROCID))'\n")
    assert slurm.wait(job, SECONDS) == JobEnd("FAILED", 3)


def test_a_heterogeneous_job_fails_as_a_whole(slurm: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "job.sh"
    file.write_text(
        "#!/bin/bash\n#SBATCH --ntasks=1\n#SBATCH hetjob\n#SBATCH --ntasks=1 --partition=other\n"
        "srun --het-group=1 bash -c 'exit 4'\n"
    )
    job = slurm.sbatch(f"--output={tmp_path}/out", str(file))
    assert slurm.wait(job, SECONDS) == JobEnd("FAILED", 4)
    assert [part["Partition"] for part in slurm.jobs(job)] == ["debug", "other"]


def test_a_process_on_a_node_can_be_killed(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "srun --kill-on-bad-exit=1 sleep 987\n")
    deadline = time.monotonic() + SECONDS
    while not (tasks := [p for p in slurm.processes("node2", "sleep 987") if p.name() == "sleep"]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    tasks[0].kill()
    assert slurm.wait(job, SECONDS) == JobEnd("FAILED", 128 + signal.SIGTERM)  # how node1's task was ended
    assert "node2: task 1: Killed" in (tmp_path / "out").read_text()


def test_a_job_starts_again_when_its_node_is_back(slurm: Cluster, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, '[ "$SLURM_RESTART_COUNT" ] || srun sleep 987\n')
    slurm.reaches(job, "RUNNING", SECONDS)
    slurm.node_down("node2")
    slurm.reaches(job, "PENDING", SECONDS)
    slurm.node_up("node2")
    assert slurm.wait(job, SECONDS) == JobEnd("COMPLETED", 0)
    assert slurm.job(job)["Restarts"] == "1"


def test_clusters_do_not_meet(slurm: Cluster, tmp_path: Path) -> None:
    with cluster(tmp_path / "other", nodes=1, cpus=64) as other:
        job = other.sbatch("--ntasks=64", f"--output={tmp_path}/out", "--wrap=hostname")
        assert other.wait(job, SECONDS) == JobEnd("COMPLETED", 0)
        assert other.idle() == ["node1"]
    assert slurm.idle() == ["node1", "node2"]


def test_nothing_is_left_of_a_killed_test(tmp_path: Path) -> None:
    require()
    code = (
        "import slurm_cluster, sys, time\n"
        "from pathlib import Path\n"
        "with slurm_cluster.cluster(Path(sys.argv[1])) as up:\n"
        "    up.sbatch('--nodes=2', '--wrap=srun sleep 987')\n"
        "    while not up.processes('node2', 'sleep 987'):\n"
        "        time.sleep(0.1)\n"
        "    print('up', flush=True)\n"
        "    time.sleep(987)\n"
    )
    folder = tmp_path / "slurm"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        text=True,
    ) as test:
        assert test.stdout is not None
        assert test.stdout.readline() == "up\n"
        processes = psutil.Process(test.pid).children(recursive=True)
        assert {"slurmctld", "slurmd", "munged", "sleep"} <= {process.name() for process in processes}
        os.kill(test.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert alive == []

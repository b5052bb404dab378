"""A real Slurm cluster on one machine, for tests.

Every node, and the machine of the controller, is a set of namespaces with its own host name, addresses,
process ids and /etc/hosts; other files are the machine's. A shell holds the namespaces until the pipe to its
standard input closes, as it does however the test ends; the kernel then kills all that runs in them. Nothing
of a cluster has a name on the machine, so several can be up at once.
"""

import os
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "ip": "iproute2",
    "unshare": "util-linux",
}
"""Programs, and the Debian packages that have them. Slurm's plugins are in slurm-wlm-basic-plugins."""
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Daemons may not be on a user's path."""
UNSHARE = ("unshare", "--net", "--mount", "--uts", "--pid", "--fork", "--mount-proc")
NETWORKS = {
    4: ("10.78.0.", "/24", ""),
    6: ("fd78::", "/64", "CommunicationParameters=EnableIPv6,DisableIPv4"),
}
"""By the version of IP: what addresses begin with, how long that is, and what Slurm has to be told."""
UP_SECONDS = 60.0
ALIVE = {"PENDING", "CONFIGURING", "RUNNING", "SUSPENDED", "COMPLETING", "REQUEUED", "STOPPED", "SIGNALING"}
"""States of a job that has not ended."""

HOLDER = """
set -e
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mount --bind "$2/resolv.conf" /etc/resolv.conf   # no waiting for a name server out of reach
mount -t tmpfs none /sys/fs/cgroup               # slurmd looks for one, and would write to the machine's
echo ready
read -r   # the network is there
eval "$3"
read -r   # never comes; fails when the test is gone
"""

DAEMONS = """
munged --force --key-file={munge}.key --socket={munge}.sock \\
    --pid-file={munge}.pid --log-file={munge}.log --seed-file={munge}.seed
slurmctld -D &
"""
"""Of the controller's machine."""

SLURM_CONF = """
ClusterName=test
SlurmctldHost=ctl({network}254)
{communication}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A requeued job starts again only when its credentials have expired, by default after two minutes.
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0,bf_interval=1
MpiDefault=none
ReturnToService=1
KillWait=5
MinJobAge=100000
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=node[1-{nodes}] CPUs={cpus} RealMemory=1000000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES DefaultTime=10 MaxTime=UNLIMITED State=UP
PartitionName=other Nodes=ALL DefaultTime=10 MaxTime=UNLIMITED State=UP
"""


class JobEnd(NamedTuple):
    """How a job ended; of a heterogeneous one, the first part that did not complete."""

    state: str
    exit_code: int
    signal: int = 0
    """That killed the batch script."""


def why_not() -> str | None:
    """What keeps this machine from having a cluster."""
    missing = sorted({package for name, package in PACKAGES.items() if not shutil.which(name, path=PATH)})
    if missing:
        return f"not installed: apt-get install slurm-wlm-basic-plugins {' '.join(missing)}"
    if os.geteuid() != 0:
        return "only root can start a Slurm cluster"
    bridge = [*UNSHARE, "ip", "link", "add", "br0", "type", "bridge"]
    tried = subprocess.run(bridge, env={"PATH": PATH}, capture_output=True, text=True)
    return f"no namespaces or bridges here: {tried.stderr.strip()}" if tried.returncode else None


def require() -> None:
    """Skip the test where there can be no cluster, except in CI, where there has to be one."""
    reason = why_not()
    if reason and os.environ.get("CI"):
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


class Machine:
    """Namespaces, and the shell that holds them, which is the first process in them."""

    def __init__(self, name: str, folder: Path, daemons: str) -> None:
        with (folder / f"{name}.log").open("w") as log:
            self._unshare = subprocess.Popen(
                [*UNSHARE, "bash", "-c", HOLDER, "holder", name, str(folder), daemons],
                env={"PATH": PATH, "HOME": str(folder), "SLURM_CONF": str(folder / "slurm.conf")},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C is for the tests alone
            )
        assert self._unshare.stdout is not None
        assert self._unshare.stdout.readline() == "ready\n", (folder / f"{name}.log").read_text()
        self.pid = psutil.Process(self._unshare.pid).children()[0].pid

    def ip(self, *commands: str) -> None:
        """Set up its network."""
        enter = ["nsenter", f"--net=/proc/{self.pid}/ns/net", "ip", "-batch", "-"]
        subprocess.run(enter, input="\n".join(commands), env={"PATH": PATH}, text=True, check=True)

    def start(self) -> None:
        """Start the daemons."""
        assert self._unshare.stdin is not None
        self._unshare.stdin.write("\n")
        self._unshare.stdin.flush()

    def command(self, *command: str, cwd: Path) -> list[str]:
        """That runs a command inside."""
        inside = ["--net", "--mount", "--uts", "--pid", f"--wdns={cwd}"]
        return ["nsenter", f"--target={self.pid}", *inside, "--", *command]

    def processes(self, text: str) -> list[psutil.Process]:
        """Those inside that have `text` in their command line."""
        network = os.readlink(f"/proc/{self.pid}/ns/net")
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                inside = os.readlink(f"/proc/{process.pid}/ns/net") == network
                if inside and text in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def end(self) -> None:
        """Returns when none of its processes is left."""
        with self._unshare:  # closes the pipe, and waits
            pass


class Cluster:
    """Slurm's commands, and what its jobs do; `nodes` are called node1, node2 and so on."""

    def __init__(self, folder: Path, controller: Machine, nodes: Mapping[str, Machine]) -> None:
        self.nodes = nodes
        self._folder = folder
        self._controller = controller

    def run(
        self, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the controller's machine; `env` replaces the test's own environment."""
        environment = {**(os.environ if env is None else env), "SLURM_CONF": str(self._folder / "slurm.conf")}
        inside = self._controller.command(*command, cwd=cwd)
        return subprocess.run(
            inside, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )

    def sbatch(self, *args: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        """Submit a job; its id."""
        return self._checked("sbatch", "--parsable", *args, cwd=cwd, env=env).strip()

    def jobs(self, job_id: str) -> list[dict[str, str]]:
        """What Slurm knows of a job, or of each part of a heterogeneous one."""
        lines = self._checked("scontrol", "show", "job", "--details", "--oneliner", job_id).splitlines()
        return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines if line]

    def job(self, job_id: str) -> dict[str, str]:
        """What Slurm knows of a job, or of the first part of a heterogeneous one."""
        return self.jobs(job_id)[0]

    def wait(self, job_id: str, seconds: float) -> JobEnd:
        """Wait until a job has ended."""
        parts = self._until(job_id, lambda parts: not ALIVE & {part["JobState"] for part in parts}, seconds)
        bad = next((part for part in parts if part["JobState"] != "COMPLETED"), parts[0])
        code, number = bad["ExitCode"].split(":")
        return JobEnd(bad["JobState"], int(code), int(number))

    def reaches(self, job_id: str, state: str, seconds: float) -> dict[str, str]:
        """Wait until a job is in a state; what Slurm knows of it then."""
        return self._until(job_id, lambda parts: parts[0]["JobState"] == state, seconds)[0]

    def processes(self, node: str, text: str) -> list[psutil.Process]:
        """Those on a node that have `text` in their command line, so also the srun of a task.

        Their ids are the test's, not those that they see themselves.
        """
        return self.nodes[node].processes(text)

    def node_down(self, node: str) -> None:
        """As Slurm does itself when a node has not answered for long."""
        self._checked("scontrol", "update", f"node={node}", "state=down", "reason=test")

    def node_up(self, node: str) -> None:
        self._checked("scontrol", "update", f"node={node}", "state=resume")

    def idle(self) -> list[str]:
        """The nodes that have nothing to do."""
        listed = self.run("sinfo", "--noheader", "--Node", "--partition=debug", "--format=%n %t").stdout
        return [line.split()[0] for line in listed.splitlines() if line.endswith(" idle")]

    def _until(
        self, job_id: str, reached: Callable[[list[dict[str, str]]], bool], seconds: float
    ) -> list[dict[str, str]]:
        deadline = time.monotonic() + seconds
        while not reached(parts := self.jobs(job_id)):
            assert time.monotonic() < deadline, parts
            time.sleep(0.1)
        return parts

    def _checked(self, *command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
        done = self.run(*command, cwd=cwd, env=env)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout


@contextmanager
def cluster(folder: Path, nodes: int = 2, cpus: int = 2, gpus: int = 2, ip: int = 4) -> Iterator[Cluster]:
    """A cluster that is up; its nodes may have more CPUs than the machine has, and their GPUs are stand-ins.

    ip: the only version of IP that its machines have, but for the loopback.
    Its logs are in `folder`, which needs a short path: Slurm puts sockets in it.
    """
    names = [f"node{number}" for number in range(1, nodes + 1)]
    network, length, _ = NETWORKS[ip]
    _write_files(folder, names, cpus, gpus, ip)
    with ExitStack() as stack:

        def machine(name: str, daemons: str) -> Machine:
            started = Machine(name, folder, daemons)
            stack.callback(started.end)
            return started

        controller = machine("ctl", DAEMONS.format(munge=folder / "munge"))
        workers = {name: machine(name, "slurmd -D &") for name in names}
        controller.ip(
            "link set lo up",
            "link add br0 type bridge forward_delay 0",
            f"addr add {network}254{length} dev br0 {'nodad' if ip == 6 else ''}",
            "link set br0 up",
        )
        for number, worker in enumerate(workers.values(), 1):
            controller.ip(
                f"link add v{number} type veth peer name eth0 netns {worker.pid}",
                f"link set v{number} master br0 up",
            )
            address = f"addr add {network}{number}{length} dev eth0 {'nodad' if ip == 6 else ''}"
            worker.ip("link set lo up", address, "link set eth0 up")
        for each in (controller, *workers.values()):
            each.start()
        up = Cluster(folder, controller, workers)
        deadline = time.monotonic() + UP_SECONDS
        while up.idle() != names:
            logs = "".join((folder / f"{name}.log").read_text() for name in ("ctl", *names))
            assert time.monotonic() < deadline, f"the Slurm cluster did not come up:\n{logs}"
            time.sleep(0.1)
        yield up


def _write_files(folder: Path, names: list[str], cpus: int, gpus: int, ip: int) -> None:
    nodes = len(names)
    network, _, communication = NETWORKS[ip]
    addresses = {"localhost": "127.0.0.1", "ctl": f"{network}254"}
    addresses |= {name: f"{network}{number}" for number, name in enumerate(names, 1)}
    for name in ("state", *names):
        (folder / name).mkdir(parents=True)
    (folder / "hosts").write_text("".join(f"{address} {name}\n" for name, address in addresses.items()))
    (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    (folder / "slurm.conf").write_text(
        SLURM_CONF.format(
            folder=folder, network=network, communication=communication, nodes=nodes, cpus=cpus, gpus=gpus
        )
    )
    devices = [folder / f"nvidia{index}" for index in range(gpus)]
    for device in devices:
        os.mknod(device, stat.S_IFCHR, os.makedev(1, 3))  # as /dev/null: Slurm wants devices
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used, but looked for

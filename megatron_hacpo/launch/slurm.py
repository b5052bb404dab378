"""The processes of a run in a Slurm job: a step (srun) for each agent, and one for each rollout server."""

import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.launch.folder import CONFIG
from megatron_hacpo.launch.local import defaults, train_command
from megatron_hacpo.launch.placement import Block, DoesNotFit, Node, Placement, nodes_needed, place, rank_name
from megatron_hacpo.launch.submit import SCRIPT, count_gpus
from megatron_hacpo.launch.supervise import Process, Worker, WorkerFailed, read_code
from megatron_hacpo.process.network import own_address

PYTHON = "HACPO_PYTHON"
"""Environment variable: the interpreter of the steps, as they see it; by default the launcher's own."""

SRUN_OPTIONS = "HACPO_SRUN_OPTIONS"
"""Environment variable: further options of every srun, such as those of a container plugin."""

WRAPPER = "HACPO_WRAPPER"
"""Environment variable: a command that runs another one in a container, before everything in a step."""

OPTIONS = (
    "--overlap",  # steps share the job's nodes; who has which device is the placement's business
    "--overcommit",  # a step's processes need not have a CPU each of the job's tasks
    "--mem=0",
    "--cpu-bind=none",
    "--kill-on-bad-exit=1",
    "--distribution=block",
    "--export=ALL",
    "--input=none",
    "--mpi=none",
    "--open-mode=truncate",
)

TAKEN_FOR_OPTIONS = re.compile(
    r"SLURM_(?:CPUS_PER_|GPUS$|GPUS_PER_|GPU_|NTASKS|TASKS_PER_NODE$|TRES_|MEM_|CPU_|DISTRIBUTION$|EXACT$"
    r"|EXCLUSIVE$|WHOLE$|HINT$|THREADS_PER_CORE$|THREAD_SPEC$|CORE_SPEC$|GRES$|STEP_GRES$|NPROCS$|LABELIO$)"
    r"|SRUN_CPUS_PER_TASK$"
)
"""Variables of a job that srun would take for options of every step, though they are the job's."""

STEP = 'export RANK=$SLURM_PROCID LOCAL_RANK=$(($SLURM_LOCALID + $FIRST_DEVICE)); exec "$@"'
"""Of bash: what a process of a step does before it is a rank."""

_ENDED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)
_NODE_FAILED = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_ERROR = re.compile(r"^srun: error: (.*)$", re.MULTILINE)
_TERMINATING = re.compile(r"^srun: .*Terminating (?:Job ?)?Step", re.MULTILINE | re.IGNORECASE)
"""From here on srun ends the tasks itself."""

_NODES = re.compile(r"\bNodes=(\S+) CPU_IDs=(\S+)(?: Mem=\S+)?(?: GRES=(\S*))?")


@dataclass(frozen=True)
class Job:
    """The job that this process runs in. id: Slurm's; ids: of its components, if it is a heterogeneous one.
    restarts: how often it was requeued."""

    id: str
    ids: tuple[str, ...]
    nodes: tuple[Node, ...]
    restarts: int


def current_job() -> Job:
    """ConfigError outside a job's batch script."""
    job, here = os.environ.get("SLURM_JOB_ID"), os.environ.get("SLURMD_NODENAME")
    if job is None or here is None:
        raise ConfigError(
            ["--slurm: this is no batch script of a Slurm job; sbatch slurm/hacpo_multinode.sh"]
        )
    components = int(os.environ.get("SLURM_HET_SIZE", "1"))
    ids = tuple(os.environ.get(f"SLURM_JOB_ID_HET_GROUP_{i}", job) for i in range(components))
    described = [_ask("scontrol", "show", "job", "--details", "--oneliner", one) for one in ids]
    nodes = tuple(node for i, text in enumerate(described) for node in read_nodes(_own(text, ids[i]), i))
    names = [node.name for node in nodes]
    if here != names[0]:
        raise ConfigError([f"--slurm: this is {here}, but the job's first node is {names[0]}; use sbatch"])
    if len(set(names)) < len(names):
        raise ConfigError(["--slurm: two components of the job share a node; add --exclusive to each"])
    return Job(job, ids, nodes, int(os.environ.get("SLURM_RESTART_COUNT", "0")))


def read_nodes(description: str, component: int) -> Iterator[Node]:
    """The nodes in what `scontrol show job --details --oneliner` says, each with its GPUs, or with its CPUs
    if it has none."""
    for names, cpus, gres in _NODES.findall(description):
        gpus = count_gpus(gres)
        for name in _ask("scontrol", "show", "hostnames", names).split():
            yield Node(name, gpus or len(numbers(cpus)), component, has_gpus=gpus > 0)


def place_in(job: Job, config: RunConfig, arguments: Sequence[str]) -> list[Placement]:
    """`place` on a job's nodes. Where the run does not fit, DoesNotFit also says which sbatch would do.

    arguments: of the job's script.
    """
    try:
        return place(config, job.nodes)
    except DoesNotFit as error:
        if len(job.ids) > 1:
            raise
        devices = max(node.devices for node in job.nodes)
        try:
            nodes = nodes_needed(config, devices)
        except DoesNotFit:
            raise error from None
        per_node = [f"--gpus-per-node={devices}"] if job.nodes[0].has_gpus else []
        line = shlex.join(["sbatch", f"--nodes={nodes}", *per_node, str(SCRIPT), *arguments])
        raise DoesNotFit([*error.lines, f"it fits {nodes} such nodes: {line}"]) from None


class SlurmJob:
    """Implements `run.Machines`."""

    blame_seconds = 6.0

    def __init__(self, job: Job) -> None:
        """Raises ValueError for an interface that is not there."""
        self.job = job
        self.nodes = job.nodes
        self.note = {"job": job.id}
        others = job.nodes[1:]
        self.host = own_address(_address(others[0].name)) if others else "127.0.0.1"
        for variable in [name for name in os.environ if TAKEN_FOR_OPTIONS.match(name)]:
            del os.environ[variable]

    def workers(
        self, config: RunConfig, placements: Sequence[Placement], store: str, start: int
    ) -> list[Worker]:
        logs = config.path.absolute() / "logs"
        if "%" in str(logs):
            raise ConfigError([f"run.dir: {logs}: srun gives % a meaning of its own; choose another folder"])
        environment = {**defaults(), "HACPO_STORE": store}
        if any(placement.servers for placement in placements):
            environment["HACPO_SERVER_KEY"] = secrets.token_hex(24)
        agents = [self._agent(placement, config.path, logs, environment, start) for placement in placements]
        servers = [
            self._server(placement, number, config.path, logs, environment)
            for placement in placements
            for number in range(len(placement.servers))
        ]
        return agents + servers

    def failures(self, worker: Worker, code: int | None) -> list[WorkerFailed]:
        """The tasks that srun saw end by themselves; those that it ended then say nothing. Nor does its exit
        code: it is the largest of all tasks', and 0 where a node was lost or a task could not be started."""
        text = worker.log.read_text(encoding="utf-8", errors="replace") if worker.log.is_file() else ""
        if (lost := _NODE_FAILED.search(text)) is not None:
            return [WorkerFailed(worker, code or 0, f"has lost its node {lost[1]}")]
        told = text[: end.start()] if (end := _TERMINATING.search(text)) else text
        parts = worker.parts or (worker,)
        ends = [
            WorkerFailed(parts[task], *how_it_ended(how))
            for tasks, how in _ENDED.findall(told)
            for task in numbers(tasks)
        ]
        if code is None:
            return ends
        if not ends and code == 0 and (error := _ERROR.search(text)) is not None:
            return [WorkerFailed(worker, code, f"was not started: {error[1]}")]
        return ends or read_code(worker, code)

    def probes(self, command: Sequence[str], store: str, logs: Path) -> list[Worker]:
        """`command`, arguments of Python, once on every node."""
        components: dict[int, list[Node]] = {}
        for node in self.nodes:
            components.setdefault(node.component, []).append(node)
        return [
            Worker(
                f"probe{component}",
                logs / f"probe{component}.log",
                f"probe{component}",
                command=[*self._srun("doctor", [Block(n, 0, 1) for n in nodes]), _python(), *command],
                environment={**defaults(), "HACPO_STORE": store},
                end_signal=signal.SIGTERM,
            )
            for component, nodes in components.items()
        ]

    def _agent(
        self, placement: Placement, run_dir: Path, logs: Path, environment: dict[str, str], start: int
    ) -> Worker:
        name = placement.agent
        ranks = [rank_name(name, rank) for rank in range(placement.world_size)]
        srun = self._srun(name, placement.ranks, f"--output={logs}/{name}.rank%t.log")
        return Worker(
            name,
            logs / f"{name}.srun.log",
            name,
            command=[*srun, "bash", "-c", STEP, "step", _python(), *train_command(run_dir, name, start)],
            environment={
                **environment,
                "WORLD_SIZE": str(placement.world_size),
                "FIRST_DEVICE": str(placement.ranks[0].first),
            },
            parts=[Process(rank, logs / f"{rank}.log", name) for rank in ranks],
            end_signal=signal.SIGTERM,
        )

    def _server(
        self, placement: Placement, number: int, run_dir: Path, logs: Path, environment: dict[str, str]
    ) -> Worker:
        block = placement.servers[number]
        name = f"{placement.agent}.server{number}"
        arguments = ["serve", str(run_dir / CONFIG), "--agent", placement.agent, "--server", str(number)]
        srun = self._srun(name, [replace(block, count=1)])
        return Worker(
            name,
            logs / f"{name}.srun.log",
            placement.agent,
            command=[*srun, _python(), "-m", "megatron_hacpo", *arguments],
            environment={**environment, "HACPO_SERVER_GPU": str(block.first)},
            end_signal=signal.SIGTERM,
            attendant=True,
        )

    def _srun(self, name: str, blocks: Sequence[Block], *options: str) -> list[str]:
        """Of a step with `count` processes on the node of each block."""
        each = blocks[0].count
        component = blocks[0].node.component
        shape = [
            f"--nodelist={','.join(block.node.name for block in blocks)}",
            f"--nodes={len(blocks)}",
            f"--ntasks={each * len(blocks)}",
            f"--ntasks-per-node={each}",
        ]
        if len(self.job.ids) > 1:
            shape.append(f"--het-group={component}")
        if blocks[0].node.has_gpus:  # all of the job's: each process takes its own by number
            gpus = min(block.node.devices for block in blocks)
            shape += [f"--gpus-per-node={gpus}", "--gpu-bind=none"]
        more = shlex.split(os.environ.get(SRUN_OPTIONS, ""))
        wrapper = shlex.split(os.environ.get(WRAPPER, ""))
        return ["srun", f"--job-name={name}", *shape, *OPTIONS, *options, *more, *wrapper]


def in_container() -> bool:
    """Whether steps may see other files than this process."""
    return bool(os.environ.get(WRAPPER) or os.environ.get(SRUN_OPTIONS))


def _address(node: str) -> str:
    """Where other nodes reach a node: its name in Slurm need not be one that anybody else knows."""
    found = re.search(r"\bNodeAddr=(\S+)", _ask("scontrol", "show", "node", "--oneliner", node))
    return found[1] if found else node


def requeue(job: Job) -> None:
    """Have the job start again from its batch script. Raises ConfigError where Slurm does not allow it."""
    done = subprocess.run(["scontrol", "requeue", job.id], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            [f"the job cannot be requeued ({done.stderr.strip()}); submit it again with --resume to go on"]
        )


def how_it_ended(text: str) -> tuple[int, str | None]:
    """Exit code, as in subprocess, and reason, of what srun says of a task."""
    if (code := re.fullmatch(r"Exited with exit code (\d+)", text)) is not None:
        return int(code[1]), None
    if text.startswith("Out Of Memory"):
        return -signal.SIGKILL, "was killed: its node had no memory left (Slurm's limit, --mem)"
    named = text.removesuffix(" (core dumped)")
    found = next((s for s in signal.valid_signals() if signal.strsignal(s) == named), None)
    return (-found, None) if found is not None else (1, f"ended: {text}")


def numbers(text: str) -> list[int]:
    """Those of a list such as 0,2-4."""
    ends = [part.partition("-") for part in text.split(",")]
    return [i for first, _, last in ends for i in range(int(first), int(last or first) + 1)]


def _own(description: str, job: str) -> str:
    """Of the lines for all components of a heterogeneous job, that of one."""
    lines = description.splitlines()
    return next((line for line in lines if line.startswith(f"JobId={job} ")), lines[0])


def _python() -> str:
    return os.environ.get(PYTHON, sys.executable)


def _ask(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError([f"{' '.join(command)}: {done.stderr.strip()}; is this node part of the cluster?"])
    return done.stdout

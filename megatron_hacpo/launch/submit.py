"""`hacpo submit`: how many nodes and GPUs a run needs, and the sbatch that asks for them."""

import os
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.launch.placement import Node, Placement, devices_needed, nodes_needed, place
from megatron_hacpo.launch.slurm import count_gpus

SCRIPT = Path("slurm/hacpo_multinode.sh")


@dataclass(frozen=True)
class NodeKind:
    """What a partition's nodes have. gpus: 0 for nodes without."""

    gpus: int
    cpus: int

    @property
    def devices(self) -> int:
        return self.gpus or self.cpus


@dataclass(frozen=True)
class Request:
    """An allocation. gpus: per node; 0: none are asked for."""

    nodes: int
    gpus: int
    placements: Sequence[Placement]

    def command(self, script: Path, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """sbatch, for a script with its arguments; `options` are sbatch's and come last, so that they win."""
        gpus = [f"--gpus-per-node={self.gpus}"] if self.gpus else []
        return ["sbatch", f"--nodes={self.nodes}", *gpus, *options, str(script), *arguments]


def request(config: RunConfig, kind: NodeKind) -> Request:
    """The smallest allocation of such nodes that a run fits. Raises DoesNotFit."""
    nodes = nodes_needed(config, kind.devices)
    devices = kind.devices if nodes > 1 else min(kind.devices, devices_needed(config))
    placements = place(config, [Node(f"node {i + 1}", devices) for i in range(nodes)])
    return Request(nodes, devices if kind.gpus else 0, placements)


def usual_nodes(options: Sequence[str]) -> NodeKind:
    """What most nodes have of the partition that sbatch would take with `options`. Raises ConfigError."""
    named = [option.partition("=")[2] for option in options if option.startswith("--partition=")]
    partition = named[-1] if named else os.environ.get("SBATCH_PARTITION")
    command = ["sinfo", "--noheader", "--format=%P|%D|%G|%c"]
    command += [f"--partition={partition}"] if partition else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(["sinfo: not found; run this where Slurm is, or give --gpus-per-node"]) from None
    lines = [line.split("|") for line in done.stdout.splitlines()]
    lines = [line for line in lines if partition or line[0].endswith("*")] or lines
    if done.returncode != 0 or not lines:
        wrong = done.stderr.strip() or f"no partition {partition or ''}".strip()
        raise ConfigError([f"sinfo: {wrong}; name a partition with --sbatch=--partition=NAME"])
    _, _, gres, cpus = max(lines, key=lambda line: int(line[1]))
    return NodeKind(count_gpus(gres), int(cpus.rstrip("+")))


def submit(command: Sequence[str], script: Path) -> int:
    """Run sbatch with what `env.sh` beside the script sets; its exit code."""
    shell = 'source "$1" && shift && exec "$@"'
    return subprocess.run(["bash", "-c", shell, "bash", str(script.with_name("env.sh")), *command]).returncode


def shown(command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)

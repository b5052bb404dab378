"""`hacpo submit`: how many nodes and GPUs a run needs, and the sbatch that asks for them."""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.launch.placement import Node, Placement, devices_needed, nodes_needed, place

SCRIPT = Path("slurm/hacpo_multinode.sh")

_GPUS = re.compile(r"\bgpu:(?:[^:,()]+:)?(\d+)")


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
    """An allocation. gpus: per node."""

    nodes: int
    gpus: int
    placements: Sequence[Placement]

    def command(self, script: Path, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
        """sbatch, for a script with its arguments; `options` are sbatch's and come last, so that they win."""
        shape = [f"--nodes={self.nodes}", f"--gpus-per-node={self.gpus}"]
        return ["sbatch", *shape, *options, str(script), *arguments]


def request(config: RunConfig, kind: NodeKind) -> Request:
    """The smallest allocation of such nodes that a run fits. Raises DoesNotFit."""
    nodes = nodes_needed(config, kind.devices)
    devices = kind.devices if nodes > 1 else min(kind.devices, devices_needed(config))
    placements = place(config, [Node(f"node {i + 1}", devices) for i in range(nodes)])
    return Request(nodes, devices if kind.gpus else 0, placements)


def usual_nodes(options: Sequence[str], script: Path) -> NodeKind:
    """What most nodes have of the partition that sbatch would take with `options`. Raises ConfigError."""
    named = re.findall(r"(?:^| )(?:--partition|-p)[= ]?(\S+)", " ".join(options))
    shell = (
        'P=${1:-${SBATCH_PARTITION:-}}; exec sinfo --noheader --format="%P|%D|%G|%c" ${P:+--partition="$P"}'
    )
    done = _with_env(["bash", "-c", shell, "bash", *named[-1:]], script)
    lines = [line.split("|") for line in done.stdout.splitlines()]
    lines = [line for line in lines if line[0].endswith("*")] or lines
    if done.returncode != 0 or not lines:
        wrong = done.stderr.strip() or f"no partition {' '.join(named[-1:])}".strip()
        raise ConfigError([f"sinfo: {wrong}; where Slurm is, name a partition: --sbatch=--partition=NAME"])
    _, _, gres, cpus = max(lines, key=lambda line: int(line[1]))
    return NodeKind(count_gpus(gres), int(cpus.rstrip("+")))


def submit(command: Sequence[str], script: Path) -> subprocess.CompletedProcess[str]:
    """Run sbatch."""
    return _with_env(command, script)


def _with_env(command: Sequence[str], script: Path) -> subprocess.CompletedProcess[str]:
    """Run a command with what `env.sh` beside the script sets."""
    shell = 'source "$0" && exec "$@"'
    environment = str(script.with_name("env.sh"))
    return subprocess.run(
        ["bash", "-c", shell, environment, *command], capture_output=True, text=True, check=False
    )


def count_gpus(gres: str) -> int:
    """In a list of generic resources, such as gpu:h100:8(IDX:0-7)."""
    return sum(int(count) for count in _GPUS.findall(gres))


def shown(command: Sequence[str]) -> str:
    """A command as one would type it."""
    return shlex.join(command)

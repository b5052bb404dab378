"""What one node knows about itself. Nothing is judged here, and what is missing is no error."""

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from megatron_hacpo.config import RunConfig

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "apex", "transformers")
"""Of the trainer's environment."""

SERVER_PACKAGES = ("sglang", "torch")
"""Of the environment of rollout servers."""

SHARED_MEMORY = Path("/dev/shm")
_LOOK_SECONDS = 300
"""A first import from a busy file system takes minutes."""

_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
print(json.dumps(found))
"""
_GPUS = """
import json, torch
found = []
for i in range(torch.cuda.device_count()):
    free, total = torch.cuda.mem_get_info(i)
    device = {"name": torch.cuda.get_device_name(i), "capability": torch.cuda.get_device_capability(i)}
    found.append({**device, "total": total, "free": free})
print(json.dumps(found))
"""


class Gpu(msgspec.Struct, frozen=True):
    """name: as CUDA has it. total, free: bytes of its memory. capability: CUDA's compute capability."""

    name: str
    total: int
    free: int
    capability: tuple[int, int]


class NodeReport(msgspec.Struct, frozen=True, kw_only=True):
    """One node. It goes between nodes as JSON (`msgspec.json`).

    host: its name. versions: by package, of those that are there, and of `cuda` and `nccl` as torch was built
    with. servers: by interpreter of `rollout.sglang.python`, the same of its environment; empty where it
    cannot be run. gpus: that the run may use. gpu_problem: why they could not be looked at. host_memory,
    shared_memory, disk: bytes; the latter two free, in /dev/shm and in the file system of `run.dir`; None
    where there is none. paths: what the run reads, by key of the configuration (`config` for the file
    itself). missing: those keys of which the path is not there. models: by agent, a digest of its
    config.json; None without one. seen: by key of a folder, whether the launcher's file in it is seen; those
    that there was one to look for in.
    """

    host: str
    python: str
    versions: dict[str, str]
    servers: dict[str, dict[str, str]] = {}
    gpus: list[Gpu] = []
    gpu_problem: str = ""
    host_memory: int = 0
    shared_memory: int | None = None
    disk: int | None = None
    paths: dict[str, str] = {}
    missing: list[str] = []
    models: dict[str, str | None] = {}
    seen: dict[str, bool] = {}


def look(
    config: RunConfig | None, tokens: Mapping[str, str] | None = None, file: Path | None = None
) -> NodeReport:
    """This node, now.

    tokens: files that the launcher wrote, by key of their folder. file: the configuration's. GPUs and
    servers' environments are looked at by other processes, since memory that CUDA takes for a look would stay
    taken.
    """
    gpus, gpu_problem = _gpus()
    agents = config.agents if config is not None else {}
    paths = dict(_paths(config, file))
    pythons = {a.rollout.sglang.python for a in agents.values() if a.rollout.engine == "sglang"} - {None}
    return NodeReport(
        host=socket.gethostname(),
        python=platform.python_version(),
        versions=_versions(),
        servers={python: _server_versions(python) for python in sorted(filter(None, pythons))},
        gpus=gpus,
        gpu_problem=gpu_problem,
        host_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        shared_memory=_free(SHARED_MEMORY),
        disk=_free(_existing(Path(config.run.dir))) if config is not None else None,
        paths=paths,
        missing=[key for key, path in paths.items() if not os.path.exists(path)],
        models={name: _digest(Path(agent.model) / "config.json") for name, agent in agents.items()},
        seen={key: os.path.isfile(path) for key, path in (tokens or {}).items()},
    )


def shared_folders(config: RunConfig) -> dict[str, Path]:
    """What all nodes must see what is written in, by key: the run's, and those of weights on their way to
    servers."""
    folders = {"run.dir": Path(config.run.dir)}
    for name, agent in config.agents.items():
        sglang = agent.rollout.sglang
        if agent.rollout.engine == "sglang" and sglang.weights_dir and sglang.transport in ("auto", "disk"):
            folders[f"agents.{name}.rollout.sglang.weights_dir"] = Path(sglang.weights_dir)
    return folders


def _paths(config: RunConfig | None, file: Path | None) -> Iterator[tuple[str, str]]:
    """What a run reads, by key."""
    if file is not None:
        yield "config", str(file)
    if config is None:
        return
    for name, agent in config.agents.items():
        yield f"agents.{name}.model", agent.model
        if agent.chat_template is not None:
            yield f"agents.{name}.chat_template", agent.chat_template
        if agent.rollout.engine == "sglang" and agent.rollout.sglang.python is not None:
            yield f"agents.{name}.rollout.sglang.python", agent.rollout.sglang.python
    data = {"data": config.data.path, "evaluation": config.evaluation.path}
    data |= {f"evaluation.benchmarks.{n}": b.path for n, b in config.evaluation.benchmarks.items()}
    for key, path in data.items():
        if path is not None:
            yield f"{key}.path", path
    if config.debug.replay is not None:
        yield "debug.replay", config.debug.replay


def _versions() -> dict[str, str]:
    import torch

    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _server_versions(python: str) -> dict[str, str]:
    answer, _ = _asked([python, "-I", "-c", _VERSIONS, *SERVER_PACKAGES])
    return msgspec.json.decode(answer, type=dict[str, str]) if answer else {}


def _gpus() -> tuple[list[Gpu], str]:
    """(the GPUs, why they cannot be looked at or "")."""
    import torch

    if not torch.cuda.device_count():
        return [], ""
    answer, problem = _asked([sys.executable, "-c", _GPUS])
    return (msgspec.json.decode(answer, type=list[Gpu]) if answer else []), problem


def _asked(command: list[str]) -> tuple[str, str]:
    """(what a program prints last, why it could not or "")."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines, complaint = done.stdout.splitlines(), done.stderr.splitlines()
    if done.returncode != 0 or not lines:
        return "", (complaint or [f"exit status {done.returncode}"])[-1]
    return lines[-1], ""


def _free(path: Path) -> int | None:
    """Free bytes in the file system of `path`; None if it is not there."""
    return shutil.disk_usage(path).free if path.exists() else None


def _existing(path: Path) -> Path:
    """`path` or the nearest folder above that is there."""
    return next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())


def _digest(file: Path) -> str | None:
    """Of a JSON file's content."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

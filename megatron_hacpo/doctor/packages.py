"""Findings about packages: what is supported, what is lost without one, whether all nodes have the same."""

from collections.abc import Iterator, Sequence
from importlib.metadata import requires

from packaging.requirements import Requirement

from megatron_hacpo.config import RunConfig
from megatron_hacpo.doctor.finding import Finding
from megatron_hacpo.doctor.node import NodeReport
from megatron_hacpo.rollout.sglang.versions import unsupported

NEEDED = ("torch", "megatron-core", "transformers")
HOPPER = (9, 0)
"""Compute capability from which TransformerEngine needs no flash-attn for packed sequences."""

SLOW_LAYERS = (
    "models in bfloat16 get unfused layers (attention over a padded grid, experts one by one), and "
    "optimizer.cpu_offload is refused"
)
INSTALL_TE = "pip install 'transformer-engine[core_cu13,pytorch]>=2.11'"


def findings(config: RunConfig | None, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """Of the trainer's environment and of servers' environments on all nodes."""
    for package in NEEDED:
        yield from _needed(package, reports)
    yield from _transformer_engine(config, reports)
    yield from _flash_attn(config, reports)
    yield from _apex(reports)
    for python in sorted({python for report in reports for python in report.servers}):
        yield from _server(config, python, reports)


def _needed(package: str, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    installed = {report.host: _shown(package, report) for report in reports}
    if differing := _differing(package, installed):
        yield differing
        return
    version = reports[0].versions.get(package)
    required = _requirement(package)
    if version is None:
        yield Finding("error", package, f"not installed; pip install '{required}'")
    elif not required.specifier.contains(version, prereleases=True):
        yield Finding("error", package, f"{version} is not supported; pip install '{required}'")
    else:
        yield Finding("ok", package, installed[reports[0].host])


def _shown(package: str, report: NodeReport) -> str:
    """A version; of torch with what it was built with."""
    version = report.versions.get(package, "not installed")
    if package != "torch":
        return version
    cuda = f"CUDA {report.versions['cuda']}" if "cuda" in report.versions else "without CUDA"
    return ", ".join(
        [version, cuda, *([f"NCCL {report.versions['nccl']}"] if "nccl" in report.versions else [])]
    )


def _requirement(package: str) -> Requirement:
    """As pyproject.toml has it."""
    found = (Requirement(text) for text in requires("megatron-hacpo") or [])
    return next(requirement for requirement in found if requirement.name == package)


def _differing(subject: str, values: dict[str, str]) -> Finding | None:
    """An error that names all values, if nodes have different ones."""
    if len(set(values.values())) == 1:
        return None
    listed = "; ".join(f"{value} on {host}" for host, value in values.items())
    return Finding("error", subject, f"differs between nodes ({listed}); install the same on all")


def _optional(package: str, reports: Sequence[NodeReport]) -> Finding | str | None:
    """An error if nodes differ, the version if there is one, None if it is not installed."""
    installed = {report.host: report.versions.get(package, "not installed") for report in reports}
    return _differing(package, installed) or reports[0].versions.get(package)


def _float32(config: RunConfig | None) -> bool:
    """Whether no agent has TransformerEngine's layers."""
    return config is not None and all(agent.dtype == "float32" for agent in config.agents.values())


def _has_gpus(reports: Sequence[NodeReport]) -> bool:
    return any(report.gpus for report in reports)


def _transformer_engine(config: RunConfig | None, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    package = "transformer-engine"
    found = _optional(package, reports)
    agents = list(config.agents.values()) if config is not None else []
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield Finding("ok", package, found)
    elif not _has_gpus(reports):
        yield Finding("ok", package, "not installed; nothing is lost without GPUs")
    elif any(agent.optimizer.cpu_offload for agent in agents):
        text = "not installed, and optimizer.cpu_offload needs it; " + INSTALL_TE
        yield Finding("error", package, text)
    elif _float32(config):
        yield Finding("ok", package, "not installed; nothing is lost in float32")
    else:
        yield Finding("warning", package, f"not installed: {SLOW_LAYERS}; {INSTALL_TE}")


def _flash_attn(config: RunConfig | None, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    package = "flash-attn"
    found = _optional(package, reports)
    old = sorted({g.name for report in reports for g in report.gpus if g.capability < HOPPER})
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield Finding("ok", package, found)
    elif old and "transformer-engine" in reports[0].versions and not _float32(config):
        text = f"not installed, and TransformerEngine needs it for packed sequences on {', '.join(old)}"
        yield Finding("error", package, f"{text}; pip install flash-attn --no-build-isolation")
    elif _has_gpus(reports):
        yield Finding(
            "ok", package, "not installed; nothing is lost from Hopper on or without TransformerEngine"
        )


def _apex(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    package = "apex"
    found = _optional(package, reports)
    if isinstance(found, Finding):
        yield found
    elif found is not None:
        yield Finding("ok", package, found)
    elif _has_gpus(reports) and "transformer-engine" not in reports[0].versions:
        text = (
            "not installed, nor TransformerEngine: Adam and the gradient norm are PyTorch's, which are slower"
        )
        yield Finding("warning", package, f"{text}; {INSTALL_TE}")
    elif _has_gpus(reports):
        yield Finding("ok", package, "not installed; nothing is lost beside TransformerEngine")


def _server(config: RunConfig | None, python: str, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    subject = f"sglang ({python})"
    installed = {r.host: r.servers[python].get("sglang", "not found") for r in reports if python in r.servers}
    if differing := _differing(subject, installed):
        yield differing
        return
    report = next(report for report in reports if python in report.servers)
    versions = report.servers[python]
    if "sglang" not in versions:
        text = "no SGLang can be asked for there; install sglang there or correct rollout.sglang.python"
        yield Finding("error", subject, text)
        return
    if wrong := unsupported(versions["sglang"]):
        yield Finding("error", subject, wrong)
        return
    theirs, ours = versions.get("torch", "none"), report.versions.get("torch", "none")
    text = f"{versions['sglang']}, torch {theirs}"
    agents = config.agents.values() if config is not None else []
    used = {a.rollout.sglang.transport for a in agents if a.rollout.sglang.python == python}
    other = bool(report.gpus) and theirs.split("+")[0] != ours.split("+")[0]
    if other and "auto" in used:
        text += f"; weights go through files, as the trainer has {ours} (transport auto)"
    if other and (risky := used - {"disk", "auto"}):
        text += (
            f", and the trainer has {ours}: transport {' and '.join(sorted(risky))} may not work between them"
        )
        text += "; try it with benchmarks/gpu_sglang.py or set rollout.sglang.transport: disk"
        yield Finding("warning", subject, text)
    else:
        yield Finding("ok", subject, text)

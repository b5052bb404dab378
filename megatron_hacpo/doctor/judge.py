"""From what the nodes report to findings."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence

from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.doctor import balance, memory, packages
from megatron_hacpo.doctor.balance import Machine, device_of
from megatron_hacpo.doctor.finding import Finding
from megatron_hacpo.doctor.memory import MemoryEstimate, gb
from megatron_hacpo.doctor.node import Gpu, NodeReport, shared_folders
from megatron_hacpo.doctor.shape import ITEM_BYTES, Shape, read_shapes
from megatron_hacpo.launch.placement import Block, Node, Placement, place

ON_CPUS = "HACPO_CPU"
"""Environment variable: 1 lets a job compute without the GPUs that it has."""

SHARED_MEMORY = 10**9
"""Bytes of /dev/shm that NCCL and data loaders should have."""

FREE = 0.9
"""Of a GPU's memory, before a run."""


def judge(
    config: RunConfig | None,
    reports: Sequence[NodeReport],
    *,
    nodes: Sequence[Node] | None = None,
    met: Mapping[str, Mapping[str, str]] | None = None,
) -> list[Finding]:
    """What there is to say about nodes, packages and, if there is one, the run.

    nodes: as `place` takes them, each named as the report's host; None: what the reports say. met: by node,
    what `reach.meet` told there. Reads the models' config.json.
    """
    found = [*packages.findings(config, reports), *_gpus(reports), *_shared_memory(reports)]
    found += _given(nodes or [], reports)
    if met is not None:
        found += _network(met)
    if config is None:
        return found
    found += [*_paths(reports), *_models(config, reports), *_seen(config, reports)]
    shapes: dict[str, Shape] = {}
    for name, shape in read_shapes(config).items():
        if isinstance(shape, Shape):
            shapes[name] = shape
        elif (key := f"agents.{name}.model") not in reports[0].missing:
            found.append(Finding("error", key, f"{config.agents[name].model}: {shape}"))
    found += _disk(config, reports, shapes)
    nodes = nodes if nodes is not None else nodes_of(reports)
    try:
        placements = place(config, nodes)
    except ConfigError as error:
        lines = (line.partition(": ") for line in error.lines)
        return [*found, *(Finding("error", key, wrong) for key, _, wrong in lines)]
    return [*found, *_fit(config, reports, nodes, placements, shapes)]


def nodes_of(reports: Sequence[NodeReport]) -> list[Node]:
    """For `place`: a node without GPUs has room for any number of processes."""
    gpus = any(report.gpus for report in reports)
    return [Node(report.host, len(report.gpus) if gpus else sys.maxsize) for report in reports]


def _gpus(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    for report in reports:
        if report.gpu_problem:
            text = (
                f"{report.host}: cannot be looked at ({report.gpu_problem}); check the driver with nvidia-smi"
            )
            yield Finding("error", "GPUs", text)
    seen = {report.host: _kinds(report.gpus) for report in reports}
    if not any(report.gpus for report in reports):
        if not any(report.gpu_problem for report in reports):
            yield Finding("ok", "GPUs", "none: models compute on CPUs, which is enough for tests")
        return
    for report in reports:
        if not report.gpus and not report.gpu_problem:
            text = f"{report.host}: none, and other nodes have some; ask for nodes that all have them"
            yield Finding("error", "GPUs", text)
    if len(reports) > 1 and len(set(seen.values())) == 1:
        yield Finding("ok", "GPUs", f"{seen[reports[0].host]} on each of {len(reports)} nodes")
    else:
        for host, kinds in seen.items():
            if kinds:
                yield Finding("ok", "GPUs", f"{host}: {kinds}")
    for report in reports:
        for number, gpu in enumerate(report.gpus):
            if gpu.free < FREE * gpu.total:
                text = f"{report.host}: GPU {number} has {gb(gpu.free)} of {gb(gpu.total)} free"
                yield Finding("warning", "GPUs", f"{text}; end what takes the rest (nvidia-smi shows it)")


def _given(nodes: Sequence[Node], reports: Sequence[NodeReport]) -> Iterator[Finding]:
    """GPUs that Slurm has given and torch does not see."""
    devices = {node.name: node.devices for node in nodes if node.has_gpus}
    for report in reports:
        given, seen = devices.get(report.host, 0), len(report.gpus)
        if seen >= given or os.environ.get(ON_CPUS) == "1":
            continue
        text = f"{report.host}: {given} are given, torch {report.versions.get('torch', '')} sees {seen}"
        fix = "let HACPO_PYTHON have a torch with CUDA, and a container its GPUs"
        yield Finding("error", "GPUs", f"{text}; {fix} ({ON_CPUS}=1 computes without)")


def _kinds(gpus: Sequence[Gpu]) -> str:
    """`8 x NVIDIA H100 80GB HBM3, 85.0 GB`."""
    counts: dict[tuple[str, int], int] = {}
    for gpu in gpus:
        kind = gpu.name, gpu.total
        counts[kind] = counts.get(kind, 0) + 1
    return " and ".join(f"{count} x {name}, {gb(total)}" for (name, total), count in counts.items())


def _shared_memory(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    least = min(reports, key=lambda report: report.shared_memory or 0)
    free = least.shared_memory or 0
    where = f"{least.host}: {gb(free)} free in /dev/shm"
    if free < SHARED_MEMORY:
        fix = f"give at least {gb(SHARED_MEMORY)} (docker: --ipc=host or --shm-size=1g)"
        yield Finding("warning", "shared memory", f"{where}, which is little for NCCL; {fix}")
    else:
        yield Finding("ok", "shared memory", where)


def _network(met: Mapping[str, Mapping[str, str]]) -> Iterator[Finding]:
    failures = [(a, b, why) for a, others in met.items() for b, why in others.items() if why]
    for node, other, why in failures:
        fix = "open the nodes' ports to each other, or name the interface between them (HACPO_INTERFACE)"
        yield Finding("error", "network", f"{node} does not reach {other}: {why}; {fix}")
    if not failures:
        yield Finding("ok", "network", f"each of {len(met)} nodes reaches all others")


def _paths(reports: Sequence[NodeReport]) -> Iterator[Finding]:
    paths = reports[0].paths
    for key, path in paths.items():
        without = [report.host for report in reports if key in report.missing]
        if without and len(without) == len(reports):
            where = f"on {without[0]}" if len(reports) == 1 else "on any node"
            yield Finding("error", key, f"{path}: not there {where}; correct the path or put it there")
        elif without:
            text = f"{path}: not there on {', '.join(without)}"
            yield Finding("error", key, f"{text}; use a file system that all nodes share, or copy it there")
    if not any(report.missing for report in reports):
        yield Finding("ok", "paths", f"{len(paths)} there on {_hosts(reports)}, none missing")


def _hosts(reports: Sequence[NodeReport]) -> str:
    return reports[0].host if len(reports) == 1 else f"all {len(reports)} nodes"


def _models(config: RunConfig, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    for name, agent in config.agents.items():
        digests = {report.host: report.models[name] for report in reports if report.models.get(name)}
        if len(set(digests.values())) > 1:
            listed = ", ".join(f"{digest} on {host}" for host, digest in digests.items())
            text = f"{agent.model}: config.json differs between nodes (SHA-256 {listed})"
            yield Finding("error", f"agents.{name}.model", f"{text}; copy the same folder to all")


def _seen(config: RunConfig, reports: Sequence[NodeReport]) -> Iterator[Finding]:
    folders = shared_folders(config)
    for key in reports[0].seen:
        blind = [report.host for report in reports if not report.seen[key]]
        if blind:
            text = f"{folders[key]}: {', '.join(blind)} does not see what is written there"
            yield Finding("error", key, f"{text}; set {key} to a folder that all nodes share")
        else:
            text = f"{folders[key]}: all {len(reports)} nodes see what is written there"
            yield Finding("ok", key, text)


def _disk(config: RunConfig, reports: Sequence[NodeReport], shapes: Mapping[str, Shape]) -> Iterator[Finding]:
    """Kept checkpoints, and the one that is being written; exported weights at the end."""
    free = min(report.disk for report in reports if report.disk is not None)
    exported = sum(s.parameters * ITEM_BYTES[config.agents[n].dtype] for n, s in shapes.items())
    one = sum(shape.parameters * _saved_bytes(config, name) for name, shape in shapes.items())
    kept = config.checkpoint.keep_last + 1 if config.checkpoint.every else 0
    need = kept * one + exported
    text = f"{gb(free)} free in {config.run.dir}"
    if kept:
        text += f"; {kept} checkpoints of {gb(one)} each and the exported weights take {gb(need)}"
    fix = "free some, set run.dir elsewhere, or lower checkpoint.keep_last"
    if free < min(kept, 2) * one + exported:
        yield Finding("error", "disk", f"{text}; {fix}")
    elif free < need:
        yield Finding("warning", "disk", f"{text}; {fix}")
    else:
        yield Finding("ok", "disk", text)


def _saved_bytes(config: RunConfig, agent: str) -> int:
    """Of a parameter in a checkpoint: the weight, in bfloat16 also in float32, and Adam's two moments."""
    return {"float32": 4 + 8, "bfloat16": 2 + 4 + 8}[config.agents[agent].dtype]


def _fit(
    config: RunConfig,
    reports: Sequence[NodeReport],
    nodes: Sequence[Node],
    placements: Sequence[Placement],
    shapes: Mapping[str, Shape],
) -> Iterator[Finding]:
    """Whether the run fits the devices that its agents get, and divides them well."""
    by_host = {report.host: report for report in reports}
    has_gpus = any(report.gpus for report in reports)
    yield Finding("ok", "placement", "; ".join(map(_shown, placements)))
    machines = {}
    for placement in placements:
        blocks = {*placement.ranks, *placement.servers}
        gpus = [gpu for block in blocks for gpu in _of(by_host[block.node.name], block)]
        if len({gpu.name for gpu in gpus}) > 1:
            text = f"different GPUs ({_kinds(gpus)}); all wait for the slowest, so give it one kind"
            yield Finding("warning", f"agents.{placement.agent}", text)
        devices = sorted((device_of(gpu.name) for gpu in gpus), key=lambda device: device.flops["bfloat16"])
        memory_ = min((gpu.total for gpu in gpus), default=None)
        machines[placement.agent] = Machine(devices[0], memory_) if devices else Machine()
    estimates = {n: memory.estimate(config, n, s, machines[n].memory) for n, s in shapes.items()}
    for name, estimate in estimates.items():
        yield from memory.findings(config, name, estimate)
    if has_gpus:
        yield from _host_memory(by_host, placements, estimates)
    if len(shapes) == len(config.agents):
        yield from balance.findings(config, shapes, machines, nodes if has_gpus else None)
    if estimates:
        yield Finding("ok", "assumed for memory", memory.ASSUMPTIONS)
        yield Finding("ok", "assumed for steps", balance.ASSUMPTIONS)


def _shown(placement: Placement) -> str:
    text = f"{placement.agent} on {', '.join(map(str, placement.ranks))}"
    if not placement.servers:
        return text
    hosts = dict.fromkeys(block.node.name for block in placement.servers)
    number = len(placement.servers)
    return f"{text} with {number} server{'s' if number > 1 else ''} on {', '.join(hosts)}"


def _of(report: NodeReport, block: Block) -> Sequence[Gpu]:
    return report.gpus[block.first : block.first + block.count]


def _host_memory(
    reports: Mapping[str, NodeReport],
    placements: Sequence[Placement],
    estimates: Mapping[str, MemoryEstimate],
) -> Iterator[Finding]:
    needs = dict.fromkeys(reports, 0)
    for placement in placements:
        if placement.agent in estimates:
            for block in placement.ranks:
                needs[block.node.name] += block.count * estimates[placement.agent].training.host
    texts = {
        host: f"{host}: {gb(reports[host].host_memory)}; what trainers keep there takes up to {gb(need)}"
        for host, need in needs.items()
    }
    small = [host for host, need in needs.items() if need > reports[host].host_memory]
    for host in small:
        fix = "set algorithm.kl_coef: 0 or checkpoint.asynchronous: false, offload less, or use more nodes"
        yield Finding("warning", "host memory", f"{texts[host]}; {fix}")
    if not small:
        fullest = max(needs, key=lambda host: needs[host] / reports[host].host_memory)
        yield Finding("ok", "host memory", texts[fullest])

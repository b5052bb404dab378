"""The whole examination, of this machine or of a job's nodes."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from megatron_hacpo.config import ConfigError, RunConfig, check
from megatron_hacpo.doctor.finding import Finding, has_error, show
from megatron_hacpo.doctor.judge import judge
from megatron_hacpo.doctor.node import NodeReport, look
from megatron_hacpo.launch.placement import Node


def examine(config: RunConfig | None, console: Console, *, file: Path | None = None) -> bool:
    """Print what there is to say about this machine and, if there is one, the run, whose configuration may
    be unchecked. True without an error.

    file: the configuration's.
    """
    checked = list(_checked(config)) if config is not None else []
    told = {finding.subject for finding in checked}
    found = [finding for finding in judge(config, [look(config, file=file)]) if finding.subject not in told]
    return _tell([*checked, *found], console)


def examine_job(
    config: RunConfig,
    reports: Sequence[NodeReport],
    console: Console,
    *,
    nodes: Sequence[Node] | None = None,
    met: Mapping[str, Mapping[str, str]] | None = None,
) -> bool:
    """The same of a job's nodes, with a configuration that `check` has accepted.

    nodes: as `place` takes them, each named as its report's host; None: what the reports say. met: by node,
    what `reach.meet` told there.
    """
    return _tell(judge(config, reports, nodes=nodes, met=met), console)


def _checked(config: RunConfig) -> Iterator[Finding]:
    try:
        lines = [("warning", line) for line in check(config)]
    except ConfigError as error:
        lines = [("error", line) for line in error.lines]
    for level, line in lines:
        key, _, wrong = line.partition(": ")
        yield Finding("error" if level == "error" else "warning", key, wrong)


def _tell(findings: Sequence[Finding], console: Console) -> bool:
    show(findings, console)
    return not has_error(findings)

"""`hacpo eval`: agents and checkpoints side by side on the same problems."""

import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.config.errors import line
from megatron_hacpo.evaluation.benchmark import Benchmark, Measurement, open_benchmarks
from megatron_hacpo.evaluation.estimators import half_width
from megatron_hacpo.evaluation.measure import measure, write_problems
from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.inputs import Prompts, Verifiers, load_tokenizers
from megatron_hacpo.megatron.runtime import alone
from megatron_hacpo.report.files import plain
from megatron_hacpo.rollout.base import BrokenWeights, Generate
from megatron_hacpo.rollout.local import LocalEngine

METRICS = "metrics.json"


def main(config: RunConfig, names: Sequence[str], benchmarks: Sequence[str] | None, out: Path | None) -> None:
    """Measure agents and print a table.

    names: of the agents that are measured, a column each; the others' prompt lengths count all the same.
    benchmarks: the names of some; None: all. out: gets metrics.json and the files of single problems, in a
    folder for each agent; None writes nothing.
    """
    disable_progress_bar()
    if out is not None:
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError([f"--out: {out}: cannot be made ({error.strerror}); choose another"]) from None
    tokenizers = load_tokenizers(config)
    prompts = Prompts(config, tokenizers)
    chosen = _chosen(open_benchmarks(config, prompts), benchmarks)
    for remark in prompts.remarks:
        print(remark, file=sys.stderr)
    verifiers = Verifiers(config)
    columns = []
    for name in names:
        columns.append(_measured(config, name, chosen, tokenizers[name], verifiers))
        if out is not None:
            _write(columns[-1], out / name, texts=config.evaluation.keep_responses)
    verifiers.close()
    Console().print(table(names, columns))
    for name in names:
        print(f"{name}: {config.agents[name].model}")


def _measured(
    config: RunConfig,
    name: str,
    benchmarks: Sequence[Benchmark],
    tokenizer: AgentTokenizer,
    verifiers: Verifiers,
) -> list[Measurement]:
    """One agent on all benchmarks."""
    column = []
    with _engine(config, name, tokenizer) as generate:
        for benchmark in benchmarks:
            try:
                measured = measure(
                    generate,
                    benchmark,
                    rollout=config.agents[name].rollout,
                    tokenizer=tokenizer,
                    verifiers=verifiers,
                )
            except BrokenWeights as error:
                prompt = benchmark.prompts[error.index // benchmark.settings.samples].id
                wrong = f"{benchmark.name}, prompt {prompt}: {error}; give a folder with finite weights"
                raise ConfigError(
                    [line(("agents", name, "model"), config.agents[name].model, wrong)]
                ) from error
            assert measured is not None
            if complaint := measured.scored.complaint():
                print(f"warning: {name}, {benchmark.name}: {complaint}", file=sys.stderr)
            column.append(measured)
    return column


def table(names: Sequence[str], columns: Sequence[Sequence[Measurement]]) -> Table:
    """A row for each metric, with half of its 95 % interval; from the second column on also the difference to
    the first one, with that of the difference over the same problems."""
    result = Table(title="mean, half of its 95 % interval (difference to the first)", title_justify="left")
    result.add_column("benchmark", style="bold", overflow="fold")
    result.add_column("problems", justify="right")
    for name in names:
        result.add_column(name, justify="right", overflow="fold")
    for row in zip(*columns, strict=True):
        metrics = [measured.metrics() for measured in row]
        values = [measured.per_problem() for measured in row]
        for metric, first in values[0].items():
            cells = [_cell(first.mean(), half_width(first))]
            for other in (found[metric] for found in values[1:]):
                difference = other - first
                change = _cell(difference.mean(), half_width(difference), sign="+")
                cells.append(f"{_cell(other.mean(), half_width(other))} ({change})")
            result.add_row(metric, str(len(first)), *cells)
        shown = {
            *values[0],
            *(f"{metric}/ci95" for metric in values[0]),
            f"{row[0].benchmark.name}/tokens_max",
        }
        for metric in metrics[0]:
            if metric not in shown:
                result.add_row(f"[dim]{escape(metric)}", "", *(f"[dim]{_plain(m[metric])}" for m in metrics))
        result.add_section()
    return result


def _cell(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.3f} \u00b1{half:.3f}" if math.isfinite(half) else f"{mean:{sign}.3f}"


def _plain(value: float) -> str:
    return f"{value:.1f}" if value > 1.0 else f"{value:.3f}"


def _chosen(benchmarks: Sequence[Benchmark], names: Sequence[str] | None) -> list[Benchmark]:
    known = [benchmark.name for benchmark in benchmarks]
    if not known:
        raise ConfigError(
            ["evaluation: there is nothing to measure; set evaluation.benchmarks, .path or .prompts"]
        )
    for name in names or []:
        if name not in known:
            raise ConfigError([f"--benchmarks: {name}: not one of {', '.join(known)}"])
    return [benchmark for benchmark in benchmarks if names is None or benchmark.name in names]


def _write(column: Sequence[Measurement], folder: Path, *, texts: bool) -> None:
    metrics: dict[str, float] = {}
    for measured in column:
        write_problems(measured, folder, texts=texts)
        metrics |= measured.metrics()
    (folder / METRICS).write_text(json.dumps(plain(metrics), indent=2) + "\n", encoding="utf-8")


@contextmanager
def _engine(config: RunConfig, name: str, tokenizer: AgentTokenizer) -> Iterator[Generate]:
    """What generates with the weights of an agent's folder, by its `rollout.engine`."""
    settings = config.agents[name]
    folder = Path(settings.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if settings.rollout.engine == "sglang":
        from megatron_hacpo.rollout.sglang.setup import open_engine

        if settings.rollout.sglang.addresses:
            wrong = "their weights may be anybody's; leave it out, and name rollout.sglang.python"
            raise ConfigError([line(("agents", name, "rollout", "sglang", "addresses"), "...", wrong)])
        if is_checkpoint(folder):
            wrong = "SGLang reads no Megatron checkpoints; use `hacpo convert to-hf` first"
            raise ConfigError([line(("agents", name, "model"), settings.model, wrong)])
        with tempfile.TemporaryDirectory() as logs, alone(torch.device("cpu")) as world:
            rollout = open_engine(
                name,
                settings,
                ranks=world,
                device=device,
                stop_ids=tokenizer.stop_ids,
                context=config.longest(name),
                run_dir=Path(logs),
                warn=lambda text: print(f"warning: {name}: {text}", file=sys.stderr),
            )
            try:
                yield rollout.generate
            finally:
                rollout.close()
        return
    dtype = getattr(torch, settings.dtype)
    engine = LocalEngine(folder, dtype=dtype, device=device, stop_ids=tokenizer.stop_ids)
    if is_checkpoint(folder):
        from megatron_hacpo.megatron.convert import checkpoint_tensors

        with alone(torch.device("cpu")):
            tensors, _ = checkpoint_tensors(folder, folder)
            engine.update_weights(tensors, 0)
    yield engine.generate
    engine.close()

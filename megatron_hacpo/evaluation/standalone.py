"""`hacpo eval`: agents and checkpoints side by side on the same problems."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.evaluation.benchmark import Benchmark, Measurement, open_benchmarks
from megatron_hacpo.evaluation.estimators import half_width
from megatron_hacpo.evaluation.measure import Generate, measure, write_problems
from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.inputs import Prompts, load_tokenizers, open_pool
from megatron_hacpo.megatron.runtime import alone
from megatron_hacpo.report.files import plain
from megatron_hacpo.rollout.local import LocalEngine

METRICS = "metrics.json"


def main(
    config: RunConfig,
    candidates: Sequence[tuple[str, str]],
    benchmarks: Sequence[str] | None,
    out: Path | None,
) -> None:
    """Measure the candidates and print a table.

    candidates: (agent, model folder), one column each. benchmarks: the names of some; None: all. out: gets
    metrics.json and the files of single problems, a folder for each candidate; None writes nothing.
    """
    disable_progress_bar()
    tokenizers = load_tokenizers(config)
    prompts = Prompts(config, tokenizers)
    chosen = _chosen(open_benchmarks(config, prompts), benchmarks)
    for remark in prompts.remarks:
        print(remark, file=sys.stderr)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    columns: list[list[Measurement]] = []
    with open_pool(config) as verifier:
        for agent, model in candidates:
            tokenizer = tokenizers[agent]
            with _engine(config, agent, model, tokenizer, device, out) as generate:
                columns.append([])
                for benchmark in chosen:
                    measured = measure(
                        generate,
                        benchmark,
                        config=config,
                        agent=agent,
                        tokenizer=tokenizer,
                        verifier=verifier,
                    )
                    assert measured is not None
                    columns[-1].append(measured)
    names = _column_names(candidates)
    if out is not None:
        for name, column in zip(names, columns, strict=True):
            _write(column, out / name, texts=config.evaluation.keep_responses)
    Console().print(table(names, columns))
    for name, (_, model) in zip(names, candidates, strict=True):
        print(f"{name}: {model}")


def table(names: Sequence[str], columns: Sequence[Sequence[Measurement]]) -> Table:
    """A row for each metric, with half of its 95 % interval; from the second column on also the difference to
    the first one, with that of the difference over the same problems."""
    result = Table(title="mean, half of its 95 % interval (difference to the first)", title_justify="left")
    result.add_column("benchmark", style="bold")
    result.add_column("problems", justify="right")
    for name in names:
        result.add_column(name, justify="right", overflow="fold")
    for row in zip(*columns, strict=True):
        first = row[0].per_problem()
        for metric, values in first.items():
            cells = [_cell(values.mean(), half_width(values))]
            for other in row[1:]:
                theirs = other.per_problem()[metric]
                difference = theirs - values
                cells.append(
                    f"{_cell(theirs.mean(), half_width(theirs))} "
                    f"({_cell(difference.mean(), half_width(difference), sign='+')})"
                )
            result.add_row(metric, str(len(values)), *cells)
        for what in ("group", "tokens", "truncated", "no_answer", "invalid"):
            for metric in (m for m in row[0].metrics() if m.startswith(f"{row[0].benchmark.name}/{what}")):
                if metric.endswith("tokens_max"):
                    continue
                result.add_row(f"[dim]{metric}", "", *(f"[dim]{_plain(m.metrics()[metric])}" for m in row))
        result.add_section()
    return result


def _cell(mean: float, half: float, sign: str = "") -> str:
    return f"{mean:{sign}.3f} \u00b1{half:.3f}"


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


def _column_names(candidates: Sequence[tuple[str, str]]) -> list[str]:
    """The agents' names, with a number where one has several models."""
    agents = [agent for agent, _ in candidates]
    return [
        agent if agents.count(agent) == 1 else f"{agent}-{agents[: i + 1].count(agent)}"
        for i, agent in enumerate(agents)
    ]


def _write(column: Sequence[Measurement], folder: Path, *, texts: bool) -> None:
    metrics: dict[str, float] = {}
    for measured in column:
        write_problems(measured, folder, texts=texts)
        metrics |= measured.metrics()
    (folder / METRICS).write_text(json.dumps(plain(metrics), indent=2) + "\n", encoding="utf-8")


@contextmanager
def _engine(
    config: RunConfig,
    agent: str,
    model: str,
    tokenizer: AgentTokenizer,
    device: torch.device,
    out: Path | None,
) -> Iterator[Generate]:
    """What generates with the weights of a folder, by the agent's `rollout.engine`."""
    settings = config.agents[agent].model_copy(update={"model": model})
    if settings.rollout.engine == "sglang":
        if is_checkpoint(Path(model)):
            raise ConfigError(
                [f"--model: {model}: SGLang reads no Megatron checkpoints; use hacpo convert to-hf first"]
            )
        from megatron_hacpo.rollout.sglang.setup import open_engine

        with alone(torch.device("cpu")) as world:
            rollout = open_engine(
                agent,
                settings,
                ranks=world,
                device=device,
                stop_ids=tokenizer.stop_ids,
                context=config.longest(agent),
                run_dir=out or config.path,
                warn=lambda text: print(f"warning: {text}", file=sys.stderr),
            )
            try:
                yield rollout.generate
            finally:
                rollout.close()
        return
    engine = LocalEngine(
        model, dtype=getattr(torch, settings.dtype), device=device, stop_ids=tokenizer.stop_ids
    )
    if is_checkpoint(Path(model)):
        from megatron_hacpo.megatron.convert import checkpoint_tensors

        with alone(torch.device("cpu")):
            tensors, _ = checkpoint_tensors(Path(model), Path(model))
            engine.update_weights(tensors, 0)
    yield engine.generate
    engine.close()

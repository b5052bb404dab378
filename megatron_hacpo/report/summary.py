"""What became of a run: accuracy at the start and at the end of every agent."""

import json
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from megatron_hacpo.config import load
from megatron_hacpo.report.files import EVALUATION, METRICS, headlines, read_rows

SUMMARY = "summary.json"


def summarise(run_dir: Path, wall_seconds: float | None = None) -> dict[str, Any]:
    """The summary of the run in `run_dir`, complete or not; null for what was not measured.

    steps: of the agent that came least far. seconds: of all steps of the slowest agent, without start-up and
    evaluations. wall_seconds: of the last attempt, from the argument or else from an earlier summary.
    agents: per agent its model, accuracies at `start` and `end` of held-out prompts and benchmarks (and the
    step of `end`), first and last reward.
    """
    config = load(run_dir / "config.yaml")
    rows = {name: read_rows(run_dir / name / METRICS) for name in config.agents}
    return {
        "run": config.run.name,
        "method": config.algorithm.name,
        "seed": config.run.seed,
        "steps": min(steps[-1]["step"] if steps else 0 for steps in rows.values()),
        "seconds": max(sum(row.get("time/step") or 0.0 for row in steps) for steps in rows.values()),
        "wall_seconds": _earlier_wall_seconds(run_dir) if wall_seconds is None else wall_seconds,
        "agents": {
            name: {"model": agent.model, **_agent(rows[name], read_rows(run_dir / name / EVALUATION))}
            for name, agent in config.agents.items()
        },
    }


def write_summary(run_dir: Path, wall_seconds: float | None = None) -> dict[str, Any]:
    """`summarise`, also into RUN_DIR/summary.json."""
    summary = summarise(run_dir, wall_seconds)
    (run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return summary


def table(summary: dict[str, Any]) -> Table:
    """Start -> end, one line an agent."""
    title = f"{summary['run']}: {summary['method']}, {summary['steps']} steps, start -> end"
    agents = summary["agents"]
    measured = headlines(agent[when] for agent in agents.values() for when in ("start", "end"))
    result = Table(title=title, title_justify="left", caption="accuracy", caption_justify="left")
    result.add_column("agent", style="bold")
    result.add_column("model")
    for name in (*measured, "training reward"):
        result.add_column(name, justify="right")
    for name, agent in agents.items():
        changes = [_change(agent["start"].get(key), agent["end"].get(key)) for key in measured]
        result.add_row(
            name, escape(agent["model"]), *changes, _change(agent["reward"]["first"], agent["reward"]["last"])
        )
    return result


def _agent(steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> dict[str, Any]:
    start: dict[str, Any] = next((row for row in evaluations if row["step"] == 0), {})
    end: dict[str, Any] = next((row for row in reversed(evaluations) if row["step"] > 0), {})
    rewards = [row.get("reward/mean") for row in steps] or [None]
    measured = headlines(evaluations)
    return {
        "start": {key: start.get(key) for key in measured},
        "end": {"step": end.get("step"), **{key: end.get(key) for key in measured}},
        "reward": {"first": rewards[0], "last": rewards[-1]},
    }


def _earlier_wall_seconds(run_dir: Path) -> float | None:
    path = run_dir / SUMMARY
    return json.loads(path.read_text(encoding="utf-8")).get("wall_seconds") if path.is_file() else None


def _change(start: float | None, end: float | None) -> str:
    return f"{_number(start)} -> {_number(end)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

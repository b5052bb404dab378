"""The picture of a run: reward while training and accuracy, one colour an agent."""

from itertools import cycle
from pathlib import Path
from typing import Any

from megatron_hacpo.config import load
from megatron_hacpo.report.files import EVALUATION, METRICS, headlines, read_rows

CURVES = "curves.png"


def draw_curves(run_dir: Path) -> Path:
    """Draw RUN_DIR/curves.png from the agents' rows so far; returns its path."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    config = load(run_dir / "config.yaml")
    evaluations = {name: read_rows(run_dir / name / EVALUATION) for name in config.agents}
    panels = 2 if any(evaluations.values()) else 1
    with plt.rc_context(_STYLE):
        figure, axes = plt.subplots(1, panels, figsize=(6 * panels, 4), squeeze=False, layout="constrained")
        for index, name in enumerate(config.agents):
            colour = f"C{index}"
            _draw_reward(axes[0, 0], read_rows(run_dir / name / METRICS), name, colour)
            if panels == 2:
                _draw_accuracy(axes[0, 1], evaluations[name], name, colour)
        for axis, title in zip(axes[0], ("Training reward", "Accuracy"), strict=False):
            axis.set(title=title, xlabel="step", xlim=(0, config.run.steps))
            axis.legend(loc="best")
        axes[0, 0].set(ylabel="mean reward of own responses", ylim=config.reward.range)
        if panels == 2:
            lowest, highest = config.reward.range
            axes[0, 1].set(ylabel="mean reward of the problems", ylim=(min(0, lowest), max(1, highest)))
        figure.suptitle(f"{config.run.name}: {config.algorithm.name}, seed {config.run.seed}")
        figure.savefig(run_dir / CURVES, dpi=150)
        plt.close(figure)
    return run_dir / CURVES


def smooth(values: list[float], window: int) -> list[float]:
    """Mean of each value and up to `window` - 1 before it."""
    parts = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]


_LINES = (("-", "o"), (":", "."), ("--", "s"), ("-.", "^"))
_STYLE = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "0.9",
    "axes.axisbelow": True,
    "axes.prop_cycle": "cycler('color', ['#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9'])",
    "legend.frameon": False,
    "font.size": 10,
}
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""


def _draw_reward(axis: Any, rows: list[dict[str, Any]], name: str, colour: str) -> None:
    points = [(row["step"], row["reward/mean"]) for row in rows if row.get("reward/mean") is not None]
    steps, rewards = [step for step, _ in points], [reward for _, reward in points]
    axis.plot(steps, rewards, color=colour, alpha=0.25, linewidth=1)
    axis.plot(steps, smooth(rewards, max(1, len(rewards) // 20)), color=colour, linewidth=2, label=name)


def _draw_accuracy(axis: Any, rows: list[dict[str, Any]], name: str, colour: str) -> None:
    for key, (line, marker) in zip(headlines(rows), cycle(_LINES), strict=False):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        steps, values = [step for step, _ in points], [value for _, value in points]
        axis.plot(
            steps, values, color=colour, linestyle=line, marker=marker, label=f"{name}, {key}", clip_on=False
        )

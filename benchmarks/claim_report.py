"""The table and the figure of claim.py: means over seeds, and paired differences with their uncertainty."""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Rows = Sequence[dict[str, Any]]

T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
"""97.5 % quantile of Student's t for 1, 2, ... degrees of freedom."""


def mean_sd(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; the latter is NaN for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan


def paired_interval(first: dict[int, float], second: dict[int, float]) -> tuple[float, float, int]:
    """Mean of first - second over common seeds, half the 95 % interval of it (Student), number of pairs.

    Half the interval is NaN for one pair. Raises KeyError for more than 15 pairs: then use a normal quantile.
    """
    differences = [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]
    mean, sd = mean_sd(differences)
    pairs = len(differences)
    half = T_975[pairs - 2] * sd / math.sqrt(pairs) if pairs > 1 else math.nan
    return mean, half, pairs


def by_method(results: Rows, step: int, key: str) -> dict[str, dict[str, dict[int, float]]]:
    """agent -> method -> seed -> accuracy at `step`, methods in the order of `results`."""
    found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in results:
        if row["step"] == step:
            found[row["agent"]][row["method"]][row["seed"]] = row[key]
    return found


def table(results: Rows, costs: Rows, reference: str = "hacpo") -> str:
    """Markdown: accuracies, paired differences to `reference` at the last step, and costs."""
    last = max(row["step"] for row in results)
    steps = sorted({row["step"] for row in results})
    shown = sorted({min(steps, key=lambda s: abs(s - last * i / 4)) for i in range(5)})
    lines = [f"Accuracy on held-out prompts at step {last}: mean +- standard deviation over seeds", ""]
    sampled, greedy = by_method(results, last, "sampled"), by_method(results, last, "greedy")
    lines += ["| agent | method | seeds | sampled | greedy |", "| --- | --- | --- | --- | --- |"]
    for agent, methods in sampled.items():
        for method, values in methods.items():
            numbers = [plus_minus(*mean_sd(list(v.values()))) for v in (values, greedy[agent][method])]
            lines.append(f"| {agent} | {method} | {len(values)} | {' | '.join(numbers)} |")
    lines += ["", f"Sampled accuracy, {reference} minus each other method at step {last}, paired by seed", ""]
    lines += ["| agent | minus | mean | 95 % interval | pairs |", "| --- | --- | --- | --- | --- |"]
    for agent, methods in sampled.items():
        for method, values in methods.items():
            if method != reference and reference in methods:
                mean, half, pairs = paired_interval(methods[reference], values)
                interval = f"{mean - half:+.3f} to {mean + half:+.3f}" if pairs > 1 else "-"
                lines.append(f"| {agent} | {method} | {mean:+.3f} | {interval} | {pairs} |")
    lines += ["", "Sampled accuracy over the steps, means", ""]
    lines.append(f"| agent | method | {' | '.join(map(str, shown))} |")
    lines.append("| --- " * (2 + len(shown)) + "|")
    at = {step: by_method(results, step, "sampled") for step in shown}
    for agent, methods in sampled.items():
        for method in methods:
            means = [f"{statistics.fmean(at[step][agent][method].values()):.3f}" for step in shown]
            lines.append(f"| {agent} | {method} | {' | '.join(means)} |")
    lines += ["", "Cost of a run, means", ""]
    lines += ["| method | responses sampled per agent | CPU seconds | wall seconds |"]
    lines += ["| --- | --- | --- | --- |"]
    for method in dict.fromkeys(cost["method"] for cost in costs):
        mine = [cost for cost in costs if cost["method"] == method]
        cpu, wall = (statistics.fmean(c[key] for c in mine) for key in ("cpu_seconds", "wall_seconds"))
        lines.append(f"| {method} | {mine[0]['responses']:,} | {cpu:.0f} | {wall:.0f} |")
    return "\n".join(lines) + "\n"


def diagnostics_table(edges: Rows) -> str:
    """Markdown: what each learner made of each source's responses, means over steps and seeds."""
    if not edges:
        return ""
    names = [key for key in edges[0] if key not in ("method", "seed", "agent", "source")]
    lines = ["", "What a learner makes of a source's responses, means over steps and seeds", ""]
    lines += [f"| method | learner | source | {' | '.join(n.replace('_', ' ') for n in names)} |"]
    lines += ["| --- " * (3 + len(names)) + "|"]
    for edge in dict.fromkeys((e["method"], e["agent"], e["source"]) for e in edges):
        mine = [e for e in edges if (e["method"], e["agent"], e["source"]) == edge]
        numbers = []
        for name in names:
            values = [e[name] for e in mine if e.get(name) is not None]
            numbers.append(f"{statistics.fmean(values):.2f}" if values else "-")
        lines.append(f"| {' | '.join([*edge, *numbers])} |")
    return "\n".join(lines) + "\n"


def plus_minus(mean: float, sd: float) -> str:
    return f"{mean:.3f}" if math.isnan(sd) else f"{mean:.3f} +- {sd:.3f}"


def draw(results: Rows, path: Path) -> None:
    """Sampled accuracy over steps, one panel an agent: mean, and a band from the worst to the best seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    agents = list(dict.fromkeys(row["agent"] for row in results))
    figure, panels = pyplot.subplots(1, len(agents), figsize=(5 * len(agents), 4), sharey=True, squeeze=False)
    for agent, panel in zip(agents, panels[0], strict=True):
        curves: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in results:
            if row["agent"] == agent:
                curves[row["method"]][row["step"]].append(row["sampled"])
        for method, points in curves.items():
            steps = sorted(points)
            (line,) = panel.plot(steps, [statistics.fmean(points[s]) for s in steps], label=method)
            low, high = [min(points[s]) for s in steps], [max(points[s]) for s in steps]
            panel.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
        panel.set(title=f"agent {agent}", xlabel="step", ylim=(0, 1))
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("accuracy on held-out prompts, sampled")
    panels[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)

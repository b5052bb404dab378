"""Updates in other layouts against those of one rank: how far they are apart."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import run_ranks


@dataclass(frozen=True)
class Differences:
    """Largest of all updates: of losses and other means, absolute; of gradient norms, relative; of weights
    after the last step, absolute."""

    loss: float
    norm: float
    weight: float


def run_on_four(models: Path, *options: str) -> Any:
    """Results by (layout, model[, "bf16"]), computed by four real processes of `parity_worker.py`."""
    run_ranks("parity_worker.py", 4, models, *options)
    return torch.load(models / "results-2.pt") | torch.load(models / "results-0.pt")


def differences(got: dict[str, Any], expected: dict[str, Any]) -> Differences:
    """Between two results of `parity_worker.steps_of`, which must agree in everything that is counted."""
    norms = zip(got["norms"], expected["norms"], strict=True)
    losses = []
    for mine, theirs in zip(got["tallies"], expected["tallies"], strict=True):
        assert mine.keys() == theirs.keys()
        for metric in mine:
            (total, count), (expected_total, expected_count) = mine[metric], theirs[metric]
            assert count == expected_count, metric
            losses.append(abs(total - expected_total) / max(count, 1))
    assert got["weights"].keys() == expected["weights"].keys()
    weights = [(got["weights"][key] - weight).abs().max() for key, weight in expected["weights"].items()]
    return Differences(
        loss=max(losses),
        norm=max(abs(mine - theirs) / (theirs or 1.0) for mine, theirs in norms),
        weight=float(max(weights)),
    )


def first_ratio_deviation(results: dict[str, Any]) -> float:
    """max |s - 1| over each step's first update."""
    first_updates = results["ratios"][::4]
    assert first_updates
    return max(float((ratios - 1.0).abs().max()) for ratios in first_updates)

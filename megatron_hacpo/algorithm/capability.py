"""How strong each agent is: windowed mean reward and capability ratios (eq. 8, 9)."""

from collections import deque
from collections.abc import Mapping
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor

Metric = Literal["mean", "positive_share"]

CAPABILITY_FLOOR = 1e-8
RATIO_MAX = 10.0
"""A ratio lies in [1 / RATIO_MAX, RATIO_MAX]."""


class CapabilityTracker:
    """P-hat of every source: the mean of P over its last `window` steps, the current one included.

    metric: what P, the capability shown in one step, is. "mean": the mean reward over the whole prompt batch.
        "positive_share": the share of rewards above 0, the only sensible one where rewards may be negative.

    Rewards are the verifier's, before any shaping.
    """

    def __init__(self, window: int = 5, metric: Metric = "mean") -> None:
        assert window >= 1
        assert metric in ("mean", "positive_share")
        self.window = window
        self.metric = metric
        self._history: dict[str, deque[float]] = {}

    def update(self, rewards_by_source: Mapping[str, Tensor]) -> None:
        """Append this step's P of every source; one without any valid reward does not append.

        rewards_by_source: float64 of any shape per source, NaN = no valid reward.
        """
        for source, rewards in rewards_by_source.items():
            assert rewards.dtype == torch.float64
            assert not rewards.isinf().any()
            values = rewards[~rewards.isnan()].tolist()
            if not values:
                continue
            if self.metric == "positive_share":
                values = [float(value > 0.0) for value in values]
            # fmean rounds once, so P depends neither on the order of the rewards nor on a thread count.
            self._history.setdefault(source, deque(maxlen=self.window)).append(fmean(values))

    def capability(self, source: str) -> float:
        """P-hat of the source (eq. 8); 0.0 before its first valid reward, which `capability_ratio` floors."""
        history = self._history.get(source)
        return fmean(history) if history else 0.0

    def state_dict(self) -> dict[str, Any]:
        """The windows as plain lists, oldest first; survives a round trip through JSON exactly."""
        return {
            "metric": self.metric,
            "history": {source: list(values) for source, values in self._history.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace all windows; a state from a longer window keeps its newest steps.

        Raises ValueError when the state was recorded with the other metric.
        """
        if state["metric"] != self.metric:
            raise ValueError(
                f"capability metric: {self.metric!r} cannot continue a history of {state['metric']!r}; "
                f"resume with {state['metric']!r} or start a new run"
            )
        self._history = {
            source: deque(values, maxlen=self.window) for source, values in state["history"].items()
        }


def capability_ratio(p_k: float, p_j: float) -> float:
    """omega(k, j) = p_k / p_j (eq. 9): above 1, k is stronger than j.

    Both sides are floored at 1e-8 and the ratio is clamped to [0.1, 10]. `capability_ratio(p_j, p_k)` is
    exactly `1 / capability_ratio(p_k, p_j)`, in both directions, and equal capabilities give exactly 1.
    """
    p_k, p_j = max(p_k, CAPABILITY_FLOOR), max(p_j, CAPABILITY_FLOOR)
    weak = 1.0 / min(max(p_k, p_j) / min(p_k, p_j), RATIO_MAX)
    # 1 / (1 / x) may differ from x by a bit, but the reciprocal of that is 1 / x again: an exact pair.
    strong = 1.0 / weak
    return strong if p_k >= p_j else weak

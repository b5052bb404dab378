"""Capability window and ratios against hand-computed values."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_hacpo.algorithm.capability import CapabilityTracker, capability_ratio

NAN = float("nan")


def rewards(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_one_step_is_the_mean_over_the_whole_batch() -> None:
    tracker = CapabilityTracker()
    tracker.update({"A": torch.tensor([[1.0, 0.0], [0.5, 0.0]], dtype=torch.float64)})
    assert tracker.capability("A") == 0.375  # (1 + 0 + 0.5 + 0) / 4


def test_window_is_a_mean_of_step_means_over_the_last_k_steps() -> None:
    tracker = CapabilityTracker(window=2)
    tracker.update({"A": rewards(1.0)})
    assert tracker.capability("A") == 1.0
    tracker.update({"A": rewards(0.0, 0.0, 1.0, 1.0)})
    assert tracker.capability("A") == 0.75  # (1 + 1/2) / 2, not the pooled 3/5
    tracker.update({"A": rewards(0.25)})
    assert tracker.capability("A") == 0.375  # (1/2 + 1/4) / 2: the first step left the window


def test_missing_rewards_are_not_zeros() -> None:
    tracker = CapabilityTracker()
    tracker.update({"A": rewards(1.0, NAN, 0.0, NAN)})
    assert tracker.capability("A") == 0.5  # (1 + 0) / 2


def test_source_without_valid_reward_does_not_append() -> None:
    tracker = CapabilityTracker(window=2)
    tracker.update({"A": rewards(1.0), "B": rewards(0.5)})
    for _ in range(3):
        tracker.update({"A": rewards(NAN, NAN), "B": rewards(0.0)})
    assert tracker.capability("A") == 1.0
    assert tracker.capability("B") == 0.0
    tracker.update({"A": rewards()})
    assert tracker.capability("A") == 1.0


def test_positive_share_counts_rewards_above_zero() -> None:
    tracker = CapabilityTracker(metric="positive_share")
    tracker.update({"A": rewards(-1.0, 0.0, 0.1, 2.0, NAN)})
    assert tracker.capability("A") == 0.5  # 0.1 and 2.0 of four
    mean = CapabilityTracker()
    mean.update({"A": rewards(1.0, 0.0, 1.0)})
    share = CapabilityTracker(metric="positive_share")
    share.update({"A": rewards(1.0, 0.0, 1.0)})
    assert mean.capability("A") == share.capability("A")


def test_ratios_are_defined_before_any_reward() -> None:
    tracker = CapabilityTracker()
    tracker.update({"A": rewards(0.5)})
    nobody, known = tracker.capability("B"), tracker.capability("A")
    assert nobody == 0.0
    assert capability_ratio(nobody, nobody) == 1.0
    assert capability_ratio(known, nobody) == 10.0
    assert capability_ratio(nobody, known) == 0.1


def test_state_survives_json_and_continues_identically() -> None:
    tracker = CapabilityTracker(window=3)
    for reward in (0.1, 0.7, 1.0 / 3.0, 0.9):
        tracker.update({"A": rewards(reward), "B": rewards(reward / 7.0)})
    resumed = CapabilityTracker(window=3)
    resumed.update({"stale": rewards(1.0)})
    resumed.load_state_dict(json.loads(json.dumps(tracker.state_dict())))
    assert resumed.state_dict() == tracker.state_dict()
    for each in (tracker, resumed):
        each.update({"A": rewards(0.2), "B": rewards(0.3)})
    assert resumed.capability("A") == tracker.capability("A")
    assert resumed.capability("A") == pytest.approx((1.0 / 3.0 + 0.9 + 0.2) / 3)


def test_saved_state_is_a_copy() -> None:
    tracker = CapabilityTracker()
    tracker.update({"A": rewards(1.0)})
    state = tracker.state_dict()
    tracker.update({"A": rewards(0.0)})
    assert state["history"] == {"A": [1.0]}


def test_shorter_window_keeps_the_newest_steps() -> None:
    tracker = CapabilityTracker(window=3)
    for reward in (1.0, 0.5, 0.25):
        tracker.update({"A": rewards(reward)})
    shorter = CapabilityTracker(window=2)
    shorter.load_state_dict(tracker.state_dict())
    assert shorter.capability("A") == 0.375


def test_history_of_another_metric_is_refused() -> None:
    state = CapabilityTracker(metric="mean").state_dict()
    with pytest.raises(ValueError, match=r"capability metric: 'positive_share' .* 'mean'"):
        CapabilityTracker(metric="positive_share").load_state_dict(state)


@pytest.mark.parametrize(
    "p_k, p_j, expected",
    [
        (0.6, 0.3, 2.0),
        (0.3, 0.6, 0.5),
        (0.4, 0.4, 1.0),
        (0.9, 0.01, 10.0),  # 90, clamped
        (0.01, 0.9, 0.1),
        (0.5, 0.0, 10.0),  # 0.5 / 1e-8, clamped
        (0.0, 0.0, 1.0),  # 1e-8 / 1e-8
        (0.0, 2e-8, 0.5),  # 1e-8 / 2e-8: the floor, not the clamp
        (-1.0, 0.5, 0.1),
    ],
)
def test_ratio(p_k: float, p_j: float, expected: float) -> None:
    assert capability_ratio(p_k, p_j) == pytest.approx(expected, rel=1e-15)


@settings(deadline=None)
@given(st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_ratios_of_a_pair_are_exact_reciprocals(p_k: float, p_j: float) -> None:
    forward, backward = capability_ratio(p_k, p_j), capability_ratio(p_j, p_k)
    assert forward == 1.0 / backward
    assert backward == 1.0 / forward
    assert 0.1 <= forward <= 10.0
    assert forward == pytest.approx(min(max(max(p_k, 1e-8) / max(p_j, 1e-8), 0.1), 10.0), rel=1e-15)

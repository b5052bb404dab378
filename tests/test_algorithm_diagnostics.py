"""Clip fractions as sums and counts."""

import pytest
import torch
from torch import Tensor

from megatron_hacpo.algorithm.diagnostics import (
    cross_clip_high_fraction,
    cross_clip_low_fraction,
    effective_share,
    gradient_weight,
    mean_ratio,
    own_clip_fraction,
    rewarded_kept_fraction,
    weight_moments,
)
from megatron_hacpo.algorithm.objective import clipped_surrogate, cross_objective

S = torch.tensor([0.5, 0.5, 0.5, 0.8, 0.9, 1.0, 1.5, 1.5, 1.5])
A = torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)


def numbers(pair: tuple[Tensor, Tensor]) -> tuple[float, float]:
    assert all(value.dtype == torch.float64 and value.ndim == 0 for value in pair)
    return pair[0].item(), pair[1].item()


def test_own_counts_only_the_side_where_min_bites() -> None:
    assert numbers(own_clip_fraction(S, A, 0.1, 0.25)) == (2.0, 7.0)  # 0.5 with A < 0, 1.5 with A > 0


def test_own_clipped_means_no_gradient() -> None:
    s = S.clone().requires_grad_()
    clipped_surrogate(s, A, 0.1, 0.25).sum().backward()
    assert s.grad is not None
    assert ((s.grad == 0.0) & (A != 0.0)).sum() == own_clip_fraction(S, A, 0.1, 0.25)[0]


def test_cross_low_and_high() -> None:
    assert numbers(cross_clip_low_fraction(S, A, 0.8)) == (2.0, 7.0)  # 0.5 twice; 0.8 is inside
    assert numbers(cross_clip_high_fraction(S, A)) == (2.0, 7.0)  # 1.5 twice; 1.0 is inside
    assert numbers(cross_clip_high_fraction(S, A, 2.0)) == (0.0, 7.0)


def test_kept_share_of_rewarded() -> None:
    assert numbers(rewarded_kept_fraction(S, A, 0.8)) == (2.0, 4.0)  # 0.8 and 0.9 of 0.5, 0.8, 0.9, 1.5
    assert numbers(rewarded_kept_fraction(S, A, 0.0, torch.inf)) == (4.0, 4.0)


def test_cross_kept_means_gradient() -> None:
    s = S.clone().requires_grad_()
    cross_objective(s, A, 2.0, 1.0, 0.8).sum().backward()
    assert s.grad is not None
    assert ((s.grad != 0.0) & (A > 0.0)).sum() == rewarded_kept_fraction(S, A, 0.8)[0]


def test_mean_ratio_of_right_and_wrong() -> None:
    assert numbers(mean_ratio(S, A, rewarded=True)) == (pytest.approx(float(S[A > 0].sum())), 4.0)
    assert numbers(mean_ratio(S, A, rewarded=False)) == (pytest.approx(float(S[A < 0].sum())), 3.0)


def test_gradient_weight_is_the_gradient() -> None:
    """d(objective) / d(log s) = weight * omega * A, inside and outside the window."""
    s = S.clone().requires_grad_()
    cross_objective(s, A, 2.0, 3.0, 0.8).sum().backward()
    weight = gradient_weight(S, 3.0, 0.8, 1.0)
    assert s.grad is not None
    torch.testing.assert_close((s.grad * S).double(), weight * 2.0 * A)


def test_effective_share() -> None:
    weight = torch.tensor([1.0, 1.0, 0.0, 0.0, 5.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0], dtype=torch.float64)
    (total, n), (square, m) = (numbers(pair) for pair in weight_moments(weight, advantage))
    assert (total, square, n, m) == (2.0, 2.0, 4.0, 4.0)
    assert effective_share(total / n, square / m) == 0.5  # two of four count, and equally
    assert effective_share(0.0, 0.0) == 0.0


def test_nothing_to_count_is_zero_of_zero() -> None:
    assert numbers(rewarded_kept_fraction(S, -A.abs(), 0.8)) == (0.0, 0.0)
    assert numbers(own_clip_fraction(S, A * 0.0, 0.1, 0.25)) == (0.0, 0.0)


def test_leaving_out_zero_advantages_changes_nothing() -> None:
    kept = A != 0.0
    for fraction in (cross_clip_low_fraction, rewarded_kept_fraction):
        assert numbers(fraction(S, A, 0.8)) == numbers(fraction(S[kept], A[kept], 0.8))

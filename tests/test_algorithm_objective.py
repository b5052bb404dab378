"""Importance ratios and objectives against hand-computed values, with their gradients."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_hacpo.algorithm.objective import (
    clipped_surrogate,
    cross_objective,
    importance_ratio,
    mean_log_prob,
    token_clipped_surrogate,
    token_importance_ratio,
    unclipped_cross_objective,
)

LOW, HIGH = 0.1, 0.25


def f32(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def value_and_grad(objective: Callable[[Tensor], Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
    s = s.clone().requires_grad_()
    value = objective(s)
    value.sum().backward()
    assert s.grad is not None
    return value.detach(), s.grad


def test_each_side_is_divided_by_its_own_count() -> None:
    # The learner: -6 over 3 tokens and -3 over 2. The source: -10 over 4 tokens, and -1.5 a token.
    s = importance_ratio(f32(-6.0, -3.0), torch.tensor([3, 2]), f64(-10.0 / 4, -1.5), 10.0)
    torch.testing.assert_close(s, f32(math.exp(-2.0 + 2.5), 1.0))
    assert s.dtype == torch.float32


@pytest.mark.parametrize("log_clamp", [10.0, None])
@pytest.mark.parametrize("wire_dtype", [torch.float32, torch.float64])
def test_own_ratio_is_exactly_one_for_the_same_sums(log_clamp: float | None, wire_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 5000, (20000,), generator=generator)
    sums = -torch.rand(20000, generator=generator) * counts
    s = importance_ratio(sums, counts, mean_log_prob(sums, counts).to(wire_dtype), log_clamp)
    assert torch.equal(s, torch.ones_like(s))


def test_a_mean_at_another_precision_would_not_be_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(1, 5000, (1000,), generator=generator)
    sums = -torch.rand(1000, generator=generator) * counts
    s = importance_ratio(sums, counts, mean_log_prob(sums, counts).bfloat16(), 10.0)
    assert (s - 1.0).abs().max() > 3e-4


def test_log_ratio_is_clamped() -> None:
    new, count, old = f32(-1.0, -30.0, -1.0), torch.tensor([1, 1, 1]), f64(-12.5, -1.0, -11.0)
    s = importance_ratio(new, count, old, 10.0)
    torch.testing.assert_close(s, f32(math.exp(10.0), math.exp(-10.0), math.exp(10.0)))
    s = importance_ratio(new, count, old, None)
    torch.testing.assert_close(s, f32(math.exp(11.5), math.exp(-29.0), math.exp(10.0)))


def test_ratio_has_gradient_s_over_length_and_none_beyond_the_clamp() -> None:
    new = f32(-1.0, -40.0).requires_grad_()
    old = f64(-1.0, -1.0).requires_grad_()
    importance_ratio(new, torch.tensor([2, 2]), old, 10.0).sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, f32(math.exp(0.5) / 2, 0.0))
    assert old.grad is None  # the old policy is a constant


def test_no_tokens_have_mean_zero() -> None:
    assert mean_log_prob(f32(0.0, -2.0), torch.tensor([0, 2])).tolist() == [0.0, -1.0]


def test_clipped_surrogate() -> None:
    s = f32(1.5, 1.5, 0.5, 0.5, 1.05, 1.0)
    advantage = f64(2.0, -2.0, 2.0, -2.0, 2.0, -2.0)
    value, grad = value_and_grad(lambda s: clipped_surrogate(s, advantage, LOW, HIGH), s)
    # clipped at 1.25 * 2; s * A = -3 below -2.5; s * A = 1 below 1.8; clipped at 0.9 * -2; inside; inside
    torch.testing.assert_close(value, f32(2.5, -3.0, 1.0, -1.8, 2.1, -2.0))
    assert grad.tolist() == [0.0, -2.0, 2.0, 0.0, 2.0, -2.0]
    assert value.dtype == torch.float32


def test_gradient_at_the_exact_bounds_is_whole() -> None:
    s, advantage = f32(1.0 + HIGH, 1.0 - LOW), f64(2.0, -2.0)
    _, grad = value_and_grad(lambda s: clipped_surrogate(s, advantage, LOW, HIGH), s)
    assert grad.tolist() == [2.0, -2.0]


def test_cross_objective() -> None:
    s = f32(0.9, 0.9, 0.5, 1.5, 0.9)
    advantage = f64(2.0, -2.0, 2.0, 2.0, 0.0)
    value, grad = value_and_grad(lambda s: cross_objective(s, advantage, 0.5, 2.0, 0.8), s)
    # c * c^2 * 0.5 * A: 0.729 inside, 0.512 at the lower bound, 1 at the upper
    torch.testing.assert_close(value, f32(0.729, -0.729, 0.512, 1.0, 0.0))
    # d/ds = c^2 * 0.5 * A inside (the weight is a constant), nothing outside
    torch.testing.assert_close(grad, f32(0.81, -0.81, 0.0, 0.0, 0.0))
    assert value.dtype == torch.float32


@pytest.mark.parametrize("lower", [0.8, 0.4, 0.9, 1.0 - 0.2 + 3 * 0.025])
def test_both_bounds_belong_to_the_window(lower: float) -> None:
    bound = f32(lower)
    s = torch.cat([bound, torch.nextafter(bound, f32(0.0)), f32(1.0), torch.nextafter(f32(1.0), f32(2.0))])
    _, grad = value_and_grad(lambda s: cross_objective(s, f64(1.0, 1.0, 1.0, 1.0), 1.0, 0.0, lower), s)
    assert grad.tolist() == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
def test_alpha_shrinks_the_gradient(alpha: float) -> None:
    _, grad = value_and_grad(lambda s: cross_objective(s, f64(1.0), 1.0, alpha, 0.4), f32(0.5))
    torch.testing.assert_close(grad, f32(0.5**alpha))


def test_unclipped_cross_objective() -> None:
    s, advantage = f32(0.5, 2.0), f64(2.0, 2.0)
    value, grad = value_and_grad(lambda s: unclipped_cross_objective(s, advantage, 0.5, 3.0), s)
    # 0.5 * 0.5^3 * 0.5 * 2; 2 * min(2, 1)^3 * 0.5 * 2
    torch.testing.assert_close(value, f32(0.0625, 2.0))
    torch.testing.assert_close(grad, f32(0.125, 1.0))


OBJECTIVES = [
    lambda s, a: clipped_surrogate(s, a, LOW, HIGH),
    lambda s, a: cross_objective(s, a, 2.0, 1.0, 0.8),
    lambda s, a: unclipped_cross_objective(s, a, 2.0, 1.0),
]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_advantage_zero_contributes_exactly_nothing(objective: Callable[[Tensor, Tensor], Tensor]) -> None:
    s = f32(torch.inf, 0.0, 1.0, 0.9)
    value, grad = value_and_grad(lambda s: objective(s, torch.zeros(4, dtype=torch.float64)), s)
    assert value.tolist() == [0.0] * 4
    assert grad.tolist() == [0.0] * 4


@pytest.mark.parametrize("advantage", [0.0, 1.0])
@pytest.mark.parametrize("objective", OBJECTIVES[:2])
def test_an_overflowing_ratio_without_clamp_gives_no_nan_gradient(
    objective: Callable[[Tensor, Tensor], Tensor], advantage: float
) -> None:
    log_prob = f32(0.0).requires_grad_()
    s = importance_ratio(log_prob, torch.tensor([1]), f64(-500.0), None)
    objective(s, f64(advantage)).sum().backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == [0.0]  # clipped above, or no advantage


def test_token_level_surrogate() -> None:
    ratios = f32(1.5, 1.0, 0.5, 0.5, 2.0)
    old = f32(-1.0, -2.0, -1.0, -3.0, -1.0)
    segments = torch.tensor([0, 0, 1, 1, 1])
    new = (old + ratios.log()).requires_grad_()
    value = token_clipped_surrogate(new, old, segments, f64(2.0, -1.0), LOW, HIGH, 10.0)
    # A = 2: min(3, 2.5) and 2 -> mean 2.25. A = -1: min(-0.5, -0.9) twice and min(-2, -1.25) -> mean -3.8 / 3
    torch.testing.assert_close(value, f32(2.25, -3.8 / 3))
    value.sum().backward()
    assert new.grad is not None
    # ratio * A / L where min() took the unclipped side: 1 * 2 / 2 and 2 * -1 / 3
    torch.testing.assert_close(new.grad, f32(0.0, 1.0, 0.0, 0.0, -2.0 / 3))


def test_token_ratio_is_exactly_one_for_the_same_log_probs() -> None:
    log_probs = -torch.rand(10000, generator=torch.Generator().manual_seed(0)) * 20
    ratio = token_importance_ratio(log_probs, log_probs.double(), 10.0)
    assert torch.equal(ratio, torch.ones_like(ratio))


def test_token_surrogate_ignores_unassigned_tokens_and_takes_parts() -> None:
    new, old = f32(-1.0, torch.nan, -2.0, 0.0), f32(-1.0, 0.0, -2.0, torch.nan)
    new.requires_grad_()
    segments = torch.tensor([0, -1, 1, -1])
    value = token_clipped_surrogate(
        new, old, segments, f64(3.0, 4.0), LOW, HIGH, None, lengths=torch.tensor([2, 1])
    )
    assert value.tolist() == [1.5, 4.0]
    value.sum().backward()
    assert new.grad is not None
    assert new.grad.tolist() == [1.5, 0.0, 4.0, 0.0]


def test_advantages_stay_float64_until_the_product() -> None:
    # omega * A is formed in float64 and rounded once.
    a, omega = 1.0 + 2.0**-30, 1.0 - 2.0**-30
    value = cross_objective(f32(1.0), f64(a), omega, 1.0, 0.8)
    assert value.item() == float(f32(a * omega))

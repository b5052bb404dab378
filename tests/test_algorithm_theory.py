"""The paper's statements, checked numerically: unbiased baseline, and the gradient of cross responses."""

from itertools import product

import pytest
import torch
from torch import Tensor

from megatron_hacpo.algorithm.advantage import AdvantageResult, advantages
from megatron_hacpo.algorithm.capability import capability_ratio
from megatron_hacpo.algorithm.objective import cross_objective, importance_ratio

GUARDS_OFF = {"zero_equal_groups": False, "baseline_guard": False}


def oracle(p: list[float]) -> Tensor:
    """omega(0, j) from the true success rates."""
    return torch.tensor([capability_ratio(p[0], p_j) for p_j in p], dtype=torch.float64)


def simulate(
    guards: dict[str, bool], capability_baseline: bool = True
) -> tuple[Tensor, AdvantageResult, Tensor]:
    """200,000 prompts of varying difficulty, two responses of each of three agents, success rates 2 : 1 : 4.

    Returns the learner's true success rate per prompt, its advantages, and the rewards.
    """
    generator = torch.Generator().manual_seed(0)
    difficulty = 0.2 + 0.8 * torch.rand(200_000, 1, generator=generator, dtype=torch.float64)
    p = [0.4, 0.2, 0.8]
    source = torch.tensor([0, 0, 1, 1, 2, 2])
    chance = torch.tensor(p, dtype=torch.float64)[source] * difficulty
    rewards = (torch.rand(chance.shape, generator=generator, dtype=torch.float64) < chance).double()
    result = advantages(rewards, source, 0, oracle(p), capability_baseline=capability_baseline, **guards)
    return chance[:, 0], result, rewards


def mean_and_error(samples: Tensor) -> tuple[float, float]:
    return samples.mean().item(), (samples.std() / len(samples) ** 0.5).item()


def test_baseline_estimates_the_learners_success_rate() -> None:
    p_k, result, _ = simulate(GUARDS_OFF)
    bias, error = mean_and_error(result.baseline - p_k)
    assert error < 1e-3
    assert abs(bias) < 4 * error


def test_own_advantages_times_sigma_average_to_zero() -> None:
    _, result, rewards = simulate(GUARDS_OFF)
    own = (result.advantages[:, :2] * (rewards.std(dim=1, keepdim=True) + 1e-6)).mean(dim=1)
    mean, error = mean_and_error(own)
    assert error < 1e-3
    assert abs(mean) < 4 * error


def test_plain_mean_is_biased_by_the_gap_in_capability() -> None:
    p_k, result, _ = simulate(GUARDS_OFF, capability_baseline=False)
    bias, error = mean_and_error(result.baseline - p_k)
    # difficulty averages 0.6: ((0.4 + 0.2 + 0.8) / 3 - 0.4) * 0.6 = 0.04
    assert bias == pytest.approx(0.04, abs=4 * error)


def expected_baseline(p: list[float], responses: int, **guards: bool) -> float:
    """E[mu-hat] of learner 0, exactly: all outcomes of `responses` binary rewards per agent, by chance."""
    source = torch.arange(len(p)).repeat_interleave(responses)
    outcomes = torch.tensor(list(product((0.0, 1.0), repeat=len(source))), dtype=torch.float64)
    chance = torch.tensor(p, dtype=torch.float64)[source]
    weight = torch.where(outcomes == 1.0, chance, 1.0 - chance).prod(dim=1)
    result = advantages(outcomes, source, 0, oracle(p), capability_baseline=True, **guards)
    return (weight * result.baseline).sum().item()


@pytest.mark.parametrize("p", [[0.6, 0.3], [0.3, 0.6], [0.5, 0.5], [0.4, 0.2, 0.8], [0.7]])
def test_unbiased_exactly_when_every_outcome_is_counted(p: list[float]) -> None:
    assert expected_baseline(p, 3, **GUARDS_OFF) == pytest.approx(p[0], abs=1e-12)


def test_bias_of_the_guards() -> None:
    # p = (0.6, 0.3), omega = (1, 2), one response each; outcome (own, other): chance, mu-hat
    #   (0, 0): 0.28, 0    (1, 0): 0.42, 1/2    (0, 1): 0.12, 2/2    (1, 1): 0.18, 3/2
    p = [0.6, 0.3]
    assert expected_baseline(p, 1, **GUARDS_OFF) == pytest.approx(0.42 / 2 + 0.12 + 0.18 * 1.5)  # = 0.6
    # Either guard turns the 3/2 of (1, 1) into 1 (the plain mean, or the own mean): 0.18 * -1/2 = -0.09.
    for on in ({"zero_equal_groups": True}, {"baseline_guard": True}, {}):
        assert expected_baseline(p, 1, **{**GUARDS_OFF, **on} if on else on) == pytest.approx(0.51)
    # Two responses each, both guards together:
    # off: mu-hat = (a + 2 b) / 4 with a own and b other successes; above 1 for (1, 2): 5/4 and (2, 2): 6/4.
    # on: (1, 2) -> own mean 1/2, (2, 2) -> 1; chances 0.48 * 0.09 and 0.36 * 0.09.
    bias = 0.48 * 0.09 * (0.5 - 1.25) + 0.36 * 0.09 * (1.0 - 1.5)
    assert expected_baseline(p, 2) == pytest.approx(0.6 + bias)
    assert bias == pytest.approx(-0.0486)


def test_a_weaker_learner_is_not_hit_by_the_range_guard() -> None:
    # omega(k, j) <= 1: mu-hat never exceeds 1, and only the equal groups shift it:
    # p = (0.3, 0.6), omega = (1, 1/2), one each: (1, 1) has chance 0.18 and moves from 3/4 to 1.
    off = {"zero_equal_groups": False, "baseline_guard": True}
    assert expected_baseline([0.3, 0.6], 1, **off) == pytest.approx(0.3)
    assert expected_baseline([0.3, 0.6], 1) == pytest.approx(0.3 + 0.18 * 0.25)


L, V = 5, 7
TOKENS = torch.tensor([3, 0, 6, 2, 2])


def cross_gradient(target_s: float, *, omega: float, alpha: float, advantage: float) -> tuple[Tensor, Tensor]:
    """A softmax policy of L free distributions: gradients [L, V] of the cross term and of log pi.

    The source's mean log-prob is such that the ratio is `target_s`.
    """
    logits = torch.randn(L, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    log_pi = logits.log_softmax(dim=-1)[torch.arange(L), TOKENS].sum()
    old_mean = log_pi.detach() / L - torch.tensor(target_s, dtype=torch.float64).log()
    s = importance_ratio(log_pi[None], torch.tensor([L]), old_mean[None], 10.0)
    assert s.item() == pytest.approx(target_s)
    term = cross_objective(s, torch.tensor([advantage], dtype=torch.float64), omega, alpha, 0.8)
    (gradient,) = torch.autograd.grad(term.sum(), logits)
    analytic = torch.nn.functional.one_hot(TOKENS, V) - logits.detach().softmax(dim=-1)
    return gradient, analytic


@pytest.mark.parametrize("alpha", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("s, omega, advantage", [(0.9, 2.0, 1.3), (0.81, 0.5, -0.7), (0.99, 1.0, 1.0)])
def test_cross_gradient_inside_the_window(s: float, alpha: float, omega: float, advantage: float) -> None:
    gradient, grad_log_pi = cross_gradient(s, omega=omega, alpha=alpha, advantage=advantage)
    expected = omega * s ** (alpha + 1) * advantage / L * grad_log_pi
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("s", [0.3, 0.79, 1.01, 4.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cross_gradient_is_zero_outside_the_window(s: float, advantage: float) -> None:
    gradient, _ = cross_gradient(s, omega=2.0, alpha=1.0, advantage=advantage)
    assert not gradient.any()

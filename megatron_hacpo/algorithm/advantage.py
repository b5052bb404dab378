"""Capability-aware advantages of one learner over everybody's responses (eq. 6, 7, 10)."""

from dataclasses import dataclass

import torch
from torch import Tensor

EQUAL_TOLERANCE = 1e-12
STD_EPSILON = 1e-6


@dataclass(frozen=True, kw_only=True)
class AdvantageResult:
    """What one learner makes of a prompt batch.

    advantages: float64 [P, R], A_i before a cross response's omega(j, k); 0 where there is no signal.
    baseline: float64 [P], what was subtracted from the prompt's rewards; NaN where it has no valid reward.
    equal_groups: prompts with at least two valid rewards, all equal.
    baseline_fallbacks: prompts whose baseline was above 1 and was replaced.
    too_few_valid: prompts with fewer than two valid rewards.
    """

    advantages: Tensor
    baseline: Tensor
    equal_groups: int
    baseline_fallbacks: int
    too_few_valid: int


def joint_baseline(rewards: Tensor, weights: Tensor) -> Tensor:
    """mu-hat = sum of weights * R / number of valid rewards, per prompt (eq. 6).

    rewards: float64 [P, R], NaN = no valid reward.
    weights: float64 [R], omega(k, j) of each column's source j.
    Returns float64 [P]; NaN for a prompt without a valid reward.
    """
    valid = ~rewards.isnan()
    return (rewards.nan_to_num(nan=0.0) * weights).sum(dim=1) / valid.sum(dim=1)


def joint_std(rewards: Tensor) -> Tensor:
    """sigma: Bessel-corrected standard deviation of all valid raw rewards of a prompt, plus 1e-6 (eq. 7).

    rewards: float64 [P, R], NaN = no valid reward. Returns float64 [P]; NaN for fewer than two valid rewards.
    """
    valid = ~rewards.isnan()
    count = valid.sum(dim=1)
    mean = rewards.nan_to_num(nan=0.0).sum(dim=1) / count
    squares = torch.where(valid, (rewards - mean[:, None]).square(), 0.0).sum(dim=1)
    return (squares / (count - 1)).sqrt() + STD_EPSILON


def equal_rewards(rewards: Tensor) -> Tensor:
    """Prompts whose valid rewards differ by at most 1e-12: float64 [P, R] to bool [P]."""
    missing = rewards.isnan()
    highest = rewards.masked_fill(missing, -torch.inf).amax(dim=1)
    lowest = rewards.masked_fill(missing, torch.inf).amin(dim=1)
    return highest - lowest <= EQUAL_TOLERANCE


def learner_mean(rewards: Tensor, own: Tensor) -> Tensor:
    """The learner's own mean reward per prompt, or everybody's mean where it has no valid reward itself.

    rewards: float64 [P, R], NaN = no valid reward. own: bool [R], the learner's columns. Returns float64 [P].
    """
    ones = torch.ones_like(rewards[0])
    own_mean = joint_baseline(rewards.masked_fill(~own, torch.nan), ones)
    return torch.where(own_mean.isnan(), joint_baseline(rewards, ones), own_mean)


def advantages(
    rewards: Tensor,
    source: Tensor,
    learner: int,
    ratios: Tensor,
    *,
    capability_baseline: bool,
    zero_equal_groups: bool = True,
    baseline_guard: bool = True,
    reward_range_unit: bool = True,
) -> AdvantageResult:
    """A_i = (R_i - mu-hat(k)) / sigma for every response of every agent to every prompt (eq. 6, 7, 10).

    rewards: float64 [P, R], R = all responses of all agents to a prompt, NaN = no valid reward. A missing
        reward is in none of baseline, sigma and counts, and its advantage is 0.
    source: int64 [R], the agent that generated each column.
    ratios: float64 [n], omega(learner, j) of every agent j, exactly 1 for the learner itself.
    capability_baseline: weight rewards by `ratios`; otherwise the baseline is the plain joint mean.
    zero_equal_groups: equal rewards give A = 0 (the baseline is then the plain mean). Off, weights may invent
        a signal, divided by a sigma of 1e-6.
    baseline_guard: with rewards declared to lie in [0, 1] (`reward_range_unit`), a baseline above 1 gives way
        to the learner's own mean (everybody's plain mean if the learner has no valid reward for the prompt).

    With a single agent every weight is exactly 1: these are GSPO's and GRPO's group advantages.
    """
    assert rewards.dtype == ratios.dtype == torch.float64
    assert rewards.ndim == 2
    assert source.shape == rewards.shape[1:]
    assert not rewards.isinf().any()
    assert ratios[learner] == 1.0
    valid = ~rewards.isnan()
    enough = valid.sum(dim=1) >= 2
    equal = equal_rewards(rewards) & enough

    ones = torch.ones_like(rewards[0])
    baseline = joint_baseline(rewards, ratios[source] if capability_baseline else ones)
    if zero_equal_groups:
        baseline = torch.where(equal, joint_baseline(rewards, ones), baseline)
    above = torch.zeros_like(enough)
    if baseline_guard and reward_range_unit:
        above = enough & (baseline > 1.0)
        baseline = torch.where(above, learner_mean(rewards, source == learner), baseline)

    signal = valid & enough[:, None]
    if zero_equal_groups:
        signal &= ~equal[:, None]
    scaled = (rewards - baseline[:, None]) / joint_std(rewards)[:, None]
    return AdvantageResult(
        advantages=torch.where(signal, scaled, 0.0),
        baseline=baseline,
        equal_groups=int(equal.sum()),
        baseline_fallbacks=int(above.sum()),
        too_few_valid=int((~enough).sum()),
    )

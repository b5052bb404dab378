"""Advantages against hand-computed values, missing rewards and both guards."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_hacpo.algorithm.advantage import AdvantageResult, advantages

NAN = float("nan")
TWO_EACH = [0, 0, 1, 1]


def compute(
    rows: list[list[float]], source: list[int], ratios: list[float], learner: int = 0, **options: Any
) -> AdvantageResult:
    options = {"capability_baseline": True, **options}
    return advantages(
        torch.tensor(rows, dtype=torch.float64),
        torch.tensor(source),
        learner,
        torch.tensor(ratios, dtype=torch.float64),
        **options,
    )


def close(actual: Tensor, expected: list[float] | list[list[float]]) -> None:
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)


def test_weighted_baseline_and_joint_std() -> None:
    result = compute([[1.0, 0.0, 1.0, 0.0]], TWO_EACH, [1.0, 2.0])
    # mu = (1 + 0 + 2 * 1 + 2 * 0) / 4 = 0.75; raw mean 0.5, sigma = sqrt(4 * 0.25 / 3) + 1e-6
    sigma = math.sqrt(1.0 / 3.0) + 1e-6
    close(result.baseline, [0.75])
    close(result.advantages, [[0.25 / sigma, -0.75 / sigma, 0.25 / sigma, -0.75 / sigma]])
    assert result.advantages.dtype == torch.float64
    assert (result.equal_groups, result.baseline_fallbacks, result.too_few_valid) == (0, 0, 0)


def test_the_other_learner_weights_the_other_way() -> None:
    result = compute([[1.0, 0.0, 1.0, 0.0]], TWO_EACH, [0.5, 1.0], learner=1)
    close(result.baseline, [0.375])  # (0.5 * 1 + 1) / 4


def test_capability_baseline_off_is_the_plain_joint_mean() -> None:
    result = compute([[1.0, 0.0, 0.0, 0.0]], TWO_EACH, [1.0, 2.0], capability_baseline=False)
    close(result.baseline, [0.25])
    sigma = math.sqrt((0.75**2 + 3 * 0.25**2) / 3) + 1e-6
    close(result.advantages, [[0.75 / sigma, -0.25 / sigma, -0.25 / sigma, -0.25 / sigma]])


def test_agents_may_have_different_numbers_of_responses() -> None:
    result = compute([[1.0, 0.5, 0.0]], [0, 1, 1], [1.0, 0.5])
    # mu = (1 + 0.5 * 0.5 + 0.5 * 0) / 3 = 1.25 / 3; raw mean 0.5, sigma = sqrt((0.25 + 0 + 0.25) / 2) + 1e-6
    mu, sigma = 1.25 / 3, 0.5 + 1e-6
    close(result.advantages, [[(1.0 - mu) / sigma, (0.5 - mu) / sigma, -mu / sigma]])


def test_columns_are_labelled_not_ordered() -> None:
    result = compute([[1.0, 0.5, 0.0]], [0, 1, 1], [1.0, 0.5])
    shuffled = compute([[0.0, 1.0, 0.5]], [1, 0, 1], [1.0, 0.5])
    close(shuffled.advantages, [[result.advantages[0, i].item() for i in (2, 0, 1)]])


def test_prompts_do_not_mix() -> None:
    rows = [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
    both = compute(rows, TWO_EACH, [1.0, 2.0])
    for i, row in enumerate(rows):
        assert torch.equal(both.advantages[i], compute([row], TWO_EACH, [1.0, 2.0]).advantages[0])


def test_missing_reward_is_in_nothing() -> None:
    result = compute([[1.0, NAN, 1.0, 0.0]], TWO_EACH, [1.0, 1.5])
    # mu = (1 + 1.5) / 3; raw mean 2/3, sigma = sqrt((1/9 + 1/9 + 4/9) / 2) + 1e-6
    mu, sigma = 2.5 / 3, math.sqrt(1.0 / 3.0) + 1e-6
    close(result.advantages, [[(1 - mu) / sigma, 0.0, (1 - mu) / sigma, -mu / sigma]])
    without = compute([[1.0, 1.0, 0.0]], [0, 1, 1], [1.0, 1.5])
    assert torch.equal(result.advantages[0, [0, 2, 3]], without.advantages[0])


@pytest.mark.parametrize("row", [[1.0, NAN, NAN, NAN], [NAN] * 4, [NAN, NAN, NAN, 1.0]])
def test_fewer_than_two_valid_rewards_give_zero(row: list[float]) -> None:
    result = compute([row], TWO_EACH, [1.0, 4.0], zero_equal_groups=False)
    assert torch.equal(result.advantages, torch.zeros(1, 4, dtype=torch.float64))
    assert (result.equal_groups, result.baseline_fallbacks, result.too_few_valid) == (0, 0, 1)


@pytest.mark.parametrize("value", [0.0, 0.3, 1.0])
def test_equal_rewards_give_zero_whatever_the_weights(value: float) -> None:
    result = compute([[value] * 4, [value, NAN, value, value]], TWO_EACH, [1.0, 3.0])
    assert torch.equal(result.advantages, torch.zeros(2, 4, dtype=torch.float64))
    close(result.baseline, [value, value])
    assert (result.equal_groups, result.baseline_fallbacks) == (2, 0)


def test_equal_is_judged_in_float64() -> None:
    rows = [[0.5, 0.5 + 9e-13, 0.5, 0.5], [0.5, 0.5 + 2e-12, 0.5, 0.5]]
    result = compute(rows, TWO_EACH, [1.0, 2.0])
    assert result.equal_groups == 1
    assert not result.advantages[0].any()
    assert result.advantages[1].all()


def test_equal_guard_off_lets_weights_invent_a_signal() -> None:
    result = compute([[1.0] * 4], TWO_EACH, [1.0, 2.0], zero_equal_groups=False, baseline_guard=False)
    close(result.baseline, [1.5])  # (1 + 1 + 2 + 2) / 4
    torch.testing.assert_close(
        result.advantages, torch.full((1, 4), -0.5 / 1e-6, dtype=torch.float64), rtol=1e-9, atol=0.0
    )
    assert result.equal_groups == 1


def test_baseline_above_one_falls_back_to_the_learners_mean() -> None:
    rows = [[1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    result = compute(rows, TWO_EACH, [1.0, 2.0])
    # mu = 5/4, above 1 -> own mean 1/2; mu = 4/4 = 1, not above; mu = 3/4
    close(result.baseline, [0.5, 1.0, 0.75])
    assert result.baseline_fallbacks == 1
    sigma = math.sqrt(0.75 / 3) + 1e-6  # raw mean 3/4: (3 * 1/16 + 9/16) / 3
    close(result.advantages[0], [0.5 / sigma, -0.5 / sigma, 0.5 / sigma, 0.5 / sigma])


def test_fallback_uses_only_valid_own_rewards() -> None:
    result = compute([[1.0, NAN, 1.0, 0.0]], TWO_EACH, [1.0, 4.0])
    close(result.baseline, [1.0])  # (1 + 4) / 3 above 1 -> own mean 1 / 1


def test_fallback_without_own_rewards_is_the_plain_mean() -> None:
    result = compute([[NAN, NAN, 1.0, 0.0]], TWO_EACH, [1.0, 4.0])
    close(result.baseline, [0.5])  # 4 / 2 = 2 above 1 -> (1 + 0) / 2
    assert result.baseline_fallbacks == 1
    sigma = math.sqrt(0.5) + 1e-6  # ((1/2)^2 + (1/2)^2) / 1
    close(result.advantages, [[0.0, 0.0, 0.5 / sigma, -0.5 / sigma]])


@pytest.mark.parametrize("off", [{"baseline_guard": False}, {"reward_range_unit": False}])
def test_baseline_guard_off(off: dict[str, bool]) -> None:
    result = compute([[1.0, 0.0, 1.0, 1.0]], TWO_EACH, [1.0, 2.0], **off)
    close(result.baseline, [1.25])
    assert result.baseline_fallbacks == 0


def test_one_agent_gives_plain_group_advantages() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(16, 8, generator=generator, dtype=torch.float64)
    source, ratios = torch.zeros(8, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    hacpo = advantages(rewards, source, 0, ratios, capability_baseline=True)
    gspo = advantages(rewards, source, 0, ratios, capability_baseline=False)
    assert torch.equal(hacpo.advantages, gspo.advantages)
    assert hacpo.baseline_fallbacks == 0
    expected = (rewards - rewards.mean(dim=1, keepdim=True)) / (rewards.std(dim=1, keepdim=True) + 1e-6)
    torch.testing.assert_close(hacpo.advantages, expected, rtol=1e-12, atol=1e-12)


def test_the_learners_own_weight_is_one() -> None:
    with pytest.raises(AssertionError):
        compute([[1.0, 0.0, 1.0, 0.0]], TWO_EACH, [2.0, 1.0], learner=0)

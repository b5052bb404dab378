"""The window by length, and the warning about a window that shuts out what would teach."""

import math
from collections import Counter
from typing import Any

import pytest
import torch

from megatron_hacpo.algorithm.advantage import AdvantageResult
from megatron_hacpo.algorithm.minibatch import MiniBatch
from megatron_hacpo.bridge.trajectory import Contribution
from megatron_hacpo.config import AlgorithmConfig
from megatron_hacpo.learner.batch import LearnerMiniBatch, StepBatch
from megatron_hacpo.learner.loss import cross_window
from megatron_hacpo.learner.update import UpdateRecord
from megatron_hacpo.learner.window import STEPS, WindowWatch


def cross(m: int, ratios: list[float], advantages: list[float], length: int) -> tuple[Any, UpdateRecord]:
    minibatch = LearnerMiniBatch(
        place=MiniBatch(source=1, prompt_start=0, prompt_stop=4, m=m),
        rows=list(range(len(ratios))),
        sequences=[],
        counts=torch.full((len(ratios),), length),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        old_means=torch.zeros(len(ratios)),
        omega=1.0,
        nominal=len(ratios),
        own=None,
    )
    record = UpdateRecord(computed=True, applied=True, grad_norm=1.0, ratios=torch.tensor(ratios), tallies={})
    return minibatch, record


def look(watch: WindowWatch, ratios: list[float], advantages: list[float], length: int = 10) -> list[str]:
    """One step with two cross mini-batches, at m = 2 and 3."""
    pairs = [cross(m, ratios, advantages, length) for m in (2, 3)]
    nothing = AdvantageResult(
        advantages=torch.zeros(0),
        baseline=torch.zeros(0),
        equal_groups=0,
        baseline_fallbacks=0,
        too_few_valid=0,
    )
    batch = StepBatch([minibatch for minibatch, _ in pairs], {}, nothing, Counter(), 0, 0)
    pool = [
        Contribution(generation=0, step=1, agent=name, tokenizer="t", prompts="", trajectories=[])
        for name in "AB"
    ]
    return watch.look(batch, [record for _, record in pairs], pool, learner=0)


def algorithm(**changes: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**{"delta": 0.2, "delta_step": 0.025, **changes})


SHUT_OUT = [0.6, 0.6, 0.6, 0.9, 0.95, 0.95]
WRONG_INSIDE = [1.0, 1.0, 1.0, 1.0, -1.0, -1.0]


def test_warns_once_with_number_and_remedy() -> None:
    watch = WindowWatch(algorithm())
    for _ in range(STEPS - 1):
        assert look(watch, SHUT_OUT, WRONG_INSIDE) == []
    (line,) = look(watch, SHUT_OUT, WRONG_INSIDE)
    # 3 of the 4 rewarded ones are below 0.85 and 0.875; 2 mini-batches of 4 in 5 steps are 40
    assert line.startswith("75% of the 40 rewarded responses of B in the last 5 steps lie below")
    assert "median ratio 0.60" in line
    assert "10 tokens" in line
    # 1 - 0.6 + 3 * 0.025 = 0.475; 10 * -log(0.6) = 5.108 nats, of which m = 3 leaves 5/8: 8.17
    assert "algorithm.delta: 0.48 keeps" in line
    assert "algorithm.cross_window: per_sequence with algorithm.tau: 9" in line
    assert look(watch, SHUT_OUT, WRONG_INSIDE) == []


@pytest.mark.parametrize(
    "remedy", [{"delta": 0.48}, {"cross_window": "per_sequence", "tau": 9.0}], ids=["delta", "tau"]
)
def test_the_remedy_lets_them_in(remedy: dict[str, Any]) -> None:
    for m in (2, 3):
        lower, _ = cross_window(algorithm(**remedy), m, torch.tensor([10]))
        assert float(lower) <= 0.6


def test_no_warning_where_most_are_inside_or_few_are_rewarded_or_nothing_is_clipped() -> None:
    for changes, ratios, advantages in (
        ({"delta": 0.6}, SHUT_OUT, WRONG_INSIDE),
        ({}, SHUT_OUT, [-1.0] * 6),
        ({}, [0.6, 1.2, 1.3], [1.0] * 3),
        ({"cross_clip": "none"}, SHUT_OUT, WRONG_INSIDE),
        ({}, [math.nan] * 6, WRONG_INSIDE),
    ):
        watch = WindowWatch(algorithm(**changes))
        assert [look(watch, ratios, advantages) for _ in range(STEPS + 2)] == [[]] * (STEPS + 2)


def test_a_window_by_length_that_is_too_narrow_names_its_own_key() -> None:
    watch = WindowWatch(algorithm(cross_window="per_sequence", tau=2.0))
    for _ in range(STEPS - 1):
        look(watch, SHUT_OUT, WRONG_INSIDE)
    (line,) = look(watch, SHUT_OUT, WRONG_INSIDE)
    assert "algorithm.tau: 9" in line
    assert "algorithm.delta" not in line


def test_the_window_by_length_asks_the_same_of_every_length() -> None:
    """A whole response may be tau nats less likely, be it short or long; one bound for all asks far more of
    the long ones."""
    lengths = torch.tensor([8, 10, 1000])
    lower, upper = cross_window(algorithm(cross_window="per_sequence", tau=8.0), 0, lengths)
    torch.testing.assert_close(lower, torch.exp(torch.tensor([-1.0, -0.8, -0.008])))
    assert upper == 1.0
    torch.testing.assert_close(lower.log() * lengths, torch.full((3,), -8.0))

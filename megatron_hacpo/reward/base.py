"""Scoring responses with a verifier.

A verification function takes `(text, answer)`: the response's text without its final stop token, and the
prompt's ground truth. It returns a number (bool counts) inside the run's declared reward range, or None or
NaN when it can give no valid reward. It must depend on its two arguments alone.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import numpy as np

from megatron_hacpo.data.prompts import Prompt


@dataclass(frozen=True)
class Verifier:
    """A verification function and the name it was asked for by.

    needs_stop: a response that was cut at the token limit gets the lowest reward; `check` does not see it.
    """

    name: str
    check: Callable[[str, str], float | None]
    needs_stop: bool = False


@dataclass(frozen=True)
class RewardResult:
    """rewards: float64 [responses], NaN where there is no valid reward; `valid` + `invalid` = responses."""

    rewards: np.ndarray
    valid: int
    invalid: int


def score(
    prompts: Sequence[Prompt],
    texts: Sequence[str],
    finish_reasons: Sequence[str],
    verifier: Verifier,
    *,
    reward_range: tuple[float, float],
) -> RewardResult:
    """Rewards of `texts`, prompt-major: the same number of responses for every prompt, prompt 0's first.

    finish_reasons: "stop" or "length", one a text. reward_range: (lowest, highest) valid reward.
    Raises ValueError, naming prompt and value, when the verifier returns neither a number in the range nor
    None or NaN, or raises.
    """
    assert len(texts) == len(finish_reasons)
    assert len(texts) % len(prompts) == 0 if prompts else not texts
    rewards = np.full(len(texts), np.nan)
    group = len(texts) // max(1, len(prompts))
    for index, (text, reason) in enumerate(zip(texts, finish_reasons, strict=True)):
        rewards[index] = _score_one(prompts[index // group], text, reason, verifier, reward_range)
    invalid = int(np.isnan(rewards).sum())
    return RewardResult(rewards, valid=len(texts) - invalid, invalid=invalid)


def _score_one(
    prompt: Prompt, text: str, finish_reason: str, verifier: Verifier, reward_range: tuple[float, float]
) -> float:
    if verifier.needs_stop and finish_reason != "stop":
        return reward_range[0]
    try:
        value = verifier.check(text, prompt.answer)
    except Exception as error:
        raise ValueError(
            f"reward.verifier: {verifier.name} failed on prompt {prompt.id} ({error!r}); "
            "fix it, or let it return None"
        ) from error
    if value is None:
        return math.nan
    if not isinstance(value, Real | np.bool_):
        raise ValueError(f"verifier {verifier.name} on prompt {prompt.id}: returned {value!r}, not a number")
    reward = float(value)
    lowest, highest = reward_range
    if not math.isnan(reward) and not lowest <= reward <= highest:
        raise ValueError(
            f"verifier {verifier.name} on prompt {prompt.id}: returned {reward}, outside the declared "
            f"reward.range [{lowest}, {highest}]"
        )
    return reward

"""Rewards and the length of responses."""

from typing import Literal

import numpy as np

from megatron_hacpo.reward.base import Outcome

Truncated = Literal["keep", "zero", "mask"]


def of_truncated(policy: Truncated, *, needs_stop: bool, lowest: float) -> Outcome | None:
    """The outcome of a response that was cut at the token limit; None where the verifier is to say.

    policy: "mask" gives it no valid reward, "zero" the lowest one, "keep" what the verifier gives. A verifier
    that `needs_stop` gives the lowest reward.
    """
    if policy == "mask":
        return Outcome(None)
    return Outcome(lowest) if policy == "zero" or needs_stop else None


def less_overlong(
    rewards: np.ndarray, lengths: np.ndarray, *, limit: int, buffer: int, penalty: float, lowest: float
) -> np.ndarray:
    """Rewards without what responses lose that come near the limit (the soft overlong punishment of DAPO).

    rewards: float64 [responses], NaN stays. lengths: int [responses], tokens. limit: of one response. Up to
    limit - buffer nothing is taken away, at the limit the whole penalty, and in between linearly more. No
    reward falls below the lowest one, as capabilities are ratios of mean rewards. Returns float64
    [responses].
    """
    assert 0 < buffer <= limit
    over = np.clip((lengths - (limit - buffer)) / buffer, 0.0, 1.0)
    return np.maximum(rewards - penalty * over, lowest)

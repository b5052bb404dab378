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


def soft_length_penalty(lengths: np.ndarray, *, limit: int, buffer: int, penalty: float = 1.0) -> np.ndarray:
    """What to add to the rewards of long responses: 0, falling to -penalty over the last `buffer` tokens.

    lengths: int [responses], tokens. limit: of one response, in tokens. Up to limit - buffer nothing is taken
    away, from the limit on the whole penalty, and in between linearly more. Returns float64 [responses].
    Add it where rewards are shaped: capability is measured on rewards without it.
    """
    assert 0 < buffer <= limit
    assert penalty >= 0.0
    over = np.asarray(lengths, dtype=np.float64) - (limit - buffer)
    return -penalty * np.clip(over / buffer, 0.0, 1.0) + 0.0  # + 0.0: no negative zeros

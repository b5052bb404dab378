"""Importance ratios and the objectives, all to be maximised (eq. 11-14, 47-53).

Names as in the paper: s importance ratio, A advantage, omega(j, k) capability ratio of source j to learner k.
Advantages arrive in float64 and are cast to the ratio's dtype here. A response with A = 0 gives exactly 0 and
no gradient, whatever its ratio.
"""

import math

import torch
from torch import Tensor

from megatron_hacpo.algorithm.segments import drop_unassigned, segment_mean


def mean_log_prob(log_prob_sum: Tensor, count: Tensor) -> Tensor:
    """(1 / L) * sum of log pi: sums float32 [n] (or wider) and token counts int64 [n] to [n]; 0 where L = 0.

    Old and new means both come from here: the same sums then give the same bits, and a ratio of exactly 1.
    """
    assert log_prob_sum.dtype in (torch.float32, torch.float64)
    return log_prob_sum / count.clamp(min=1)


def importance_ratio(
    new_log_prob_sum: Tensor, new_count: Tensor, old_mean_log_prob: Tensor, log_clamp: float | None
) -> Tensor:
    """s = exp(mean new log-prob - mean old log-prob), each side over its OWN token count (eq. 11; v2 eq. 59).

    new_log_prob_sum: float32 [n], the learner's sums over its view. new_count: int64 [n], that view's tokens.
    old_mean_log_prob: [n], the source's mean over its own tokens: float32 (own) or float64 (exchanged).
    log_clamp: log s is clamped to +-log_clamp before exp; None switches that off.
    Returns float32 [n]; no gradient where the clamp binds.
    """
    new_mean = mean_log_prob(new_log_prob_sum, new_count)
    return _bounded_exp(new_mean - old_mean_log_prob.detach().to(new_mean.dtype), log_clamp)


def token_importance_ratio(
    token_log_probs: Tensor, old_token_log_probs: Tensor, log_clamp: float | None
) -> Tensor:
    """GRPO's ratio per token: exp(new - old), float32 [T]; `log_clamp` as in `importance_ratio`."""
    assert token_log_probs.dtype in (torch.float32, torch.float64)
    return _bounded_exp(token_log_probs - old_token_log_probs.detach().to(token_log_probs.dtype), log_clamp)


def clipped_surrogate(s: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(s * A, clip(s, 1 - low, 1 + high) * A): GSPO's objective of own responses, and Naive's of all.

    s: float32, advantage: float64, both [n] (or both [T]). Returns float32 of the same shape.
    """
    s, advantage = _matched(s, advantage)
    return torch.minimum(s * advantage, s.clamp(1.0 - low, 1.0 + high) * advantage)


def token_clipped_surrogate(
    token_log_probs: Tensor,
    old_token_log_probs: Tensor,
    segments: Tensor,
    advantage: Tensor,
    low: float,
    high: float,
    log_clamp: float | None,
    *,
    lengths: Tensor | None = None,
) -> Tensor:
    """GRPO's objective: ratio, clip and min per token, then the mean over each sequence's tokens.

    token_log_probs, old_token_log_probs: float32 [T], packed.
    segments: int64 [T], the sequence of each token, -1 for none (see `segments.py`).
    advantage: float64 [n]. lengths: int64 [n], as in `segment_mean`. Returns float32 [n].
    """
    segments, new, old = drop_unassigned(segments, token_log_probs, old_token_log_probs)
    ratio = token_importance_ratio(new, old, log_clamp)
    surrogate = clipped_surrogate(ratio, advantage[segments], low, high)
    return segment_mean(surrogate, segments, len(advantage), lengths=lengths)


def cross_objective(
    s: Tensor, advantage: Tensor, omega_jk: float, alpha: float, lower_bound: float | Tensor
) -> Tensor:
    """c * sg[c]^alpha * omega(j, k) * A with c = clip(s, lower_bound, 1): cross responses (eq. 12-14).

    s: float32 [n]. advantage: float64 [n]. lower_bound: one for all, or float32 [n].
    Returns float32 [n]. Outside the bounds c is constant and the response gives no gradient; the bounds
    themselves are inside.
    """
    s, advantage = _matched(s, advantage * omega_jk)
    lower = torch.as_tensor(lower_bound, dtype=s.dtype, device=s.device)
    c = s.clamp(lower, torch.ones_like(lower))
    return c * c.detach() ** alpha * advantage


def unclipped_cross_objective(s: Tensor, advantage: Tensor, omega_jk: float, alpha: float) -> Tensor:
    """The "no clip" ablation: s * sg[min(s, 1)]^alpha * omega(j, k) * A. Shapes as in `cross_objective`."""
    s, advantage = _matched(s, advantage * omega_jk)
    return s * s.detach().clamp(max=1.0) ** alpha * advantage


def _bounded_exp(log_ratio: Tensor, log_clamp: float | None) -> Tensor:
    if log_clamp is not None:
        return log_ratio.clamp(-log_clamp, log_clamp).exp()
    # exp's derivative at an overflow is inf, and 0 * inf would turn a clipped response's gradient into NaN.
    return log_ratio.clamp(max=math.log(torch.finfo(log_ratio.dtype).max) - 1.0).exp()


def _matched(s: Tensor, advantage: Tensor) -> tuple[Tensor, Tensor]:
    """The advantage in the ratio's dtype, and the ratio cut off where A = 0, since inf * 0 is NaN."""
    assert s.shape == advantage.shape
    advantage = advantage.to(s.dtype)
    return s.masked_fill(advantage == 0.0, 1.0), advantage

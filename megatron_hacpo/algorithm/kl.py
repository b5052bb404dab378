"""KL penalty to the frozen reference policy, own responses only (the low-variance estimator of verl)."""

import torch
from torch import Tensor

from megatron_hacpo.algorithm.segments import segment_mean

LOG_RATIO_CLAMP = 20.0
KL_CLAMP = 10.0


def low_var_kl(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """exp(d) - d - 1 clamped to +-10, with d = log pi_ref - log pi_theta clamped to +-20.

    Both float32 [T], at the same temperature. Returns float32 [T]; no gradient where a clamp binds.
    """
    assert log_probs.dtype in (torch.float32, torch.float64)
    d = (ref_log_probs.detach().to(log_probs.dtype) - log_probs).clamp(-LOG_RATIO_CLAMP, LOG_RATIO_CLAMP)
    return (d.expm1() - d).clamp(-KL_CLAMP, KL_CLAMP)


def sequence_kl(
    log_probs: Tensor, ref_log_probs: Tensor, segments: Tensor, count: int, *, lengths: Tensor | None = None
) -> Tensor:
    """Mean of `low_var_kl` over each sequence's tokens: packed float32 [T] to float32 [n].

    segments, count, lengths: as in `segments.segment_mean`. The mini-batch's KL is the sum of its own
    responses' values divided by its nominal number of sequences.
    """
    return segment_mean(low_var_kl(log_probs, ref_log_probs), segments, count, lengths=lengths)

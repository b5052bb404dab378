"""Drawing one token per row from logits."""

import torch

from megatron_hacpo.rollout.base import Sampling


def sample(
    logits: torch.Tensor, uniforms: torch.Tensor, sampling: Sampling
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row, by inverting the cumulative distribution at `uniforms`.

    logits: [rows, vocabulary], any float dtype. uniforms: float64 [rows] in [0, 1).
    Returns tokens int64 [rows] and their log-probs float32 [rows]: log_softmax(logits / temperature) before
    top-k and top-p. Both filters apply to the full distribution, as in SGLang: a token stays when it is among
    the `top_k` most probable ones and those before it hold less than `top_p`.
    """
    log_probs = torch.log_softmax(logits.float() / (sampling.temperature or 1.0), dim=-1)
    if sampling.temperature == 0.0:
        tokens = log_probs.argmax(dim=-1)
    elif sampling.top_k == 0 and sampling.top_p == 1.0:
        tokens = _invert(log_probs.exp(), uniforms)
    else:
        probs, order = log_probs.exp().sort(dim=-1, descending=True, stable=True)
        before = probs.cumsum(dim=-1, dtype=torch.float64) - probs
        keep = before < sampling.top_p
        if sampling.top_k:
            keep[:, sampling.top_k :] = False
        tokens = order.gather(1, _invert(probs * keep, uniforms)[:, None])[:, 0]
    return tokens, log_probs.gather(1, tokens[:, None])[:, 0]


def _invert(probs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first index whose cumulative sum exceeds uniform * total; never one of probability 0."""
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    target = (uniforms * cumulative[:, -1])[:, None]
    index = torch.searchsorted(cumulative, target, right=True)[:, 0]
    return index.clamp_(max=probs.shape[1] - 1)  # uniform * total can round up to total (once in 2^53)

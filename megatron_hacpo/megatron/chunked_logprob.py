"""Log-probs of response tokens from hidden states, without the logits of a whole micro-batch."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 512
"""Tokens whose logits exist at one time. Each chunk reads and writes the whole float32 weight gradient, so
small chunks cost time; large ones cost 4 bytes per token and vocabulary column."""


def chunked_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
    chunk_tokens: int = CHUNK_TOKENS,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log_softmax(hidden @ weight^T / temperature) at the targets, entropy or None), both float32 [r].

    hidden: [r, h], the final hidden states that predict the targets, all rows on every tensor-parallel rank.
    weight: [padded vocabulary / tensor-parallel size, h], this rank's rows of the output layer or of the tied
    embedding, in the dtype of `hidden`. targets: int64 [r], token ids of the whole vocabulary.
    Columns at or beyond `vocab_size` are padding and take no probability. The product is computed in the
    weight's dtype and the softmax in float32 (float64 for float64), as Megatron's output layer followed by
    `vocab_parallel_cross_entropy` does. The entropy is in nats and has no gradient.

    The gradient of `hidden` is this rank's PART: the sum over its own columns. Pass hidden states through
    `copy_to_tensor_model_parallel_region`, or through `gather_from_sequence_parallel_region` where they are
    split over the sequence; their backward sums the parts. The gradient of `weight` is summed over chunks in
    float32 and returned in the weight's dtype, what Megatron's DistributedDataParallel adds to `main_grad`
    without `gradient_accumulation_fusion`.

    Collectives over the tensor-parallel group, whatever the number of chunks: two in forward, none in
    backward, none at all for r = 0. Log-probs are bitwise the same with and without gradient or entropy, for
    the same chunks. Backward recomputes the logits: of this function's own, only [2, r] floats are saved.
    """
    assert chunk_tokens > 0
    return _ChunkedLogProbs.apply(
        hidden, weight, targets, temperature, vocab_size, chunk_tokens, with_entropy
    )


class _ChunkedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        vocab_size: int,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        local = [_local_sums(h, weight, t, temperature, vocab_size, with_entropy) for h, t in chunks]
        maximum, target, sum_exp, weighted = _over_ranks(torch.cat(local, dim=1))
        log_sum = sum_exp.log()
        ctx.save_for_backward(hidden, weight, targets, maximum, sum_exp)
        ctx.settings = temperature, vocab_size, chunk_tokens
        entropy = None
        if with_entropy:
            entropy = log_sum - weighted / sum_exp
            ctx.mark_non_differentiable(entropy)
        return target - maximum - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: torch.Tensor, _: torch.Tensor | None) -> tuple[Any, ...]:
        hidden, weight, targets, *statistics = ctx.saved_tensors
        temperature, vocab_size, chunk_tokens = ctx.settings
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=grad_log_probs.dtype)
        per_token = (hidden, grad_hidden, targets, *statistics, grad_log_probs / temperature)
        for h, grad_h, *chunk in zip(*(x.split(chunk_tokens) for x in per_token), strict=True):
            grad_logits = _grad_logits(h, weight, *chunk, temperature=temperature, vocab_size=vocab_size)
            torch.mm(grad_logits, weight, out=grad_h)
            if grad_logits.dtype == grad_weight.dtype:
                grad_weight.addmm_(grad_logits.t(), h)
            else:
                grad_weight.add_(grad_logits.t() @ h)
            del grad_logits  # or it would live on beside the next chunk's
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None, None


def _logits(hidden: torch.Tensor, weight: torch.Tensor, temperature: float, vocab_size: int) -> torch.Tensor:
    """This rank's columns of logits / temperature, float32 [n, v]; the padding at the lowest finite value."""
    logits = torch.mm(hidden, weight.t())
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature)
    first = parallel_state.get_tensor_model_parallel_rank() * len(weight)
    logits[:, max(vocab_size - first, 0) :] = torch.finfo(logits.dtype).min
    return logits


def _local_targets(targets: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(each target's column on this rank, 0 where it is another rank's; whether it is this rank's)."""
    column = targets - parallel_state.get_tensor_model_parallel_rank() * columns
    mine = (column >= 0) & (column < columns)
    return column * mine, mine


def _local_sums(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
    vocab_size: int,
    with_entropy: bool,
) -> torch.Tensor:
    """Over this rank's columns x of one chunk, float32 [4, n]: m = max x, the target's x or 0,
    sum exp(x - m), and for the entropy sum exp(x - m) (x - m), else 0."""
    logits = _logits(hidden, weight, temperature, vocab_size)
    column, mine = _local_targets(targets, len(weight))
    target = logits.gather(1, column[:, None])[:, 0] * mine
    maximum = logits.amax(dim=1)
    logits.sub_(maximum[:, None])
    if not with_entropy:
        return torch.stack([maximum, target, logits.exp_().sum(dim=1), torch.zeros_like(target)])
    exp = logits.exp()
    return torch.stack([maximum, target, exp.sum(dim=1), logits.mul_(exp).sum(dim=1)])


def _over_ranks(local: torch.Tensor) -> torch.Tensor:
    """The sums of `_local_sums` over the columns of all tensor-parallel ranks, float32 [4, r]."""
    if local.shape[1] == 0:
        return local
    group = parallel_state.get_tensor_model_parallel_group()
    local_maximum, target, sum_exp, weighted = local
    maximum = local_maximum.clone()
    dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
    gap = local_maximum - maximum
    sum_exp = sum_exp * gap.exp()  # before the gap multiplies it: a rank of padding alone has a huge gap
    sums = torch.stack([target, sum_exp, weighted * gap.exp() + sum_exp * gap])
    dist.all_reduce(sums, group=group)
    return torch.cat([maximum[None], sums])


def _grad_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    maximum: torch.Tensor,
    sum_exp: torch.Tensor,
    grad: torch.Tensor,
    *,
    temperature: float,
    vocab_size: int,
) -> torch.Tensor:
    """(one-hot target - softmax) grad of one chunk, [n, v] in the weight's dtype."""
    logits = _logits(hidden, weight, temperature, vocab_size)
    logits.sub_(maximum[:, None]).exp_().mul_((-grad / sum_exp)[:, None])
    column, mine = _local_targets(targets, len(weight))
    logits[torch.arange(len(column), device=column.device), column] += grad * mine
    return logits.to(weight.dtype)

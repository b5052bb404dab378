"""Log-probs of response tokens from a model's final hidden states, over all ranks that share them."""

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_hacpo.megatron.chunked_logprob import chunked_log_probs
from megatron_hacpo.megatron.model import HiddenStatesModel
from megatron_hacpo.megatron.packing import PackedMicroBatch


def response_log_probs(
    model: HiddenStatesModel,
    hidden: torch.Tensor,
    micro: PackedMicroBatch,
    *,
    temperature: float,
    vocab_size: int,
    with_entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(log_softmax(logits / temperature) of every response token, entropy there or None), both float32 [r],
    on every rank.

    hidden: what the model's last stage hands back, [t, 1, h], of this context-parallel rank's tokens; with
    sequence parallelism a tensor-parallel rank's part of them.
    """
    if model.config.sequence_parallel:
        hidden = gather_from_sequence_parallel_region(hidden)
    else:
        hidden = copy_to_tensor_model_parallel_region(hidden)
    predicting = hidden[:, 0].index_select(0, micro.predictors)
    own, entropy = chunked_log_probs(
        predicting,
        model.output_weight,
        micro.targets,
        temperature=temperature,
        vocab_size=vocab_size,
        with_entropy=with_entropy,
    )
    if parallel_state.get_context_parallel_world_size() == 1:
        return own, entropy
    count = len(micro.segments)
    return (
        _OverContext.apply(own, micro.owned, count),
        None if entropy is None else _OverContext.apply(entropy, micro.owned, count),
    )


class _OverContext(torch.autograd.Function):
    """The response tokens of all context-parallel ranks, in their order, on each of them.

    Every rank computes the same loss on them; its gradient goes to the tokens that the rank holds, and so
    enters the sum over context-parallel ranks once.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, owned: torch.Tensor, count: int) -> torch.Tensor:
        ctx.save_for_backward(owned)
        tokens = own.new_zeros(count).index_copy_(0, owned, own)
        dist.all_reduce(tokens, group=parallel_state.get_context_parallel_group())
        return tokens

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        (owned,) = ctx.saved_tensors
        return grad.index_select(0, owned), None, None

"""Log-probs of response tokens from vocabulary-parallel logits."""

import torch
from megatron.core import parallel_state, tensor_parallel

from megatron_hacpo.megatron.packing import PackedMicroBatch


def response_log_probs(
    logits: torch.Tensor, micro: PackedMicroBatch, *, temperature: float, vocab_size: int
) -> torch.Tensor:
    """log_softmax(logits / temperature) of every response token, float32 [r].

    logits: [1, t, padded vocabulary / tensor-parallel size], this rank's columns. The padding columns are
    masked, so they take no probability. Uses `megatron.core.tensor_parallel.vocab_parallel_cross_entropy`.
    """
    if len(micro.targets) == 0:
        return logits.sum(dtype=torch.float32)[None][:0]  # keeps the graph, so backward still runs
    chosen = logits[0].index_select(0, micro.predictors).float() / temperature
    columns = chosen.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * columns
    if first + columns > vocab_size:
        padding = torch.arange(first, first + columns, device=chosen.device) >= vocab_size
        chosen = chosen.masked_fill(padding, torch.finfo(torch.float32).min)
    losses = tensor_parallel.vocab_parallel_cross_entropy(chosen[:, None], micro.targets[:, None])
    return -losses[:, 0]

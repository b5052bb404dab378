"""States of the distributed optimizer, which data-parallel ranks have divided, in the shape of their weights.

Megatron's own `fully_reshardable` form places a weight's states by its offset in a buffer with padding, in a
buffer without: with tied embeddings in pipeline stages, which have a bucket of their own, it saves and loads
other weights' states. Here each weight is gathered by itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

PREFIX = "optimizer.state."

KEY = {"param": "fp32_param"}
"""Names of kinds of states as other optimizers have them; the others' are the same."""


def describe(
    optimizer: DistributedOptimizer, weights: dict[Any, Any], kinds: Sequence[str], *, loading: bool
) -> dict[int, dict[str, Any]]:
    """By number of the weight and kind of state: Megatron's sharded tensor, or what makes several of it.

    weights: Megatron's descriptions of the model's. kinds: of exp_avg, exp_avg_sq and param (main weights).
    loading: whether the data are to be filled and then `put`; else they are float32 copies of the states, in
    host memory, the same on all data-parallel ranks. A collective of those.
    """
    described = {id(entry.data): entry for entry in nested_values(weights)}
    found: dict[int, dict[str, Any]] = {}
    for number, (weight, place) in enumerate(_places(optimizer)):
        entry, found[number] = described[id(weight)], {}
        own = optimizer._get_main_param_and_optimizer_states(weight) if place is not None else {}
        for kind in kinds:
            if loading:
                data = torch.empty(weight.shape, dtype=torch.float32)
            else:
                whole = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
                if place is not None:
                    whole[place] = own[kind].float()
                dist.all_reduce(whole, group=optimizer.data_parallel_group)
                data = whole.view(weight.shape).cpu()
            key = f"{PREFIX}{KEY.get(kind, kind)}.{entry.key}"
            dtype = {} if isinstance(entry, ShardedTensorFactory) else {"dtype": data.dtype}
            found[number][kind] = replace(entry, key=key, data=data, **dtype)
    return found


def put(optimizer: DistributedOptimizer, described: dict[int, dict[str, Any]]) -> None:
    """Take this rank's part of the data that were filled."""
    for number, (weight, place) in enumerate(_places(optimizer)):
        if place is not None:
            states = optimizer._get_main_param_and_optimizer_states(weight)
            # Copies, as an offloading optimizer keeps what it gets and so would keep all that is around it.
            states |= {k: entry.data.flatten()[place].clone() for k, entry in described[number].items()}
            optimizer._set_main_param_and_optimizer_states(weight, states)
    if hasattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _places(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, slice | None]]:
    """The optimizer's weights in an order that all data-parallel ranks have, each with the part of its
    elements whose states are this rank's."""
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        own = {
            weight: slice(ranges["param"].start, ranges["param"].end)
            for buckets in by_dtype.values()
            for bucket in buckets
            for weight, ranges in bucket["param_map"].items()
        }
        for weight in buffer.param_index_map:
            yield weight, own.get(weight)

"""States of the distributed optimizer, which data-parallel ranks have divided, in the shape of their weights.

Megatron's own `fully_reshardable` form places a weight's states by its offset in a buffer with padding, in a
buffer without: with tied embeddings in pipeline stages, which have a bucket of their own, it saves and loads
other weights' states. Here each weight is gathered by itself, so that no rank ever holds all states of its
part of the model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

KEY = {"param": "fp32_param"}
"""Names of kinds of states as other optimizers have them; the others' are the same."""


@dataclass(frozen=True)
class DividedState:
    """One kind of states (exp_avg, exp_avg_sq or param, the main weights) of one weight.

    place: this rank's part of the elements, if it has one. entry: Megatron's sharded tensor, or what makes
    several of it, of a float32 tensor without memory (on the meta device).
    """

    optimizer: DistributedOptimizer
    weight: torch.nn.Parameter
    place: slice | None
    kind: str
    entry: Any

    def of(self, data: torch.Tensor) -> Any:
        """The entry of data in the weight's shape."""
        return replace(self.entry, data=data)

    def gather(self) -> torch.Tensor:
        """All of it, float32, on the weight's device. A collective of the data-parallel ranks."""
        whole = torch.zeros(self.weight.numel(), dtype=torch.float32, device=self.weight.device)
        if self.place is not None:
            own = self.optimizer._get_main_param_and_optimizer_states(self.weight)
            whole[self.place] = own[self.kind].float()
        dist.all_reduce(whole, group=self.optimizer.data_parallel_group)
        return whole.view(self.weight.shape)

    def put(self, whole: torch.Tensor) -> None:
        """Take this rank's part; after all states of an optimizer comes `finish`."""
        if self.place is not None:
            states = self.optimizer._get_main_param_and_optimizer_states(self.weight)
            # A copy, as an offloading optimizer keeps what it gets and so would keep all that is around it.
            states[self.kind] = whole.flatten()[self.place].clone()
            self.optimizer._set_main_param_and_optimizer_states(self.weight, states)


def describe(
    optimizer: DistributedOptimizer, weights: dict[Any, Any], kinds: Sequence[str]
) -> Iterator[DividedState]:
    """The optimizer's states in an order that all data-parallel ranks have.

    weights: Megatron's descriptions of the model's. kinds: of states.
    """
    described = {id(entry.data): entry for entry in nested_values(weights)}
    for weight, place in _places(optimizer):
        entry = described[id(weight)]
        data = torch.empty(weight.shape, dtype=torch.float32, device="meta")
        dtype = {} if isinstance(entry, ShardedTensorFactory) else {"dtype": data.dtype}
        for kind in kinds:
            key = f"optimizer.state.{KEY.get(kind, kind)}.{entry.key}"
            yield DividedState(optimizer, weight, place, kind, replace(entry, key=key, data=data, **dtype))


def finish(optimizer: DistributedOptimizer) -> None:
    """Let an offloading optimizer pass on what it was given."""
    if hasattr(optimizer.optimizer, "_sync_hdo_state_to_sub_optimizers"):
        optimizer.optimizer._sync_hdo_state_to_sub_optimizers()


def _places(optimizer: DistributedOptimizer) -> Iterator[tuple[torch.nn.Parameter, slice | None]]:
    """Each weight with the part of its elements whose states are this rank's."""
    for buffer, by_dtype in zip(optimizer.buffers, optimizer.gbuf_ranges, strict=True):
        own = {
            weight: slice(ranges["param"].start, ranges["param"].end)
            for buckets in by_dtype.values()
            for bucket in buckets
            for weight, ranges in bucket["param_map"].items()
        }
        for weight in buffer.param_index_map:
            yield weight, own.get(weight)

"""What training needs to go on: a policy's weights and optimizer states, on the disk and back, in any layout.

Megatron describes both as sharded tensors under names that do not depend on the layout.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.exchange_utils import determine_main_replica_uniform_distribution
from megatron.core.dist_checkpointing.mapping import apply_factories, is_main_replica
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    distribute_main_replicas_with_precomputed_distribution,
)
from megatron.core.dist_checkpointing.utils import extract_sharded_base
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from megatron_hacpo.megatron import divided_states
from megatron_hacpo.megatron.checkpoint import entries
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.megatron.torch_dist import Writing, check_files, load_tensors


class Snapshots:
    """Copies of tensors in host memory, in buffers that the next copies use again."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def take(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors' values now; valid until the next call."""
        if [(b.shape, b.dtype) for b in self._buffers] != [(t.shape, t.dtype) for t in tensors]:
            pinned = any(t.is_cuda for t in tensors)
            self._buffers = [
                torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=pinned) for t in tensors
            ]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if any(t.is_cuda for t in tensors):
            torch.cuda.synchronize()
        return self._buffers


class TrainingState:
    """Weights and optimizer states of this rank's parts of a model."""

    def __init__(self, modules: Sequence[GPTModel], optimizer: Any, world: World) -> None:
        """optimizer: Megatron's, of the modules' parameters."""
        self._modules = modules
        self._optimizers = list(getattr(optimizer, "chained_optimizers", [optimizer]))
        self._world = world
        # In float32 the optimizer's main weights are the model's.
        halves = next(modules[0].parameters()).dtype is not torch.float32
        self._kinds = ("exp_avg", "exp_avg_sq", *(["param"] if halves else []))
        self._divided = all(isinstance(o, DistributedOptimizer) for o in self._optimizers)
        self._snapshots = Snapshots()

    @torch.no_grad()
    def writing(self, folder: Path, updates: int, *, copy: bool) -> Writing:
        """What writes the state into `folder`, which is empty and seen by all ranks. A collective.

        updates: optimizer steps made so far; before the first there are no states, and weights are all.
        copy: of the state as it is now; else the tensors must not change until it is written.
        """
        shards = self.shards(updates)
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # What all data-parallel ranks have alike, each of them writes a part of.
        distribution = determine_main_replica_uniform_distribution(shards, group)
        distribute_main_replicas_with_precomputed_distribution(shards, group, distribution)
        mine = [shard for shard in shards if is_main_replica(shard.replica_id)]
        values = [shard.data.detach() for shard in mine]
        if copy:
            # Divided states were described by copies.
            own = divided_states.PREFIX if self._divided else "no key"
            live = [number for number, shard in enumerate(mine) if not shard.key.startswith(own)]
            taken = self._snapshots.take([values[number] for number in live])
            for number, value in zip(live, taken, strict=True):
                values[number] = value
        return Writing(mine, values.__getitem__, folder, self._world.host_group)

    def shards(self, updates: int) -> list[ShardedTensor]:
        """This rank's weights and (after the first of `updates`) optimizer states, as they are saved."""
        return _shards([self._weights(), *self._states(updates, loading=False)])

    @torch.no_grad()
    def load(self, folder: Path, updates: int) -> None:
        """Take on the state in `folder`, which was written after `updates`. A collective.

        Raises ValueError, naming the file, for a checkpoint that is damaged or holds more than tensors.
        """
        check_files(folder)
        for optimizer in self._optimizers if updates else []:
            _make_states(optimizer.optimizer)
        states = self._states(updates, loading=True)
        shards = _shards([self._weights(), *states])
        targets = [shard.data.detach() for shard in shards]
        loaded = load_tensors({str(number): shard for number, shard in enumerate(shards)}, folder)
        for number, target in enumerate(targets):
            value = loaded[str(number)]
            if value.data_ptr() != target.data_ptr():  # else it was read into its place
                target.copy_(value)
        if not updates:  # states are made by the first update; float32 weights are there already
            for optimizer in self._optimizers:
                optimizer.reload_model_params()
            return
        for optimizer, described in zip(self._optimizers, states, strict=True):
            if isinstance(optimizer, DistributedOptimizer):  # it described copies of its states
                divided_states.put(optimizer, described)
            _set_step(optimizer.optimizer, updates)

    def _weights(self) -> dict[int, Any]:
        return {number: entries(module) for number, module in enumerate(self._modules)}

    def _states(self, updates: int, *, loading: bool) -> list[Any]:
        """Megatron's description of each optimizer's states."""
        if not updates:
            return []
        weights = self._weights()
        return [
            divided_states.describe(optimizer, weights, self._kinds, loading=loading)
            if isinstance(optimizer, DistributedOptimizer)
            else optimizer.sharded_state_dict(weights)
            for optimizer in self._optimizers
        ]


def _shards(trees: list[Any]) -> list[ShardedTensor]:
    """All sharded tensors in Megatron's descriptions; their data are views of what was described."""
    sharded, _ = extract_sharded_base(dict(enumerate(trees)))
    apply_factories(sharded)
    shards = list(nested_values(sharded))
    assert all(isinstance(shard, ShardedTensor) and shard.flattened_range is None for shard in shards)
    return shards


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer that has made no step the states of one that has, by a step without any effect."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _set_step(optimizer: Any, step: int) -> None:
    """Adam's count of updates, which torch keeps per parameter and fused optimizers per group."""
    for inner in (optimizer, *getattr(optimizer, "sub_optimizers", ())):
        for state in inner.state.values():
            if "step" in state:
                state["step"].fill_(step)
        for group in inner.param_groups:
            if "step" in group:
                group["step"] = step

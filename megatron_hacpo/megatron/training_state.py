"""What training needs to go on: a policy's weights and optimizer states, on the disk and back, in any layout.

Megatron describes both as sharded tensors under names that do not depend on the layout.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
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

from megatron_hacpo.hf.write import by_bytes
from megatron_hacpo.megatron.checkpoint import entries
from megatron_hacpo.megatron.divided_states import DividedState, describe, finish
from megatron_hacpo.megatron.offload import HostMemory
from megatron_hacpo.megatron.optimizer import single_optimizers
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.megatron.torch_dist import Writing, check_files, load_tensors

LOAD_BYTES = 2**30
"""How much of the divided states is in host memory at once while they are loaded."""


class TrainingState:
    """Weights and optimizer states of this rank's parts of a model."""

    def __init__(self, modules: Sequence[GPTModel], optimizer: Any, world: World) -> None:
        """optimizer: Megatron's, of the modules' parameters."""
        self._modules = modules
        self._optimizers = single_optimizers(optimizer)
        self._world = world
        # In float32 the optimizer's main weights are the model's.
        halves = next(modules[0].parameters()).dtype is not torch.float32
        self._kinds = ("exp_avg", "exp_avg_sq", *(["param"] if halves else []))
        self._copies = HostMemory()

    @torch.no_grad()
    def writing(self, folder: Path, updates: int, *, copy: bool) -> Writing:
        """What writes the state into `folder`, which is empty and seen by all ranks. A collective.

        updates: optimizer steps made so far; before the first there are no states, and weights are all.
        copy: of the state as it is now; else the tensors must not change until it is written.
        """
        shards, divided = self._described(updates)
        shards += _shards([state.entry for state in divided])
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        # What all data-parallel ranks have alike, each of them writes a part of.
        distribution = determine_main_replica_uniform_distribution(shards, group)
        distribute_main_replicas_with_precomputed_distribution(shards, group, distribution)
        mine = [shard for shard in shards if is_main_replica(shard.replica_id)]
        held = [shard for shard in mine if copy or shard.data.is_meta]
        buffers = self._copies.take([shard.data.nbytes for shard in held])
        copies = {
            _place(shard): buffer.view(shard.data.dtype).view(shard.data.shape)
            for shard, buffer in zip(held, buffers, strict=True)
        }
        for shard in held:
            if not shard.data.is_meta:
                copies[_place(shard)].copy_(shard.data, non_blocking=True)
        for state in divided:  # one after the other in the memory of one
            for shard in _shards([state.of(state.gather())]):
                if _place(shard) in copies:
                    copies[_place(shard)].copy_(shard.data, non_blocking=True)
        if self._world.device.type == "cuda":
            torch.cuda.synchronize()
        values = [copies.get(_place(shard), shard.data).detach() for shard in mine]
        return Writing(mine, values.__getitem__, folder, self._world.host_group)

    @torch.no_grad()
    def load(self, folder: Path, updates: int) -> None:
        """Take on the state in `folder`, which was written after `updates`. A collective.

        Raises ValueError, naming the file, for a checkpoint that is damaged or holds more than tensors.
        """
        check_files(folder)
        for optimizer in self._optimizers if updates else []:
            _make_states(optimizer.optimizer)
        shards, divided = self._described(updates)
        _read(shards, folder)
        for part in self._parts(divided):
            data = [torch.empty_like(state.entry.data, device="cpu") for state in part]
            _read(_shards([state.of(whole) for state, whole in zip(part, data, strict=True)]), folder)
            for state, whole in zip(part, data, strict=True):
                state.put(whole)
        for optimizer in self._optimizers:
            if not updates:  # states are made by the first update; float32 weights are there already
                optimizer.reload_model_params()
                continue
            if isinstance(optimizer, DistributedOptimizer):
                finish(optimizer)
            _set_step(optimizer.optimizer, updates)

    def shards(self, updates: int) -> list[ShardedTensor]:
        """This rank's weights and, after the first of `updates`, the optimizer states that it has whole."""
        return self._described(updates)[0]

    def _described(self, updates: int) -> tuple[list[ShardedTensor], list[DividedState]]:
        """What this rank has whole, and what it has a part of."""
        weights = {number: entries(module) for number, module in enumerate(self._modules)}
        whole: list[Any] = [weights]
        divided: list[DividedState] = []
        for optimizer in self._optimizers if updates else []:
            if isinstance(optimizer, DistributedOptimizer):
                divided += describe(optimizer, weights, self._kinds)
            else:
                whole.append(optimizer.sharded_state_dict(weights))
        return _shards(whole), divided

    def _parts(self, states: Sequence[DividedState]) -> Iterator[list[DividedState]]:
        """The states part by part, as often on all ranks of the world, which read together."""
        named = ((str(number), state.entry.data) for number, state in enumerate(states))
        parts = [[states[int(name)] for name, _ in part] for part in by_bytes(named, LOAD_BYTES)]
        most = torch.tensor(len(parts))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._world.host_group)
        yield from (parts[number] if number < len(parts) else [] for number in range(int(most)))


def _shards(trees: list[Any]) -> list[ShardedTensor]:
    """All sharded tensors in Megatron's descriptions; their data are views of what was described."""
    sharded, _ = extract_sharded_base(dict(enumerate(trees)))
    apply_factories(sharded)
    shards = list(nested_values(sharded))
    assert all(isinstance(shard, ShardedTensor) and shard.flattened_range is None for shard in shards)
    return shards


def _place(shard: ShardedTensor) -> tuple[str, tuple[int, ...]]:
    """What distinguishes a shard from all others of a checkpoint."""
    return shard.key, shard.global_offset


def _read(shards: Sequence[ShardedTensor], folder: Path) -> None:
    """Fill the shards' data. A collective of the world."""
    targets = [shard.data.detach() for shard in shards]
    loaded = load_tensors({str(number): shard for number, shard in enumerate(shards)}, folder)
    for number, target in enumerate(targets):
        value = loaded[str(number)]
        if value.data_ptr() != target.data_ptr():  # else it was read into its place
            target.copy_(value)


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

"""The weights on their way out of a world: (Hugging Face name, full tensor), one parameter at a time."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_hacpo.megatron.conversion import Part, join, local_experts
from megatron_hacpo.megatron.runtime import World

Tensors = Iterator[tuple[str, torch.Tensor]]
"""(Hugging Face name, full tensor)."""


def hf_tensors(parts: Iterable[Part], config: Any) -> Tensors:
    """The parts of this pipeline stage as whole Hugging Face tensors, gathered over the stage's ranks.

    A collective of the tensor-parallel and expert-parallel groups: all their ranks get the same tensors, and
    no more than one parameter of the group is gathered at a time. The copy of a tied embedding is left out.
    """
    for part in parts:
        if part.is_copy:
            continue
        if part.weight.is_expert:
            shards = _gather(part.tensor, parallel_state.get_expert_model_parallel_group())
            for rank, shard in enumerate(shards):
                offset = rank - parallel_state.get_expert_model_parallel_rank()
                names = part.hf_names(part.expert + offset * local_experts(config))
                yield from zip(names, _joined([shard], part, config), strict=True)
        else:
            whole = part.weight.split == "whole"
            group = parallel_state.get_tensor_model_parallel_group()
            shards = [part.tensor.detach()] if whole else _gather(part.tensor, group)
            yield from zip(part.hf_names(), _joined(shards, part, config), strict=True)


def _joined(shards: list[torch.Tensor], part: Part, config: Any) -> list[torch.Tensor]:
    return [tensor.contiguous() for tensor in join(shards, part.weight.split, config)]


def _gather(shard: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    shard = shard.detach()
    if group.size() == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(group.size())]
    dist.all_gather(shards, shard.contiguous(), group=group)
    return shards


def to_leader(mine: Tensors, world: World) -> Tensors:
    """Every stage's tensors on the agent's leader, stage by stage; nothing elsewhere.

    mine: this stage's `hf_tensors`. A collective of the world: every rank must exhaust it. Stages other than
    the leader's send from their first rank, one tensor at a time.
    """
    if world.is_leader:
        yield from mine
        for stage in range(1, world.stages):
            while (received := _receive(world, world.first_of_stage(stage))) is not None:
                yield received
    elif world.sends:
        for name, tensor in mine:
            _send(world, name, tensor)
        _send(world, "", torch.empty(0))
    else:
        for _ in mine:
            pass


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADER_BYTES = 512


def _send(world: World, name: str, tensor: torch.Tensor) -> None:
    header = json.dumps([name, list(tensor.shape), _DTYPES.index(tensor.dtype)]).encode()
    padded = bytearray(header.ljust(_HEADER_BYTES))
    dist.send(torch.frombuffer(padded, dtype=torch.uint8), dst=0, group=world.host_group)
    if name:
        dist.send(tensor.cpu(), dst=0, group=world.host_group)


def _receive(world: World, source: int) -> tuple[str, torch.Tensor] | None:
    header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
    dist.recv(header, src=source, group=world.host_group)
    name, shape, dtype = json.loads(header.numpy().tobytes())
    if not name:
        return None
    tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    dist.recv(tensor, src=source, group=world.host_group)
    return name, tensor

"""One agent's world: the processes that train one model, and what they say to each other."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

WAIT = timedelta(days=7)
"""For gloo's collectives, which ranks wait in while one evaluates or generates. Who hangs or dies is found by
the launcher."""


@dataclass(frozen=True)
class Layout:
    """Sizes of an agent's parallel dimensions. The product of tensor, pipeline, context and data is its
    world size; expert groups lie within the ranks of a pipeline stage, with every expert whole on one rank.

    virtual_pipeline: parts of the model per pipeline stage. sequence: whether tensor-parallel ranks divide
    the activations between their matrices over the sequence.
    """

    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    context: int = 1
    data: int = 1
    expert: int = 1
    sequence: bool = True

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def divides_sequence(self) -> bool:
        """Whether sequence parallelism is on: it needs tensor parallelism."""
        return self.sequence and self.tensor > 1


@dataclass(frozen=True)
class World:
    """This process within its agent's world.

    rank, size: within the agent. device: where the model lives.
    host_group: a gloo group of the whole world, for bytes that live in host memory.
    """

    rank: int
    size: int
    device: torch.device
    layout: Layout
    host_group: dist.ProcessGroup

    @property
    def is_leader(self) -> bool:
        """Rank 0 talks for the agent: it generates, exchanges and writes."""
        return self.rank == 0

    @property
    def stages(self) -> int:
        """Pipeline stages; their ranks follow each other, stage by stage."""
        return self.layout.pipeline

    @property
    def stage(self) -> int:
        return self.rank // (self.size // self.stages)

    def first_of_stage(self, stage: int) -> int:
        """The rank that speaks for a pipeline stage: the first in all other dimensions."""
        return stage * (self.size // self.stages)

    @property
    def sends(self) -> bool:
        """Whether this rank speaks for its pipeline stage."""
        return self.rank == self.first_of_stage(self.stage)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(group=self.host_group)

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`, by default the leader, on every rank. Others pass None."""
        if self.size == 1:
            assert data is not None
            return data
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, src=source, group=self.host_group)
        if not length:
            return b""
        buffer = torch.empty(int(length), dtype=torch.uint8)
        if data is not None:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, src=source, group=self.host_group)
        return buffer.numpy().tobytes()

    def from_last_stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, overwritten in place by the last pipeline stage's (same shape and dtype everywhere)."""
        if self.layout.pipeline > 1:
            dist.broadcast(
                tensor,
                src=parallel_state.get_pipeline_model_parallel_last_rank(),
                group=parallel_state.get_pipeline_model_parallel_group(),
            )
        return tensor

    def sum_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place sum over the data-parallel ranks."""
        if self.layout.data > 1:
            dist.all_reduce(tensor, group=parallel_state.get_data_parallel_group())
        return tensor

    def max_over_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """In-place maximum over the data-parallel ranks."""
        if self.layout.data > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=parallel_state.get_data_parallel_group())
        return tensor

    def close(self) -> None:
        """Leave together: a rank that goes first aborts the others' connections."""
        self.barrier()
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def start(
    *,
    store: dist.Store,
    rank: int,
    layout: Layout,
    seed: int,
    timeout: timedelta,
    device: torch.device | None = None,
) -> World:
    """Join the agent's world over `store` and set up Megatron's parallel groups and random streams.

    timeout: of NCCL's collectives. device: where the model lives; by default this process's GPU, or the CPU
    where there is none.
    """
    device = device or _device()
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=layout.world_size,
        timeout=timeout if on_gpu else WAIT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
    )
    model_parallel_cuda_manual_seed(seed)
    host_group = dist.new_group(backend="gloo", timeout=WAIT) if on_gpu else dist.group.WORLD
    assert host_group is not None
    return World(rank, layout.world_size, device, layout, host_group)


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


@contextmanager
def alone(device: torch.device | None = None) -> Iterator[World]:
    """A world of this process alone, for tools that need Megatron but no ranks; `device` as in `start`."""
    world = start(
        store=dist.HashStore(),
        rank=0,
        layout=Layout(),
        seed=0,
        timeout=timedelta(minutes=1),
        device=device,
    )
    try:
        yield world
    finally:
        world.close()

"""A trainer's memory that somebody else needs for a while: copied to the host, or forgotten, and back."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Literal

import torch
from megatron.core.distributed import DistributedDataParallel

from megatron_hacpo.megatron.optimizer import single_optimizers

Offload = Literal["none", "optimizer", "all"]

_ALIGNMENT = 64
"""Bytes, so that a view of any dtype may begin there."""


class TrainerMemory:
    """What a trainer has on its device between two steps. Implements `rollout.sglang.turns.Trainer`."""

    def __init__(
        self,
        offload: Offload,
        parts: Sequence[DistributedDataParallel],
        optimizer: Any,
        device: torch.device,
    ) -> None:
        """offload: what is moved. parts, optimizer: of the model, Megatron's."""
        self._offload = offload
        self._parts = parts
        self._optimizer = optimizer
        self._device = device
        self._weight_copies, self._other_copies = HostCopies(), HostCopies()

    def offload_states(self) -> None:
        """Leave the device's memory to others, but for the weights: gradients and optimizer states, and what
        the allocator keeps."""
        if self._offload != "none":
            held = {weight.untyped_storage().data_ptr() for weight in self.weights()}
            states = [t for t in self.states() if t.untyped_storage().data_ptr() not in held]
            self._other_copies.offload(states)
            self._other_copies.offload(self.gradients(), keep=False)
        return_memory()

    def offload_weights(self) -> None:
        """With "all" leave the weights' memory, too."""
        if self._offload == "all":
            self._weight_copies.offload(self.weights())
        return_memory()

    def reload_weights(self) -> None:
        """Bring the weights back, and nothing else yet."""
        self._weight_copies.reload()

    def reload(self) -> None:
        """Bring everything back; gradients are 0."""
        self._weight_copies.reload()
        self._other_copies.reload()

    def weights(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from part.parameters()

    def states(self) -> Iterator[torch.Tensor]:
        """The optimizer's and its float32 weights, as far as they are on the device."""
        for single in single_optimizers(self._optimizer):
            inner = single.optimizer
            values = [v for state in inner.state.values() for v in state.values()]
            shown = [p for group in inner.param_groups for p in group["params"]]
            for tensor in [*values, *shown]:
                if isinstance(tensor, torch.Tensor) and tensor.device.type == self._device.type:
                    yield tensor

    def gradients(self) -> Iterator[torch.Tensor]:
        """Megatron's buffers."""
        for part in self._parts:
            for buffer in [*part.buffers, *part.expert_parallel_buffers]:
                yield buffer.grad_data


class HostMemory:
    """Host memory for copies, which the next copies use again; pinned next to a GPU.

    Pinned as one piece of ordinary memory: what torch pins itself has the size of a power of two.
    """

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """uint8 tensors of so many bytes; what is in them is valid until the next call."""
        ends = list(accumulate(-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes))
        total = ends[-1] if ends else 0
        if total > self._bytes.numel():
            self._free()
            self._bytes = torch.empty(total, dtype=torch.uint8)
            if torch.cuda.is_available():
                cuda = torch.cuda.cudart()
                torch.cuda.check_error(cuda.cudaHostRegister(self._bytes.data_ptr(), total, 0))
        starts = [0, *ends]
        return [self._bytes[start : start + size] for start, size in zip(starts, sizes, strict=False)]

    def _free(self) -> None:
        if torch.cuda.is_available() and self._bytes.numel():
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr()))
        self._bytes = torch.empty(0, dtype=torch.uint8)


class HostCopies:
    """Frees the storages of tensors and fills them again. Every view stays valid, and is not to be read
    meanwhile."""

    def __init__(self) -> None:
        self._memory = HostMemory()
        self._held: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def offload(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> None:
        """Those that are still here. keep: copy the bytes to host memory, once before `reload`; else they
        come back as zeros."""
        storages = {storage.data_ptr(): storage for storage in (t.untyped_storage() for t in tensors)}
        here = [storage for storage in storages.values() if storage.nbytes()]
        copies: list[torch.Tensor] | list[None] = [None] * len(here)
        if keep and here:
            assert all(copy is None for _, _, copy in self._held), "copies lie where new ones would"
            copies = self._memory.take([storage.nbytes() for storage in here])
            for storage, copy in zip(here, copies, strict=True):
                copy.copy_(_bytes(storage), non_blocking=True)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        for storage, kept in zip(here, copies, strict=True):
            self._held.append((storage, storage.nbytes(), kept))
            storage.resize_(0)

    def reload(self) -> None:
        """All as it was, at other addresses."""
        for storage, size, copy in self._held:
            storage.resize_(size)
            _bytes(storage).copy_(copy) if copy is not None else _bytes(storage).zero_()
        self._held.clear()


def return_memory() -> None:
    """Give the GPU what nobody uses of this process's memory, and what other processes have let go of."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

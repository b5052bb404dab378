"""Tensors whose memory somebody else needs for a while: copied to the host, or forgotten, and back."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

_ALIGNMENT = 64
"""Bytes, so that a view of any dtype may begin there."""


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

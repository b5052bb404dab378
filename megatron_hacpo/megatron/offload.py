"""Tensors whose memory somebody else needs for a while: copied to the host, or forgotten, and back."""

from collections.abc import Iterable

import torch


class HostCopies:
    """Frees the storages of tensors and fills them again. Every view stays valid, and is not to be read
    meanwhile."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.UntypedStorage, int, torch.Tensor | None]] = []

    def offload(self, tensors: Iterable[torch.Tensor], *, keep: bool = True) -> None:
        """keep: copy the bytes to host memory, pinned next to a GPU; else they come back as zeros."""
        seen: set[int] = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            size = storage.nbytes()
            if size == 0 or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            copy = None
            if keep:
                copy = torch.empty(size, dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
                copy.copy_(_bytes(storage))
            self._held.append((storage, size, copy))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _, _ in self._held:
            storage.resize_(0)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def reload(self) -> None:
        """All as it was, at other addresses."""
        for storage, size, copy in self._held:
            storage.resize_(size)
            _bytes(storage).copy_(copy) if copy is not None else _bytes(storage).zero_()
        self._held.clear()


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

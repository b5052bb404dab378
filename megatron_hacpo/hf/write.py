"""Writing folders that are complete or absent, and model folders shard by shard."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from megatron_hacpo.hf.read import CHECKPOINT_FILES, DTYPE_NAMES, INDEX, SINGLE

SHARD_BYTES = 5 * 10**9
"""Largest weight file, unless one tensor alone is larger; transformers' own default."""

_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".gguf",
    ".msgpack",
    ".h5",
    ".onnx",
    ".distcp",
)

Tensors = Iterable[tuple[str, torch.Tensor]]
"""(Hugging Face name, full tensor, which nothing changes until the last one is written)."""

PIECE_BYTES = 2**20
"""Of one write call. Given a whole tensor, the kernel looks for large free pages, which can take longer than
all the rest."""


@contextmanager
def complete_or_absent(target: Path, *, replace: bool) -> Iterator[Path]:
    """An empty folder beside `target`, which becomes `target` when the block ends without an error.

    replace: whether it takes the place of a folder that is `target` by then. Whatever ends the block early,
    nothing half-written stands under the target's name; what a killed process left beside is removed by the
    next one. Raises ValueError while another process writes the same target, OSError if the target is there
    and not to be replaced.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.with_name(f".{target.name}.partial")
    beside.mkdir(exist_ok=True)
    descriptor = os.open(beside, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{target}: another process is writing it; wait for that one") from None
        try:
            _empty(beside)
            yield beside
            if replace and target.exists():
                shutil.rmtree(target)
            beside.replace(target)
        except BaseException as error:
            shutil.rmtree(beside, ignore_errors=True)
            # Without a name a full disk is told, when a file that is open gets too long.
            if isinstance(error, OSError) and error.errno is not None:
                file = Path(error.filename) if error.filename is not None else beside
                if file.is_relative_to(beside):
                    raise OSError(error.errno, error.strerror, str(target)) from error
            raise
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def require_space(target: Path, size: int) -> None:
    """ValueError unless `size` bytes fit on the target's disk."""
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    free = shutil.disk_usage(parent).free
    if free < size:
        raise ValueError(f"{target}: needs {size:,} bytes and its disk has {free:,} free; make room there")


def copy_companions(source: Path, target: Path) -> None:
    """Copy what makes a model folder usable, and every other file of it, but for weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS) and file.name not in CHECKPOINT_FILES:
            shutil.copy2(file, target / file.name)


def write_hf_folder(
    source: Path,
    tensors: Tensors,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    replace: bool = True,
) -> None:
    """`target` becomes `source` with other weights: configuration, tokenizer and templates are copied.

    dtype: of the weights, also told in config.json; None keeps the tensors' own. At most one shard is held in
    memory. Complete or absent, and `replace`, as `complete_or_absent` says.
    """
    with complete_or_absent(target, replace=replace) as beside:
        copy_companions(source, beside)
        if dtype is not None:
            _tell_dtype(beside / "config.json", dtype)
        write_weights(tensors, beside, dtype=dtype, shard_bytes=shard_bytes)


def write_weights(
    tensors: Tensors, folder: Path, *, dtype: torch.dtype | None = None, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write `model.safetensors`, or numbered shards with their index, and sync them to the disk."""
    shards: list[Path] = []
    weight_map: dict[str, int] = {}
    total = 0
    for shard in by_bytes(_on_host(tensors, dtype), shard_bytes):
        path = folder / f"shard-{len(shards)}"
        _write_file(shard, path)
        weight_map |= {name: len(shards) for name, _ in shard}
        total += sum(tensor.nbytes for _, tensor in shard)
        shards.append(path)
        del shard  # before the next one is collected
    count = len(shards)
    names = [SINGLE] if count == 1 else [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
    for path, name in zip(shards, names, strict=True):
        path.rename(folder / name)
    if count > 1:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: names[shard] for name, shard in sorted(weight_map.items())},
        }
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def by_bytes(tensors: Tensors, limit: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """The stream in lists of at most `limit` bytes; a larger tensor is alone."""
    bucket: list[tuple[str, torch.Tensor]] = []
    held = 0
    for name, tensor in tensors:
        if bucket and held + tensor.nbytes > limit:
            yield bucket
            bucket, held = [], 0
        bucket.append((name, tensor))
        held += tensor.nbytes
    if bucket:
        yield bucket


def _on_host(tensors: Tensors, dtype: torch.dtype | None) -> Tensors:
    return ((name, t.detach().to("cpu", dtype or t.dtype)) for name, t in tensors)


def _write_file(tensors: list[tuple[str, torch.Tensor]], path: Path) -> None:
    """A safetensors file, on the disk when this returns.

    The format: eight bytes with the header's length, the header as JSON, the data. The longest dtype comes
    first, as in safetensors' own writer, so that every tensor starts at a multiple of its element's size.
    """
    names = {getattr(torch, name): code for code, name in DTYPE_NAMES.items()}
    ordered = sorted(tensors, key=lambda item: -item[1].dtype.itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": names[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in ordered:
            data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
            for start in range(0, len(data), PIECE_BYTES):
                file.write(data[start : start + PIECE_BYTES])
        file.flush()
        os.fsync(file.fileno())


def _tell_dtype(config: Path, dtype: torch.dtype) -> None:
    fields = json.loads(config.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in fields else "dtype"  # transformers 4 and 5
    fields[key] = str(dtype).removeprefix("torch.")
    config.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")

"""Hugging Face folder to Megatron checkpoint and back, one parameter in memory at a time, in one process."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron_hacpo.hf.families import divided_sizes, expert_count, tensor_shapes
from megatron_hacpo.hf.read import CHECKPOINT_FILES, HFWeights, is_checkpoint, read_config
from megatron_hacpo.hf.write import (
    SHARD_BYTES,
    complete_or_absent,
    copy_companions,
    require_space,
    write_hf_folder,
)
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import read_checkpoint, stored_dtype, write_checkpoint
from megatron_hacpo.megatron.conversion import Part, parts, read_part
from megatron_hacpo.megatron.model import build_without_weights, hf_config
from megatron_hacpo.megatron.runtime import Layout
from megatron_hacpo.megatron.stream import Tensors, hf_tensors

_CPU = torch.device("cpu")

Progress = Callable[[int], None]
"""Told how many bytes more are done."""


def check_layout(config: Any, layout: Layout) -> None:
    """ValueError, naming the two numbers, if the model cannot be divided as `layout` says."""
    options = {"tensor": "--tp", "pipeline": "--pp", "expert": "--ep"}
    for axis, option in options.items():
        if getattr(layout, axis) < 1:
            raise ValueError(f"{option}: {getattr(layout, axis)}: must be at least 1; raise it")
    if layout.expert > 1 and not expert_count(config):
        raise ValueError(f"--ep: {layout.expert}: a {config.model_type} model has no experts; leave it out")
    for axis, sizes in divided_sizes(config).items():
        size = getattr(layout, axis)
        for name, value in sizes.items():
            if value % size:
                raise ValueError(f"{options[axis]}: {size}: does not divide {name} = {value}; use a divisor")


def hf_to_megatron(
    source: Path,
    target: Path,
    *,
    layout: Layout,
    dtype: torch.dtype | None = None,
    progress: Progress = lambda done: None,
) -> None:
    """Write the checkpoint `target`, with the folder's configuration and tokenizer in it.

    layout: what the vocabulary is padded for, and checked against; any layout loads what is written.
    dtype: of the weights; None keeps the folder's own. Raises ValueError for a folder that is not what its
    config.json says, a layout that does not divide it, a target that exists and a disk that is too small.
    """
    weights = open_folder(source)
    config = hf_config(source)
    check_layout(config, layout)
    shapes = tensor_shapes(config)
    dtype = dtype or _stored_dtype(weights, shapes)
    _check_target(target)
    require_space(target, sum(_bytes(shape, dtype) for shape in shapes.values()))
    with runtime.alone(_CPU), complete_or_absent(target, replace=False) as beside:
        model = build_without_weights(config, dtype=dtype, layout=layout)
        by_name = {part.name: part for part in parts([model], config)}

        def value(name: str) -> torch.Tensor:
            tensor = read_part(by_name[name], weights, config, tp=1, rank=0)
            progress(tensor.nbytes)
            return tensor

        write_checkpoint(model, value, beside)
        copy_companions(source, beside)


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    like: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done: None,
) -> None:
    """Write the Hugging Face folder `target` from the checkpoint `source`.

    like: the folder with the model's config.json and tokenizer, if it is not `source` itself. dtype: of the
    weights; None keeps the checkpoint's own. Raises ValueError as `hf_to_megatron` does.
    """
    _check_checkpoint(source)
    if like is None and not (source / "config.json").is_file():
        raise ValueError(f"{source}: has no config.json; name the folder that has it with --like")
    _check_target(target)
    with runtime.alone(_CPU):
        tensors, size = checkpoint_tensors(source, like or source, dtype=dtype)
        require_space(target, size)
        write_hf_folder(
            like or source,
            _told(tensors, progress),
            target,
            dtype=dtype,
            shard_bytes=shard_bytes,
            replace=False,
        )


def checkpoint_tensors(source: Path, like: Path, *, dtype: torch.dtype | None = None) -> tuple[Tensors, int]:
    """The Hugging Face tensors of a checkpoint, read as they are asked for, and their size in bytes."""
    _check_checkpoint(source)
    try:
        read_config(like)
    except ValueError as error:
        raise ValueError(f"{like}: {error}") from None
    config = hf_config(like)
    model = build_without_weights(config, dtype=dtype or stored_dtype(source), layout=Layout())

    def filled() -> Iterator[Part]:
        for part, (name, value) in zip(parts([model], config), read_checkpoint(model, source), strict=True):
            assert part.name == name
            yield replace(part, tensor=value)

    size = sum(part.tensor.nbytes for part in parts([model], config))
    return hf_tensors(filled(), config), size


def open_folder(folder: Path) -> HFWeights:
    """A Hugging Face folder that was looked over; ValueError, naming it, if something is wrong with it."""
    if is_checkpoint(folder):
        raise ValueError(f"{folder}: is a Megatron checkpoint; turn it back with `hacpo convert to-hf`")
    try:
        config = read_config(folder)
        weights = HFWeights(folder)
        weights.check(config)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    return weights


def _told(tensors: Tensors, progress: Progress) -> Tensors:
    for name, tensor in tensors:
        yield name, tensor
        progress(tensor.nbytes)


def _check_checkpoint(folder: Path) -> None:
    missing = [name for name in CHECKPOINT_FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(
            f"{folder}: has no {missing[0]}, so is not a Megatron checkpoint; "
            "`hacpo convert to-megatron` makes one of a Hugging Face folder"
        )


def _stored_dtype(weights: HFWeights, names: Iterable[str]) -> torch.dtype:
    dtypes = {weights.stored[name].dtype: name for name in names}
    if len(dtypes) > 1:
        (one, a), (other, b) = list(dtypes.items())[:2]
        raise ValueError(f"{weights.folder}: {a} is {one} and {b} is {other}; say which with --dtype")
    return getattr(torch, next(iter(dtypes)))


def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return torch.Size(shape).numel() * dtype.itemsize


def _check_target(target: Path) -> None:
    if os.path.lexists(target):
        raise ValueError(f"{target}: exists already; choose another name or remove it")
    parent = next(folder for folder in target.absolute().parents if folder.exists())
    if not parent.is_dir():
        raise ValueError(f"{target}: {parent} is a file; choose another name")

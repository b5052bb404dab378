"""Megatron distributed checkpoints of a model's weights: written and read parameter by parameter."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensorFactory
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_hacpo.hf.families import EMBEDDING
from megatron_hacpo.hf.write import by_bytes
from megatron_hacpo.megatron.torch_dist import Writing, check_files, load_tensors

BUCKET_BYTES = 2**28
"""How much of a checkpoint is read at once."""


def load_checkpoint(models: Sequence[GPTModel], folder: Path) -> None:
    """Fill this rank's parameters from a checkpoint of any layout. A collective of the world."""
    check_files(folder)
    for model in models:
        loaded = load_tensors(entries(model), folder)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(loaded[name])


def entries(model: GPTModel) -> dict[str, Any]:
    """Megatron's description of the parameters, by name; without the objects that it keeps for fp8."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found = model.sharded_state_dict(metadata=groups)
    return {name: entry for name, entry in found.items() if not isinstance(entry, ShardedObject)}


@dataclass(frozen=True)
class _Piece:
    """What the checkpoint holds as one chunk: a view of a parameter."""

    name: str
    sharded: ShardedTensor

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The same view of a parameter with values; `sharded.data` is one of a parameter without."""
        shape = self.sharded.data
        return parameter.contiguous().as_strided(shape.shape, shape.stride(), shape.storage_offset())


def _pieces(model: GPTModel) -> Iterator[_Piece]:
    for name, entry in entries(model).items():
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for sharded in built.values() if isinstance(built, dict) else built:
            yield _Piece(name, sharded)


def write_checkpoint(model: GPTModel, value: Callable[[str], torch.Tensor], folder: Path) -> None:
    """Write the checkpoint of a model on the meta device, of one rank, into an empty folder.

    value: a parameter's value by its name; called once for each, in the model's order.
    """
    pieces = list(_pieces(model))
    writing = Writing([piece.sharded for piece in pieces], _Values(pieces, value), folder)
    writing.write()
    writing.collect()
    writing.describe()


class _Values:
    """The pieces' values, of one parameter at a time."""

    def __init__(self, pieces: Sequence[_Piece], value: Callable[[str], torch.Tensor]) -> None:
        self._pieces = pieces
        self._value = value
        self._held: tuple[str, torch.Tensor] | None = None
        self._buffers: dict[torch.Size, torch.Tensor] = {}

    def __call__(self, number: int) -> torch.Tensor:
        piece = self._pieces[number]
        if self._held is None or self._held[0] != piece.name:
            self._held = (piece.name, self._value(piece.name).to(piece.sharded.dtype))
        view = piece.view(self._held[1])
        # The writer refers to what it has written until the end, and through a view to a whole mapped file.
        # So it gets copies, which may share their memory: each is written before the next is asked for.
        return self._buffers.setdefault(view.shape, torch.empty_like(view)).copy_(view)


def stored_dtype(folder: Path) -> torch.dtype:
    """Of a checkpoint's embedding, which stands for all its weights."""
    check_files(folder)
    stored = load_tensors_metadata(str(folder)).get(EMBEDDING.megatron)
    if stored is None:
        raise ValueError(f"{folder}: has no {EMBEDDING.megatron}; give the checkpoint of a GPT model")
    return stored.dtype


def read_checkpoint(
    model: GPTModel, folder: Path, *, bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """The (name, value) of every parameter of a model on the meta device, of one rank, in the model's order.

    bucket_bytes: how much is read at once (at least one parameter). Raises ValueError if the checkpoint lacks
    a parameter, holds it in another shape or cannot be read.
    """
    check_files(folder)
    pieces: dict[str, list[_Piece]] = defaultdict(list)
    stored = load_tensors_metadata(str(folder))
    for piece in _pieces(model):
        _check_stored(piece.sharded, stored.get(piece.sharded.key), folder)
        pieces[piece.name].append(piece)
    for bucket in by_bytes(model.named_parameters(), bucket_bytes):
        values = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in bucket}
        wanted = {
            f"{name} {number}": _of_some_layers(piece.sharded, piece.view(value))
            for name, value in values.items()
            for number, piece in enumerate(pieces[name])
        }
        try:
            load_tensors(wanted, folder)
        except Exception as error:  # a damaged tensor may raise any
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(
                f"{folder}: {bucket[0][0]} or a tensor after it cannot be read ({reason}); fetch it again"
            ) from error
        yield from values.items()


def _of_some_layers(sharded: ShardedTensor, data: torch.Tensor) -> ShardedTensor:
    """The entry with its axis of layers as an ordinary one: of a prepended axis, which is stored as one
    tensor of all layers, Megatron can load no part in a world of one rank."""
    ones = (1,) * sharded.prepend_axis_num
    shape = (*ones, *sharded.local_shape)
    return replace(sharded, data=data.view(shape), local_shape=shape, prepend_axis_num=0)


def _check_stored(wanted: ShardedTensor, stored: ShardedTensor | None, folder: Path) -> None:
    """The checkpoint's vocabulary may be padded, and so longer than the model's."""
    shape, found = tuple(wanted.global_shape), None if stored is None else tuple(stored.global_shape)
    padded = wanted.allow_shape_mismatch and found is not None and found[0] >= shape[0]
    if found != shape and not (padded and found is not None and found[1:] == shape[1:]):
        raise ValueError(
            f"{folder}: {wanted.key} is {'absent' if found is None else list(found)}, config.json asks for "
            f"{list(shape)}; use the config.json that belongs to the weights"
        )

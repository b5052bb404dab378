"""Megatron distributed checkpoints of a model's weights: written and read parameter by parameter.

The format is megatron.core.dist_checkpointing's `torch_dist`, on which any layout loads. Its own writer wants
the whole model in memory; torch's, which it builds on, asks for one tensor after another, and so can be fed
from a Hugging Face folder.
"""

import pickle
import re
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor, load_tensors_metadata
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import (
    ShardedObject,
    ShardedTensorFactory,
    apply_factory_merges,
)
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.models.gpt.gpt_model import GPTModel
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megatron_hacpo.hf.families import EMBEDDING
from megatron_hacpo.hf.read import CHECKPOINT_FILES, read_json
from megatron_hacpo.hf.write import by_bytes

BUCKET_BYTES = 2**28
"""How much of a checkpoint is read at once."""

_METADATA, _CONFIG = CHECKPOINT_FILES
_FORMAT = ("torch_dist", 1)


@contextmanager
def _bare_errors() -> Iterator[None]:
    """What torch's checkpointing raises, KeyboardInterrupt too, without its wrapping; and no warnings about
    how Megatron calls it."""
    try:
        with warnings.catch_warnings():
            for kind in (FutureWarning, UserWarning):
                warnings.simplefilter("ignore", kind)
            yield
    except CheckpointException as error:
        cause, _ = next(iter(error.failures.values()))
        raise cause from None


def load_checkpoint(models: Sequence[GPTModel], folder: Path) -> None:
    """Fill this rank's parameters from a checkpoint of any layout. A collective of the world."""
    check_files(folder)
    for model in models:
        loaded = _load_tensors(_entries(model), folder)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(loaded[name])


def _load_tensors(entries: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """`dist_checkpointing.load` without what the checkpoint keeps beside its tensors, which 0.16 wants in
    common.pt and 0.19 unpickles from wherever it is."""
    sharded, _, factories = load_preprocess(entries)
    with _bare_errors():
        loaded = TorchDistLoadShardedStrategy().load(sharded, folder)
    return apply_factory_merges(loaded, factories)


def _entries(model: GPTModel) -> dict[str, Any]:
    """Megatron's description of the parameters, by name; without the objects that it keeps for fp8."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    entries = model.sharded_state_dict(metadata=groups)
    return {name: entry for name, entry in entries.items() if not isinstance(entry, ShardedObject)}


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
    for name, entry in _entries(model).items():
        built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
        for sharded in built.values() if isinstance(built, dict) else built:
            yield _Piece(name, sharded)


def write_checkpoint(model: GPTModel, value: Callable[[str], torch.Tensor], folder: Path) -> None:
    """Write the checkpoint of a model on the meta device, of one rank, into an empty folder.

    value: a parameter's value by its name; called once for each, in the model's order.
    """
    planner = _LazyPlanner(list(_pieces(model)), value)
    # With nothing copied ahead, tensors are asked for in order and written at once, with or without a GPU.
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, thread_count=1, per_thread_copy_ahead=0)
    with _bare_errors():
        dcp.save({}, storage_writer=writer, planner=planner)
    torch.save({}, folder / "common.pt")  # not for us: Megatron before 0.19 has no checkpoint without it
    save_config(CheckpointingConfig(*_FORMAT), str(folder))


class _LazyPlanner(SavePlanner):
    """Tells torch's writer what to write, and gives it each tensor when its turn comes."""

    def __init__(self, pieces: list[_Piece], value: Callable[[str], torch.Tensor]) -> None:
        self._pieces = pieces
        self._value = value
        self._held: tuple[str, torch.Tensor] | None = None
        self._buffers: dict[torch.Size, torch.Tensor] = {}
        self._by_index = {self._index(piece.sharded): piece for piece in pieces}
        assert len(self._by_index) == len(pieces)

    @staticmethod
    def _index(sharded: ShardedTensor) -> MetadataIndex:
        return MetadataIndex(sharded.key, torch.Size(sharded.global_offset))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the pieces are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(piece.sharded) for piece in self._pieces])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def _item(self, sharded: ShardedTensor) -> WriteItem:
        shape = (1,) * sharded.prepend_axis_num + tuple(sharded.local_shape)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(sharded.global_offset), torch.Size(shape)),
            properties=TensorProperties(dtype=sharded.dtype),
            size=torch.Size(sharded.global_shape),
        )
        return WriteItem(self._index(sharded), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        index = MetadataIndex(write_item.index.fqn, write_item.index.offset)
        piece = self._by_index[index]
        if self._held is None or self._held[0] != piece.name:
            self._held = (piece.name, self._value(piece.name).to(piece.sharded.dtype))
        view = piece.view(self._held[1])[(None,) * piece.sharded.prepend_axis_num]
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
            _load_tensors(wanted, folder)
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


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_METADATA_CLASSES = (
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
    "_MEM_FORMAT_ENCODING",
)
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_PLANNER_CLASSES = ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType")  # of Megatron's own writer
_SAFE = {
    *((_METADATA_MODULE, name) for name in _METADATA_CLASSES),
    *((_PLANNER_MODULE, name) for name in _PLANNER_CLASSES),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch._C", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""Everything that a checkpoint of weights alone refers to, as (module, name)."""


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _SAFE:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")  # as torch's own says it
        return super().find_class(module, name)


def check_files(folder: Path) -> None:
    """ValueError if loading the checkpoint would run code of its author's, or a file of it is not whole.

    The metadata is a pickle, which Megatron loads without looking.
    """
    try:
        config = read_json(folder / _CONFIG)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    found = config.get("sharded_backend"), config.get("sharded_backend_version")
    if found != _FORMAT:
        raise ValueError(
            f"{folder}: {_CONFIG}: the format is {found[0]!r} {found[1]!r}; save it again as torch_dist 1"
        )
    stored = getattr(_load_metadata(folder), "storage_data", None)
    if not isinstance(stored, dict):
        raise ValueError(f"{folder}: {_METADATA} is damaged; fetch it again")
    for index, place in stored.items():
        file, end = folder / place.relative_path, place.offset + place.length
        size = file.stat().st_size if file.is_file() else 0
        if end > size:
            raise ValueError(
                f"{folder}: {place.relative_path} is {'cut off' if size else 'absent or empty'}: "
                f"{index.fqn} ends at byte {end:,} and the file at {size:,}; fetch it again"
            )


def _load_metadata(folder: Path) -> Any:
    with (folder / _METADATA).open("rb") as file:
        try:
            return _Unpickler(file).load()
        except Exception as error:  # a damaged one may raise any
            code = re.search(r"GLOBAL (\S+)", str(error))
            wrong = (
                f"holds more than data ({code[1]}); do not load it" if code else "is damaged; fetch it again"
            )
            raise ValueError(f"{folder}: {_METADATA} {wrong}") from None

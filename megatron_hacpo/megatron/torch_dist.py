"""Files in the format `torch_dist` of megatron.core.dist_checkpointing, on which any layout loads.

Megatron's own writer wants everything in memory and forks processes; torch's, which it builds on, asks for
one tensor after another, can be fed from anywhere and runs in a thread. Megatron's own reader unpickles what
it finds beside the tensors; here nothing is read but tensors and their metadata.
"""

import io
import os
import pickle
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult

from megatron_hacpo.hf.read import CHECKPOINT_FILES, read_json
from megatron_hacpo.hf.write import PIECE_BYTES

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


@contextmanager
def _file_errors() -> Iterator[None]:
    """The file system's errors themselves: after one, torch's zip writer raises a RuntimeError in its place,
    about the file's end that it cannot write either."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def load_tensors(entries: dict[str, Any], folder: Path) -> dict[str, torch.Tensor]:
    """`dist_checkpointing.load` without what the checkpoint keeps beside its tensors, which 0.16 wants in
    common.pt and 0.19 unpickles from wherever it is."""
    sharded, _, factories = load_preprocess(entries)
    with _bare_errors():
        loaded = TorchDistLoadShardedStrategy().load(sharded, folder)
    return apply_factory_merges(loaded, factories)


class Writing:
    """A checkpoint on its way to the disk.

    To make it is a collective of `group`, which plans; `write`, of each rank, is none and may run in a
    thread; `collect` is one again, after which the first rank alone says what is where.
    """

    def __init__(
        self,
        shards: Sequence[ShardedTensor],
        data: Callable[[int], torch.Tensor],
        folder: Path,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """shards: what this rank writes. data: the values of `shards[i]`, in its local shape; called once for
        each, in order. folder: empty, the same on all ranks. group: of host memory; None is the world's."""
        self._folder = folder
        self._group = group
        self._planner = _Planner(shards, data)
        # With nothing copied ahead tensors are asked for in order and written at once, on a GPU too.
        self._writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, per_thread_copy_ahead=0)
        self._writer.fs = _InPieces()
        self._writer.set_up_storage_writer(dist.get_rank(group) == 0)
        plans = self._from_all(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        plans, self._metadata = create_default_global_save_plan(plans)
        self._plan = self._writer.prepare_global_plan(plans)[dist.get_rank(group)]
        self._results: list[WriteResult] = []
        self._all_results: list[list[WriteResult]] = []

    def write(self) -> None:
        """Write this rank's file, to the disk itself. Raises OSError as the file system does."""
        with _file_errors():
            self._results = self._writer.write_data(self._plan, self._planner).wait()

    def collect(self) -> None:
        """Gather what each rank has written. A collective."""
        self._all_results = self._from_all(self._results)

    def describe(self) -> None:
        """Write down what is where: of the first rank alone. Raises OSError as the file system does."""
        self._writer.finish(self._metadata, self._all_results)
        with _file_errors(), (self._folder / "common.pt").open("wb") as file:
            torch.save({}, file)  # not for us: Megatron before 0.19 wants it
        save_config(CheckpointingConfig(*_FORMAT), str(self._folder))

    def _from_all(self, mine: Any) -> list[Any]:
        """What each rank of the group has, as its own plans and results are: of this run's processes."""
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        return found


class _InPieces(FileSystem):
    """Gives torch's writer files that pass on a large tensor piece by piece. Given all of it at once, the
    kernel looks for large free pages, which can take longer than all the rest."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        with _PieceFile(path, mode) as file:
            yield file


class _PieceFile(io.FileIO):
    def write(self, data: Any) -> int:
        """All of it."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += super().write(view[done : done + PIECE_BYTES])
        return done


class _Planner(SavePlanner):
    """Tells torch's writer what to write, and gives it each tensor when its turn comes."""

    def __init__(self, shards: Sequence[ShardedTensor], data: Callable[[int], torch.Tensor]) -> None:
        self._shards = shards
        self._data = data
        self._numbers = {self._index(shard): number for number, shard in enumerate(shards)}
        assert len(self._numbers) == len(shards)

    @staticmethod
    def _index(shard: ShardedTensor) -> MetadataIndex:
        return MetadataIndex(shard.key, torch.Size(shard.global_offset))

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the shards are known."""

    def create_local_plan(self) -> SavePlan:
        return SavePlan([self._item(shard) for shard in self._shards])

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Any]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def _item(self, shard: ShardedTensor) -> WriteItem:
        shape = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        data = TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(shard.global_offset), torch.Size(shape)),
            properties=TensorProperties(dtype=shard.dtype),
            size=torch.Size(shard.global_shape),
        )
        return WriteItem(self._index(shard), WriteItemType.SHARD, tensor_data=data)

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        number = self._numbers[MetadataIndex(write_item.index.fqn, write_item.index.offset)]
        return self._data(number)[(None,) * self._shards[number].prepend_axis_num]


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

"""Checkpoints that are damaged or would run code: refused in one line, before anything of them is loaded."""

import argparse
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_hacpo.megatron.checkpoint import load_checkpoint


class Evil:
    """Runs a command when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.command = f"touch {mark}"

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def calls(module: str, name: str, argument: str) -> bytes:
    """A pickle that calls module.name(argument); a dotted name is looked up attribute by attribute."""
    texts = [b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name, argument)]
    return b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R."


@pytest.mark.parametrize(
    "module, name",
    [
        ("posix", "system"),
        ("torch.distributed.checkpoint.filesystem", "os.system"),
        ("torch.serialization", "os.system"),
        ("torch", "os.system"),
    ],
)
def test_a_metadata_file_that_runs_code_is_refused_without_running_it(
    module: str, name: str, copy: Callable[[str], Path], refusal: Callable[..., str], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    checkpoint = copy("megatron")
    (checkpoint / ".metadata").write_bytes(calls(module, name, f"touch {mark}"))
    told = f"{checkpoint}: .metadata holds more than data ({module}.{name}); do not load it"
    assert refusal("to-hf", checkpoint) == told
    with pytest.raises(ValueError, match=r"holds more than data .*; do not load it"):
        load_checkpoint(None, checkpoint)  # type: ignore[arg-type]
    assert not mark.exists()


def test_other_files_of_a_checkpoint_that_run_code_do_not_run_it(
    copy: Callable[[str], Path],
    convert: Callable[..., list[str]],
    refusal: Callable[..., str],
    target: Path,
    tmp_path: Path,
) -> None:
    mark = tmp_path / "ran"
    checkpoint = copy("megatron")
    torch.save(Evil(mark), checkpoint / "common.pt")
    convert("to-hf", checkpoint, target)
    shutil.rmtree(target)
    weights = checkpoint / "__0_0.distcp"
    weights.write_bytes(pickle.dumps(Evil(mark), protocol=2).ljust(weights.stat().st_size, b"."))
    told = f"{checkpoint}: embedding.word_embeddings.weight or a tensor after it cannot be read ("
    assert refusal("to-hf", checkpoint).startswith(told)
    assert not mark.exists()


def test_what_megatrons_own_writer_adds_is_read(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], target: Path
) -> None:
    """Its plans in the metadata; the arguments of the run, beside the weights or (0.19) among them."""
    checkpoint = copy("megatron")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    size = torch.Size([1])
    data = TensorWriteData(ChunkStorageMetadata(size, size), stored.properties, size)
    item = WriteItem(MetadataIndex("w", size), WriteItemType.SHARD, tensor_data=data)
    metadata.all_local_plans = [SavePlan([item])]
    metadata.state_dict_metadata["common_state/shard_0_1"] = BytesStorageMetadata()
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"args": argparse.Namespace(lr=1.0), "iteration": 5}, checkpoint / "common.pt")
    convert("to-hf", checkpoint, target, "--verify")
    shutil.rmtree(target)
    (checkpoint / "common.pt").unlink()
    convert("to-hf", checkpoint, target, "--verify")


WEIGHTS = "__0_0.distcp"
BAD_FILES = [
    (WEIGHTS, None, "is absent or empty: embedding.word_embeddings.weight ends at byte "),
    (WEIGHTS, lambda content: b"", "is absent or empty: embedding.word_embeddings.weight ends at byte "),
    (WEIGHTS, lambda content: content[:-1], "is cut off: decoder.final_layernorm.weight ends at byte "),
    (WEIGHTS, lambda content: content[:9000], "is cut off: "),
    (".metadata", lambda content: content[:-9], "is damaged; fetch it again"),
    (".metadata", lambda content: b"", "is damaged; fetch it again"),
    (".metadata", lambda content: pickle.dumps({"a": 1}), "is damaged; fetch it again"),
    ("metadata.json", lambda content: b"{", "is not JSON ("),
    (
        "metadata.json",
        lambda content: content.replace(b"torch_dist", b"zarr"),
        ": the format is 'zarr' 1; save",
    ),
    (
        "metadata.json",
        lambda content: content.replace(b": 1", b": 2"),
        ": the format is 'torch_dist' 2; save it",
    ),
    ("config.json", lambda content: b"{", "is not JSON ("),
]


@pytest.mark.parametrize("name, change, expected", BAD_FILES)
def test_a_damaged_checkpoint_is_one_line(
    name: str,
    change: Callable[[bytes], bytes] | None,
    expected: str,
    copy: Callable[[str], Path],
    refusal: Callable[..., str],
) -> None:
    file = copy("megatron") / name
    content = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(change(content))
    line = refusal("to-hf", file.parent)
    assert line.startswith(f"{file.parent}: {name}")
    assert line.removeprefix(f"{file.parent}: {name}").strip().startswith(expected)


@pytest.mark.parametrize("name", [".metadata", "metadata.json"])
def test_a_missing_file_of_a_checkpoint_is_named(
    name: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    checkpoint = copy("megatron")
    (checkpoint / name).unlink()
    assert f"{checkpoint}: has no {name}, so is not a Megatron checkpoint; " in refusal("to-hf", checkpoint)


def test_a_checkpoint_without_a_config_asks_for_one(
    originals: Path,
    copy: Callable[[str], Path],
    convert: Callable[..., list[str]],
    refusal: Callable[..., str],
    target: Path,
) -> None:
    checkpoint = copy("megatron")
    (checkpoint / "config.json").unlink()
    told = f"{checkpoint}: has no config.json; name the folder that has it with --like"
    assert refusal("to-hf", checkpoint) == told
    convert("to-hf", checkpoint, target, "--like", originals / "qwen3", "--verify")

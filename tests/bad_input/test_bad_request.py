"""Options, sources and targets that a conversion cannot serve: one line, and nothing is touched."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from damage import BELONGS, BOTH_WAYS

from megatron_hacpo.hf.read import HFWeights

BAD_OPTIONS = [
    ("to-megatron", "qwen3", "--tp=4", "--tp: 4: does not divide num_attention_heads = 6; use a divisor"),
    ("to-megatron", "qwen3", "--tp=3", "--tp: 3: does not divide num_key_value_heads = 2; use a divisor"),
    ("to-megatron", "qwen3", "--tp=0", "--tp: 0: must be at least 1; raise it"),
    ("to-megatron", "qwen3", "--tp=-2", "--tp: -2: must be at least 1; raise it"),
    ("to-megatron", "qwen3", "--pp=3", "--pp: 3: does not divide num_hidden_layers = 4; use a divisor"),
    ("to-megatron", "qwen3", "--ep=2", "--ep: 2: a qwen3 model has no experts; leave it out"),
    ("to-megatron", "moe", "--ep=3", "--ep: 3: does not divide the number of experts = 4; use a divisor"),
    ("to-megatron", "qwen3", "--dtype=int8", "--dtype: int8: not one of float32, bfloat16; choose one"),
    ("to-hf", "megatron", "--dtype=", "--dtype: : not one of float32, bfloat16; choose one"),
    ("to-hf", "megatron", "--shard-gb=0", "--shard-gb: 0.0: must be a number above 0; choose another"),
    ("to-hf", "megatron", "--shard-gb=-1", "--shard-gb: -1.0: must be a number above 0; choose another"),
    ("to-hf", "megatron", "--shard-gb=nan", "--shard-gb: nan: must be a number above 0; choose another"),
    ("to-hf", "megatron", "--shard-gb=inf", "--shard-gb: inf: must be a number above 0; choose another"),
    (
        "to-hf",
        "megatron",
        "--like=none",
        "--like: none: no such folder; give the path of the model's Hugging",
    ),
]


@pytest.mark.parametrize("command, source, option, expected", BAD_OPTIONS)
def test_a_bad_option_is_one_line(
    command: str, source: str, option: str, expected: str, originals: Path, refusal: Callable[..., str]
) -> None:
    assert refusal(command, originals / source, option).startswith(expected)


def test_the_source_must_be_what_the_command_wants(
    originals: Path, tmp_path: Path, refusal: Callable[..., str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    no_folder = "no such folder; give the path of a model folder"
    no_checkpoint = (
        "has no .metadata, so is not a Megatron checkpoint; `hacpo convert to-megatron` makes one of"
    )
    for command in ("to-megatron", "to-hf"):
        for source in (tmp_path / "none", tmp_path / "file"):
            assert refusal(command, source) == f"SOURCE: {source}: {no_folder}"
    checkpoint = originals / "megatron"
    use = f"{checkpoint}: is a Megatron checkpoint; turn it back with `hacpo convert to-hf`"
    assert refusal("to-megatron", checkpoint) == use
    for folder in (originals / "qwen3", tmp_path / "empty"):
        assert refusal("to-hf", folder).startswith(f"{folder}: {no_checkpoint}")
    assert "has no config.json; give a complete" in refusal("to-megatron", tmp_path / "empty")


@pytest.mark.parametrize(
    "like, parameter, found",
    [
        ("llama", "output_layer.weight", "absent, config.json asks "),
        ("moe", "decoder.layers.mlp.router.weight", "absent"),
    ],
)
def test_a_checkpoint_of_another_model_is_one_line(
    like: str, parameter: str, found: str, originals: Path, refusal: Callable[..., str]
) -> None:
    checkpoint = originals / "megatron"
    line = refusal("to-hf", checkpoint, "--like", originals / like)
    assert line.startswith(f"{checkpoint}: {parameter} is {found}")
    assert line.endswith(BELONGS)


@BOTH_WAYS
def test_a_target_that_is_there_is_left_alone(
    command: str, source: str, originals: Path, tmp_path: Path, convert: Callable[..., list[str]]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("/nowhere")
    for name in ("folder", "file", "link"):
        place = tmp_path / name
        told = [f"error: {place}: exists already; choose another name or remove it"]
        assert convert(command, originals / source, place, code=2) == told
    below = tmp_path / "file" / "a" / "b"
    told = [f"error: {below}: {tmp_path / 'file'} is a file; choose another name"]
    assert convert(command, originals / source, below, code=2) == told
    assert sorted(place.name for place in tmp_path.iterdir()) == ["file", "folder", "link"]
    assert (tmp_path / "file").read_text() == "mine"


@BOTH_WAYS
def test_a_disk_that_is_too_small_or_closed_is_one_line(
    command: str,
    source: str,
    originals: Path,
    target: Path,
    refusal: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def closed(path: Path, *arguments: object, **options: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", closed)
        told = f"{target.parent}: Permission denied; mend that, nothing was written"
        assert refusal(command, originals / source) == told
    size = sum(stored.bytes for stored in HFWeights(originals / "qwen3").stored.values())
    usage = shutil.disk_usage("/")._replace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    told = f"{target}: needs {size:,} bytes and its disk has {size - 1:,} free; make room there"
    assert refusal(command, originals / source) == told

"""What the converter refuses: one line that names the place and the fix, exit code 2, nothing left behind.
And what it does when the disk, a signal or another process stops it half-way.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import CONFIGS, random_model
from rich.progress import Progress
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megatron_hacpo import cli
from megatron_hacpo.config import load
from megatron_hacpo.config.check_model import model_problems
from megatron_hacpo.hf.read import INDEX, SINGLE, HFWeights, read_config
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.runtime import Layout

PAIR = Path(__file__).parents[1] / "examples" / "tiny" / "pair.yaml"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
BELONGS = "; use the config.json that belongs to the weights"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random folders `qwen3` (tied), `llama` and `moe`, and the checkpoint `megatron` of the first."""
    root = tmp_path_factory.mktemp("originals")
    for name, config in {"qwen3": "qwen3 tied", "llama": "llama", "moe": "qwen3 moe"}.items():
        random_model(CONFIGS[config], root / name)
    hf_to_megatron(root / "qwen3", root / "megatron", layout=Layout())
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy, to be damaged, of one of the originals."""
    return lambda name: Path(shutil.copytree(originals / name, tmp_path / name))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "target"


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """`hacpo convert ...` in this process: the lines on stderr, of the expected exit code."""

    def run(*arguments: object, code: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["hacpo", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == code
        return capsys.readouterr().err.splitlines()

    return run


@pytest.fixture
def refusal(convert: Callable[..., list[str]], target: Path) -> Callable[..., str]:
    """What the only line says after `error: `, of a command that leaves nothing behind."""

    def run(command: str, source: Path, *options: object) -> str:
        (line,) = convert(command, source, target, *options, code=2)
        assert not target.parent.exists() or not list(target.parent.iterdir())
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run


def check_both_say(refusal: Callable[..., str], folder: Path, expected: str) -> None:
    """The converter and the check before `hacpo launch` say the same about a folder."""
    line = refusal("to-megatron", folder)
    assert line.startswith(f"{folder}: ")
    assert expected in line
    agent = load(PAIR, [f"agents.A.model={folder}"]).agents["A"]
    (problem,) = model_problems("A", agent)
    assert problem.startswith("agents.A.model: ")
    assert problem.endswith(f": {line.removeprefix(f'{folder}: ')}")


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields; `...` takes one away."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def rope(kind: str, **fields: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


NOT_A_SIZE = "; it must be a whole number above 0"
NOT_POSITIVE = "; it must be a number above 0"
BAD_CONFIGS = [
    ("qwen3", {"num_hidden_layers": "2"}, "config.json: num_hidden_layers is '2'" + NOT_A_SIZE),
    ("qwen3", {"num_hidden_layers": -1}, "num_hidden_layers is -1" + NOT_A_SIZE),
    ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers is 0" + NOT_A_SIZE),
    ("qwen3", {"hidden_size": 48.0}, "hidden_size is 48.0" + NOT_A_SIZE),
    ("qwen3", {"hidden_size": True}, "hidden_size is True" + NOT_A_SIZE),
    ("qwen3", {"vocab_size": None}, "vocab_size is None" + NOT_A_SIZE),
    ("qwen3", {"vocab_size": ...}, "vocab_size is None" + NOT_A_SIZE),
    ("qwen3", {"head_dim": "8"}, "head_dim is '8'" + NOT_A_SIZE),
    ("qwen3", {"head_dim": 0}, "head_dim is 0" + NOT_A_SIZE),
    ("qwen3", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'" + NOT_A_SIZE),
    ("qwen3", {"num_key_value_heads": 4}, "num_key_value_heads is 4; it must divide num_attention_heads = 6"),
    ("qwen3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'" + NOT_POSITIVE),
    ("qwen3", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0" + NOT_POSITIVE),
    ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    ("qwen3", {"layer_types": 5}, "layer_types is 5; it must be a list"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types: ['sliding_attention'] is not supp"),
    ("qwen3", {"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; it must be an object"),
    ("qwen3", {"rope_parameters": {"full_attention": {}}}, "is not supported; needs the same in every layer"),
    ("qwen3", rope("yarn", factor=4.0), "rope_type: 'yarn' is not supported for qwen3; needs 'default' or"),
    ("qwen3", rope("dynamic", factor=4.0), "rope_type: 'dynamic' is not supported"),
    ("qwen3", rope("longrope"), "rope_type: 'longrope' is not supported"),
    ("qwen3", rope("default", rope_theta=0), "rope_theta of the rope parameters is 0" + NOT_POSITIVE),
    ("qwen3", rope("linear"), "factor of the rope parameters is None" + NOT_POSITIVE),
    ("qwen3", rope("llama3", factor=8.0), "low_freq_factor of the rope parameters is None" + NOT_POSITIVE),
    (
        "qwen3",
        {"use_sliding_window": True},
        "use_sliding_window: True is not supported for qwen3; needs False",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias: True is not supported for qwen3; needs False"),
    (
        "qwen3",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: {'quant_method': 'fp8'}",
    ),
    ("qwen3", {"model_type": "gpt2"}, "model_type: 'gpt2' is not supported; supported are llama, mistral"),
    ("qwen3", {"model_type": ...}, "model_type: None is not supported"),
    ("qwen3", {"model_type": ["qwen3"]}, "model_type: ['qwen3'] is not supported"),
    ("qwen3", {"num_hidden_layers": 3}, "model.layers.3.input_layernorm.weight is [48] in model.safetensors"),
    ("qwen3", {"num_hidden_layers": 5}, "model.layers.4.input_layernorm.weight is absent in the safetensors"),
    (
        "qwen3",
        {"vocab_size": 38},
        f"{EMBEDDING} is [37, 48] in {SINGLE} and [38, 48] by config.json{BELONGS}",
    ),
    (
        "qwen3",
        {"head_dim": ...},
        "model.layers.0.self_attn.q_proj.weight is [48, 48] in model.safetensors and",
    ),
    (
        "qwen3",
        {"tie_word_embeddings": False},
        f"{HEAD} is absent and config.json does not say tie_word_embed",
    ),
    (
        "llama",
        {"tie_word_embeddings": True},
        f"tie_word_embeddings: true, but {HEAD} in {SINGLE} is not model",
    ),
    ("llama", {"mlp_bias": True}, "mlp_bias: True is not supported for llama; needs False"),
    ("llama", {"attention_bias": True}, "attention_bias: True is not supported for llama"),
    (
        "llama",
        {"model_type": "mistral", "sliding_window": 32},
        "sliding_window: 32 is not supported for mistral",
    ),
    ("moe", {"num_experts": "4"}, "num_experts is '4'" + NOT_A_SIZE),
    ("moe", {"num_experts": 1}, "num_experts is 1; it must be at least num_experts_per_tok = 2"),
    (
        "moe",
        {"mlp_only_layers": [0]},
        "mlp_only_layers: [0] is not supported for qwen3_moe; needs [] or None",
    ),
]


@pytest.mark.parametrize("name, changes, expected", BAD_CONFIGS)
def test_a_bad_config_is_one_line(
    name: str, changes: dict, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy(name)
    edit_json(folder / "config.json", **changes)
    check_both_say(refusal, folder, expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, "has no config.json; give a complete Hugging Face folder"),
        ("", "config.json is not JSON ("),
        ('{"model_type": "qwen3",', "config.json is not JSON ("),
        ("[]", "config.json is not a JSON object; fetch the folder again"),
        ('"qwen3"', "config.json is not a JSON object"),
        ("\xff", "config.json is not JSON ('utf-8' codec can't decode"),
    ],
)
def test_a_config_that_is_none_is_one_line(
    text: str | None, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy("qwen3")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    check_both_say(refusal, folder, expected)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"use_cache": "yes"}, "Field 'use_cache' expected bool, got str (value: 'yes')"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"dtype": "float7"}, "module 'torch' has no attribute 'float7'"),
    ],
)
def test_what_transformers_refuses_is_one_line(
    changes: dict, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy("qwen3")
    edit_json(folder / "config.json", **changes)
    line = refusal("to-megatron", folder)
    assert line.startswith(f"{folder}: config.json: refused by transformers (")
    assert line.endswith(f"{expected}); correct it")


def test_any_number_of_layers_is_refused_at_once(originals: Path) -> None:
    config = read_config(originals / "qwen3")
    config.num_hidden_layers = 10**6
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model\.layers\.4\.input_layernorm\.weight is absent"):
        HFWeights(originals / "qwen3").check(config)
    assert time.process_time() - began < 1.0


def test_code_in_a_folder_is_not_run(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], target: Path, tmp_path: Path
) -> None:
    folder = copy("qwen3")
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_json(folder / "config.json", auto_map=names)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (folder / "modeling_evil.py").write_text(code)
    convert("to-megatron", folder, target, "--verify", "--verify-logits")
    convert("to-hf", target, target.with_name("hf"), "--verify")
    assert not (tmp_path / "ran").exists()


def shard(folder: Path) -> dict[str, str]:
    """Two files of weights and their index, which is returned."""
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    names = sorted(tensors)
    half = len(names) // 2
    save_file({name: tensors[name] for name in names[:half]}, folder / FIRST)
    save_file({name: tensors[name] for name in names[half:]}, folder / SECOND)
    files = {name: FIRST if place < half else SECOND for place, name in enumerate(names)}
    (folder / INDEX).write_text(json.dumps({"weight_map": files}))
    return files


def in_index(name: str, file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / INDEX).write_text(json.dumps({"weight_map": shard(folder) | {name: file}}))

    return damage


def with_index(text: str) -> Damage:
    return lambda folder: shard(folder) and (folder / INDEX).write_text(text) and None


def without(file: str) -> Damage:
    return lambda folder: shard(folder) and (folder / file).unlink() and None


def linked_elsewhere(folder: Path) -> None:
    shard(folder)
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to("/nowhere")


def cut(size: int) -> Damage:
    """The first `size` bytes; of a negative size, all but so many."""
    return lambda folder: (folder / SINGLE).write_bytes((folder / SINGLE).read_bytes()[:size]) and None


def with_bytes(content: bytes) -> Damage:
    return lambda folder: (folder / SINGLE).write_bytes(content) and None


def with_header(header: object) -> Damage:
    text = json.dumps(header).encode()
    return with_bytes(len(text).to_bytes(8, "little") + text + bytes(4))


def in_header(name: str, **fields: object) -> Damage:
    """A tensor's entry in the header says something else."""

    def damage(folder: Path) -> None:
        content = (folder / SINGLE).read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header[name] |= fields
        text = json.dumps(header).encode()
        (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[end:])

    return damage


def longer(folder: Path) -> None:
    with (folder / SINGLE).open("ab") as file:
        file.write(b"more")


def with_tensor(name: str, tensor: torch.Tensor | None) -> Damage:
    """Another tensor under a name, or none."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / SINGLE) | {name: tensor}
        save_file({key: value for key, value in tensors.items() if value is not None}, folder / SINGLE)

    return damage


def renamed(name: str) -> Damage:
    return lambda folder: (folder / SINGLE).rename(folder / name) and None


FETCH = "; fetch it again"
NO_HEADER = f"{SINGLE} is damaged: its header cannot be read{FETCH}"
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
AT_A = f"{SINGLE} is damaged: its header contradicts itself at a{FETCH}"
BAD_WEIGHTS = [
    (without(SECOND), f"has no {SECOND}, which {INDEX} names; fetch the folder again"),
    (linked_elsewhere, f"has no {SECOND}, which {INDEX} names"),
    (without(INDEX), f"has {FIRST}, but no {INDEX}; fetch the index too"),
    (in_index("nobody", FIRST), f"{INDEX} names nobody in {FIRST}, which does not hold it; fetch both again"),
    (in_index(NORM, FIRST), f"{INDEX} names {NORM} in {FIRST}, which does not hold it"),
    (in_index(NORM, "../x"), f"{INDEX} names '../x', which is not a file of the folder itself{FETCH}"),
    (in_index(NORM, "/etc/passwd"), f"{INDEX} names '/etc/passwd', which is not a file of the folder itself"),
    (in_index(NORM, ".."), f"{INDEX} names '..', which is not a file of the folder itself"),
    (in_index(NORM, ""), f"{INDEX} names '', which is not a file of the folder itself"),
    (with_index("{}"), f"{INDEX} has no weight_map of tensors to files{FETCH}"),
    (with_index('{"weight_map": {"a": 1}}'), f"{INDEX} has no weight_map of tensors to files"),
    (with_index("{"), f"{INDEX} is not JSON ("),
    (cut(-1), f"{SINGLE} is cut off: {NORM} ends at byte "),
    (cut(9_000), f"{SINGLE} is cut off: {EMBEDDING} ends at byte "),
    (cut(100), NO_HEADER),
    (cut(4), NO_HEADER),
    (longer, f"{SINGLE} is damaged: 4 bytes too long{FETCH}"),
    (with_bytes(bytes(range(256)) * 4), NO_HEADER),
    (with_bytes((2**62).to_bytes(8, "little") + b"{}"), NO_HEADER),
    (with_bytes(b"version https://git-lfs.github.com/spec/v1\n"), NO_HEADER),
    (with_header([]), NO_HEADER),
    (with_header({"a": 5}), AT_A),
    (with_header({"a": {"dtype": "F32", "shape": [1]}}), AT_A),
    (with_header({"a": ENTRY | {"dtype": 32}}), AT_A),
    (with_header({"a": ENTRY | {"shape": 1}}), AT_A),
    (with_header({"a": ENTRY | {"shape": [2]}}), AT_A),
    (with_header({"a": ENTRY | {"data_offsets": ["0", "4"]}}), AT_A),
    (with_header({"a": ENTRY | {"data_offsets": [4, 0]}}), AT_A),
    (with_header({"a": ENTRY | {"data_offsets": [-4, 0]}}), AT_A),
    (with_header({"b": ENTRY, "a": ENTRY}), AT_A),
    (
        with_header({"a": ENTRY}),
        f"{EMBEDDING} is absent in the safetensors files and [37, 48] by config.json",
    ),
    (in_header(NORM, data_offsets=[0, 192]), f"{SINGLE} is damaged: its header contradicts itself at "),
    (with_tensor(QUERY, torch.zeros(48, 47)), f"{QUERY} is [48, 47] in {SINGLE} and [48, 48] by config.json"),
    (
        with_tensor(NORM, torch.zeros(48, 1)),
        f"{NORM} is [48, 1] in {SINGLE} and [48] by config.json{BELONGS}",
    ),
    (with_tensor(QUERY, None), f"{QUERY} is absent in the safetensors files and [48, 48] by config.json"),
    (with_tensor("bias", torch.zeros(48)), f"bias is [48] in {SINGLE} and absent by config.json{BELONGS}"),
    (
        with_tensor(QUERY, torch.zeros(48, 48).to(torch.float8_e4m3fn)),
        f"{QUERY} in {SINGLE} is F8_E4M3; save",
    ),
    (with_tensor(QUERY, torch.zeros(48, 48, dtype=torch.int8)), f"{QUERY} in {SINGLE} is I8; save it as one"),
    (
        with_tensor(HEAD, torch.zeros(37, 48)),
        f"tie_word_embeddings: true, but {HEAD} in {SINGLE} is not model",
    ),
    (with_tensor(HEAD, torch.zeros(36, 48)), f"but {HEAD} in {SINGLE} is not {EMBEDDING}{BELONGS}"),
    (renamed("pytorch_model.bin"), "has pytorch_model.bin, a pickle, and no safetensors; save it again with"),
    (renamed("weights"), f"has no {SINGLE}; give a folder with all its safetensors files"),
]


@pytest.mark.parametrize("damage, expected", BAD_WEIGHTS, ids=[expected for _, expected in BAD_WEIGHTS])
def test_bad_weights_are_one_line(
    damage: Damage, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy("qwen3")
    damage(folder)
    check_both_say(refusal, folder, expected)


def test_weights_of_two_dtypes_need_a_choice(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], refusal: Callable[..., str], target: Path
) -> None:
    folder = copy("qwen3")
    with_tensor(QUERY, torch.zeros(48, 48, dtype=torch.bfloat16))(folder)
    with_tensor("model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4).half())(folder)
    line = refusal("to-megatron", folder)
    assert line.startswith(f"{folder}: ")
    assert f"{QUERY} is bfloat16" in line
    assert " is float32" in line
    assert line.endswith("; say which with --dtype")
    convert("to-megatron", folder, target, "--dtype", "float32", "--verify")


def test_an_output_layer_equal_to_a_tied_embedding_is_left_out(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], target: Path, tmp_path: Path
) -> None:
    folder = copy("qwen3")
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {HEAD: tensors[EMBEDDING].clone()}, folder / SINGLE)
    convert("to-megatron", folder, target, "--verify")
    convert("to-hf", target, tmp_path / "back", "--verify")
    back = load_file(tmp_path / "back" / SINGLE)
    assert back.keys() == tensors.keys()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)


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


@pytest.mark.parametrize("command, source", [("to-megatron", "qwen3"), ("to-hf", "megatron")])
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


@pytest.mark.parametrize("command, source", [("to-megatron", "qwen3"), ("to-hf", "megatron")])
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


def test_other_files_of_a_checkpoint_that_run_code_are_refused_without_running_it(
    copy: Callable[[str], Path], refusal: Callable[..., str], tmp_path: Path
) -> None:
    mark = tmp_path / "ran"
    checkpoint = copy("megatron")
    kept = (checkpoint / "common.pt").read_bytes()
    torch.save(Evil(mark), checkpoint / "common.pt")
    told = f"{checkpoint}: common.pt holds more than data (posix.system); do not load it"
    assert refusal("to-hf", checkpoint) == told
    (checkpoint / "common.pt").write_bytes(pickle.dumps(Evil(mark), protocol=2))
    assert refusal("to-hf", checkpoint) == told
    (checkpoint / "common.pt").write_bytes(kept)
    weights = checkpoint / "__0_0.distcp"
    weights.write_bytes(pickle.dumps(Evil(mark), protocol=2).ljust(weights.stat().st_size, b"."))
    assert "a .distcp file is damaged at embedding.word_embeddings.weight" in refusal("to-hf", checkpoint)
    assert not mark.exists()


def test_what_megatrons_own_writer_adds_is_read(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], target: Path
) -> None:
    """Its plans in the metadata, and the arguments of the training run beside the weights."""
    checkpoint = copy("megatron")
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["embedding.word_embeddings.weight"]
    size = torch.Size([1])
    data = TensorWriteData(ChunkStorageMetadata(size, size), stored.properties, size)
    item = WriteItem(MetadataIndex("w", size), WriteItemType.SHARD, tensor_data=data)
    metadata.all_local_plans = [SavePlan([item])]
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    torch.save({"args": argparse.Namespace(lr=1.0), "iteration": 5}, checkpoint / "common.pt")
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
    ("common.pt", lambda content: content[:-9], "is damaged; fetch it again"),
    ("common.pt", lambda content: b"none", "is damaged; fetch it again"),
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


@pytest.mark.parametrize("name", [".metadata", "metadata.json", "common.pt"])
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


def convert_in_child(arguments: list[str], log: Path, mark: Path | None, largest_file: int | None) -> None:
    """A conversion in a process of its own, with `log` as its stderr. With `mark` it makes that file at the
    first tensor and waits until it is gone."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    # A test run in the background inherits that the signal is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if mark is not None:
        wait_at_first_tensor(mark)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["hacpo", "convert", *arguments]
    cli.main()


def wait_at_first_tensor(mark: Path) -> None:
    def advance(self: Progress, task: int, done: float) -> None:
        Progress.advance = lambda self, task, done: None  # type: ignore[method-assign]
        mark.touch()
        for _ in range(6_000):
            if not mark.exists():
                return
            time.sleep(0.02)

    Progress.advance = advance  # type: ignore[method-assign, assignment]


@pytest.fixture
def in_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts `convert_in_child`; its stderr goes to child.log. With `mark`, returns when it waits."""
    monkeypatch.setenv(
        "PYTHONPATH", str(Path(__file__).parent)
    )  # the server imports this module once for all
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    children = []

    def start(
        *arguments: object, mark: Path | None = None, largest_file: int | None = None
    ) -> ForkServerProcess:
        words = [str(argument) for argument in arguments]
        child = context.Process(
            target=convert_in_child, args=(words, tmp_path / "child.log", mark, largest_file)
        )
        child.start()
        children.append(child)
        while mark is not None and not mark.exists():
            assert child.is_alive(), (tmp_path / "child.log").read_text()
            time.sleep(0.02)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


BOTH_WAYS = pytest.mark.parametrize("command, source", [("to-megatron", "qwen3"), ("to-hf", "megatron")])


@BOTH_WAYS
def test_a_disk_that_fills_up_leaves_nothing(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, largest_file=20_000)
    child.join(300)
    assert child.exitcode == 2
    (line,) = (tmp_path / "child.log").read_text().splitlines()
    assert line.startswith(f"error: {target}: ")
    assert "File too large" in line
    assert line.endswith("; mend that, nothing was written")
    assert list(target.parent.iterdir()) == []


@BOTH_WAYS
def test_a_killed_conversion_leaves_no_target_and_the_next_one_cleans_up(
    command: str,
    source: str,
    originals: Path,
    target: Path,
    tmp_path: Path,
    in_child: Callable[..., Any],
    convert: Callable[..., list[str]],
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    told = [f"error: {target}: another process is writing it; wait for that one"]
    assert convert(command, originals / source, target, code=2) == told
    child.kill()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists()
    (partial,) = target.parent.iterdir()
    (partial / "left over").touch()
    convert(command, originals / source, target, "--verify")
    assert list(target.parent.iterdir()) == [target]
    assert not (target / "left over").exists()


@BOTH_WAYS
def test_ctrl_c_leaves_nothing_and_no_traceback(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    os.kill(child.pid, signal.SIGINT)
    child.join(300)
    assert child.exitcode == 130
    assert (tmp_path / "child.log").read_text() == ""
    assert list(target.parent.iterdir()) == []


@BOTH_WAYS
def test_a_target_that_appears_half_way_is_left_alone(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    target.mkdir()
    (target / "mine").touch()
    (tmp_path / "mark").unlink()
    child.join(300)
    assert child.exitcode == 2
    told = f"error: {target}: Directory not empty; mend that, nothing was written\n"
    assert (tmp_path / "child.log").read_text() == told
    assert list(target.parent.iterdir()) == [target]
    assert list(target.iterdir()) == [target / "mine"]

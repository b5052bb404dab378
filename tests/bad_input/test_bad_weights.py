"""Weight files that are missing, damaged, foreign or not what config.json says: one line that names file and
tensor."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from damage import BELONGS, EMBEDDING, HEAD, NORM, check_both_say
from safetensors.torch import load_file, save_file

from megatron_hacpo.hf.read import INDEX, SINGLE

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
QUERY = "model.layers.1.self_attn.q_proj.weight"
Damage = Callable[[Path], None]


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

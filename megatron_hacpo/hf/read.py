"""Reading the weights of a Hugging Face folder: what is there, whether it is what config.json says, and any
part of any tensor without the rest.

Only safetensors are read: a `.bin` file is a pickle, which runs code.
"""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron_hacpo.hf.families import (
    DTYPES,
    ROPE_TYPES,
    each_tensor,
    expert_count,
    family_of,
    is_tied,
    key_value_heads,
    rope_parameters,
    short,
)

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPE_NAMES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""In a safetensors header and in torch."""

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_IGNORED = ("rotary_emb.inv_freq",)
"""Buffers that old checkpoints hold and that follow from config.json."""

_OPEN_FILES = 1
"""More would speed up nothing, and the pages of a mapped file count as this process's memory."""

CHECKPOINT_FILES = (".metadata", "metadata.json")
"""What a Megatron distributed checkpoint has beside its `.distcp` files."""


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has its weights as a Megatron distributed checkpoint."""
    return all((folder / name).is_file() for name in CHECKPOINT_FILES)


@dataclass(frozen=True)
class Stored:
    """One tensor of a folder. dtype: as torch names it, or safetensors' name where it is none of `DTYPES`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


class HFWeights:
    """The tensors of a Hugging Face folder, by name, in the order of its files.

    Raises ValueError, naming file and tensor, for a folder without safetensors, a missing or damaged file and
    an index that its files contradict.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = _read_index(folder)
        files = sorted(set(index.values())) if index is not None else [SINGLE]
        headers = {file: _read_header(folder / file) for file in files}
        self.stored = {name: stored for header in headers.values() for name, stored in header.items()}
        for name, file in (index or {}).items():
            if name not in headers[file]:
                raise ValueError(f"{INDEX} names {name} in {file}, which does not hold it; fetch both again")
            self.stored[name] = headers[file][name]
        self._handle = lru_cache(maxsize=_OPEN_FILES)(self._open)

    def _open(self, file: str) -> Any:
        from safetensors import safe_open  # imports torch

        return safe_open(self.folder / file, framework="pt")

    def slice(self, name: str) -> Any:
        """A lazy tensor: `[a:b]` and `[:, a:b]` read only that part, `get_shape()` reads nothing."""
        return self._handle(self.stored[name].file).get_slice(name)

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(stored.bytes for stored in self.stored.values())

    def check(self, config: Any) -> None:
        """ValueError unless the folder holds the tensors that `config` implies and no others.

        An output layer beside a tied embedding is accepted if both are equal: old checkpoints repeat it.
        """
        expected = set()
        for name, shape in each_tensor(config):  # stops at the first absent one, however many are asked for
            self._check_tensor(name, shape, config)
            expected.add(name)
        for name in self.stored:
            if name not in expected and not name.endswith(_IGNORED):
                self._check_tensor(name, None, config)

    def _check_tensor(self, name: str, wanted: tuple[int, ...] | None, config: Any) -> None:
        found, file, output = self._shape(name), self._file_of(name), "lm_head.weight"
        if name == output and is_tied(config):
            return self._check_tied(output)
        if name == output and found is None:
            raise ValueError(
                f"{output} is absent and config.json does not say tie_word_embeddings: true; "
                "use the config.json that belongs to the weights"
            )
        if found != wanted:
            raise ValueError(
                f"{name} is {_shown(found)} in {file} and {_shown(wanted)} by config.json; "
                "use the config.json that belongs to the weights"
            )
        dtype = self.stored[name].dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name} in {file} is {dtype}; save it as one of {', '.join(DTYPES)}")
        return None

    def _check_tied(self, output: str) -> None:
        import torch

        embedding = "model.embed_tokens.weight"
        same = self._shape(output) == self._shape(embedding) and torch.equal(
            self.slice(output)[:], self.slice(embedding)[:]
        )
        if not same:
            raise ValueError(
                f"config.json has tie_word_embeddings: true, but {output} in {self.stored[output].file} is "
                f"not {embedding}; use the config.json that belongs to the weights"
            )

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self.stored[name].shape if name in self.stored else None

    def _file_of(self, name: str) -> str:
        return self.stored[name].file if name in self.stored else "the safetensors files"


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))


def _read_index(folder: Path) -> Mapping[str, str] | None:
    """Tensor name -> file; None for a folder with one file."""
    if (folder / INDEX).is_file():
        weight_map = read_json(folder / INDEX).get("weight_map")
        named = isinstance(weight_map, dict) and all(isinstance(f, str) for f in weight_map.values())
        if not named or not weight_map:
            raise ValueError(f"{INDEX} has no weight_map of tensors to files; fetch it again")
        assert isinstance(weight_map, dict)
        outside = [file for file in weight_map.values() if Path(file).name != file or file in ("", "..")]
        if outside:
            raise ValueError(
                f"{INDEX} names {outside[0]!r}, which is not a file of the folder itself; fetch it again"
            )
        missing = sorted({file for file in weight_map.values() if not (folder / file).is_file()})
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(f"has no {missing[0]}{more}, which {INDEX} names; fetch the folder again")
        return weight_map
    if (folder / SINGLE).is_file():
        return None
    shards = sorted(file.name for file in folder.glob("*.safetensors"))
    if shards:
        raise ValueError(f"has {shards[0]}, but no {INDEX}; fetch the index too")
    pickles = sorted(file.name for file in folder.glob("*.bin"))
    if pickles:
        raise ValueError(
            f"has {pickles[0]}, a pickle, and no safetensors; "
            "save it again with transformers' save_pretrained"
        )
    raise ValueError(f"has no {SINGLE}; give a folder with all its safetensors files")


_MAX_HEADER_BYTES = 100_000_000
"""What safetensors itself reads at most."""


def _read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one safetensors file, looked at but not read.

    The format: eight bytes with the header's length, the header as JSON, one tensor's data after another's.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length)) if 0 < length <= min(size, _MAX_HEADER_BYTES) else None
        except (ValueError, RecursionError):
            header = None
    if not isinstance(header, dict):
        raise ValueError(f"{path.name} is damaged: its header cannot be read; fetch it again")
    header.pop("__metadata__", None)
    start, at = 8 + length, 0
    stored = {}
    for name, entry in sorted(header.items(), key=lambda item: _offsets(item[1])):
        begin, end = _offsets(entry)
        if begin != at or end - begin != _data_bytes(entry):
            raise ValueError(
                f"{path.name} is damaged: its header contradicts itself at {name}; fetch it again"
            )
        if start + end > size:
            raise ValueError(
                f"{path.name} is cut off: {name} ends at byte {start + end:,} and the file at {size:,}; "
                "fetch it again"
            )
        dtype = DTYPE_NAMES.get(entry["dtype"], entry["dtype"])
        stored[name] = Stored(path.name, dtype, tuple(entry["shape"]), end - begin)
        at = end
    if start + at != size:
        raise ValueError(f"{path.name} is damaged: {size - start - at:,} bytes too long; fetch it again")
    return stored


def _offsets(entry: Any) -> tuple[int, int]:
    """Where a tensor's data begin and end; (-1, -1) for an entry of a header that is none."""
    match entry:
        case {"dtype": str(), "shape": [*sizes], "data_offsets": [begin, end]}:
            if all(type(number) is int and number >= 0 for number in (*sizes, begin, end)):
                return begin, end
    return -1, -1


def _data_bytes(entry: dict[str, Any]) -> int:
    """Of a tensor by its shape and dtype; what the header says where the dtype is not supported."""
    begin, end = entry["data_offsets"]
    itemsize = _ITEM_BYTES.get(entry["dtype"])
    return end - begin if itemsize is None else math.prod(entry["shape"]) * itemsize


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
)
_EXPERT_SIZES = ("moe_intermediate_size", "num_experts_per_tok")

_Kind = tuple[Callable[[Any], bool], str]
_SIZE: _Kind = (lambda value: type(value) is int and value > 0, "a whole number above 0")
_POSITIVE: _Kind = (lambda value: type(value) in (int, float) and 0 < value < math.inf, "a number above 0")
_FLAG: _Kind = (lambda value: type(value) is bool, "true or false")
_LIST: _Kind = (lambda value: type(value) is list, "a list")
_OBJECT: _Kind = (lambda value: type(value) is dict, "an object")
_OPTIONAL = {
    "head_dim": _SIZE,
    "num_key_value_heads": _SIZE,
    "num_experts": _SIZE,
    "num_local_experts": _SIZE,
    "rms_norm_eps": _POSITIVE,
    "tie_word_embeddings": _FLAG,
    "layer_types": _LIST,
    "rope_parameters": _OBJECT,
    "rope_scaling": _OBJECT,
}
"""What a field that need not be there must be."""


def read_config(folder: Path) -> SimpleNamespace:
    """The fields of config.json as attributes; ValueError if the model they describe is not supported."""
    config = SimpleNamespace(**{"model_type": None, **read_json(folder / "config.json")})
    try:
        _check_fields(config)
    except ValueError as error:
        raise ValueError(f"config.json: {error}") from None
    return config


def _check_fields(config: SimpleNamespace) -> None:
    fields = vars(config)
    for name, kind in _OPTIONAL.items():
        if fields.get(name) is not None:
            _check_field(name, fields[name], kind)
    family = family_of(config)
    for name, value in family.defaults.items():
        fields.setdefault(name, value)
    for name in _SIZES + (_EXPERT_SIZES if family.has_experts else ()):
        _check_field(name, fields.get(name), _SIZE)
    rope = rope_parameters(config)
    for name in ("rope_theta", *ROPE_TYPES[rope["rope_type"]]):
        _check_field(f"{name} of the rope parameters", rope.get(name), _POSITIVE)
    groups = key_value_heads(config)
    if config.num_attention_heads % groups:
        raise ValueError(
            f"num_key_value_heads is {groups}; "
            f"it must divide num_attention_heads = {config.num_attention_heads}"
        )
    if family.has_experts and not expert_count(config) >= config.num_experts_per_tok:
        raise ValueError(
            f"num_experts is {expert_count(config)}; it must be at least "
            f"num_experts_per_tok = {config.num_experts_per_tok}"
        )


def _check_field(name: str, value: Any, kind: _Kind) -> None:
    holds, words = kind
    if not holds(value):
        raise ValueError(f"{name} is {short(value)}; it must be {words}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; ValueError says what is wrong with the file."""
    if not path.is_file():
        raise ValueError(f"has no {path.name}; give a complete Hugging Face folder")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also UnicodeDecodeError
        raise ValueError(f"{path.name} is not JSON ({error}); fetch the folder again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object; fetch the folder again")
    return value

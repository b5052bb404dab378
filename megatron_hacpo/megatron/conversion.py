"""Weights between Hugging Face names and shapes and Megatron's, in both directions, sharded.

Megatron fuses what Hugging Face keeps apart: `linear_qkv` holds, for every key-value group, the group's query
heads, its key head and its value head; `linear_fc1` holds the gate and the up projection. Tensor parallelism
splits both by whole groups and by halves of each projection. One table below says it all.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from safetensors import safe_open

from megatron_hacpo.families import head_size
from megatron_hacpo.megatron.runtime import World

Split = Literal["none", "columns", "vocabulary", "qkv", "gate_up"]


@dataclass(frozen=True)
class Rule:
    """How a Megatron parameter is made of Hugging Face tensors. `{i}` is the layer's number in the model."""

    split: Split
    names: tuple[str, ...]


_QKV = ("q", "k", "v")
_LAYER = "model.layers.{i}."
_TOP_RULES = {
    "embedding.word_embeddings.weight": Rule("vocabulary", ("model.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": Rule("none", ("model.norm.weight",)),
    "output_layer.weight": Rule("vocabulary", ("lm_head.weight",)),
}
_LAYER_RULES = {
    "self_attention.linear_qkv.weight": Rule("qkv", tuple(f"self_attn.{x}_proj.weight" for x in _QKV)),
    "self_attention.linear_qkv.bias": Rule("qkv", tuple(f"self_attn.{x}_proj.bias" for x in _QKV)),
    "self_attention.linear_proj.weight": Rule("columns", ("self_attn.o_proj.weight",)),
    "self_attention.q_layernorm.weight": Rule("none", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": Rule("none", ("self_attn.k_norm.weight",)),
    "mlp.linear_fc1.weight": Rule("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": Rule("columns", ("mlp.down_proj.weight",)),
    # The local spec keeps the norms as modules, TransformerEngine's inside the linear that follows.
    "input_layernorm.weight": Rule("none", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.layer_norm_weight": Rule("none", ("input_layernorm.weight",)),
    "pre_mlp_layernorm.weight": Rule("none", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": Rule("none", ("post_attention_layernorm.weight",)),
}


class HFWeights:
    """The tensors of a Hugging Face folder's safetensors files, read slice by slice."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = json.loads(index.read_text())["weight_map"]
        elif (folder / "model.safetensors").exists():
            with safe_open(folder / "model.safetensors", framework="pt") as tensors:
                files = dict.fromkeys(tensors.keys(), "model.safetensors")
        else:
            raise ValueError(f"model: {folder} has no model.safetensors and no model.safetensors.index.json")
        self._folder = folder
        self._files: dict[str, str] = files
        self._open: dict[str, Any] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All (name, tensor) pairs."""
        for name in self._files:
            yield name, self.slice(name)[:]

    def slice(self, name: str) -> Any:
        """A lazy tensor: `[a:b]` and `[:, a:b]` read only that part, `get_shape()` reads nothing."""
        if name not in self._files:
            raise ValueError(f"model: {self._folder} has no tensor {name}")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(self._folder / file, framework="pt")
        return self._open[file].get_slice(name)


def load_weights(model: GPTModel, weights: HFWeights, config: Any) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only this rank's slices."""
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for parameter, rule in _parameters(model, config):
            read = _READERS[rule.split]
            slices = [weights.slice(name) for name in rule.names]
            value = read(slices, parameter.shape[0], tp, rank, config)
            if value.shape != parameter.shape:
                raise ValueError(
                    f"model: {' + '.join(rule.names)} gives shape {tuple(value.shape)}, "
                    f"config.json asks for {tuple(parameter.shape)}"
                )
            parameter.copy_(value)


def export_stage(model: GPTModel, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(Hugging Face name, full tensor) of this pipeline stage, gathered over its tensor-parallel ranks.

    A collective of the tensor-parallel group; every rank of it gets the same pairs. A tied output layer is
    not exported a second time.
    """
    for parameter, rule in _parameters(model, config):
        if config.tie_word_embeddings and rule is _TIED_OUTPUT:
            continue
        shards = _gather(parameter.detach()) if rule.split != "none" else [parameter.detach()]
        for name, tensor in zip(rule.names, _joined(shards, rule.split, config), strict=True):
            yield name, tensor.contiguous()


def export_to_leader(model: GPTModel, config: Any, world: World) -> Iterator[tuple[str, torch.Tensor]]:
    """Every (Hugging Face name, full tensor) on the agent's leader, stage by stage; nothing elsewhere.

    A collective of the world: every rank must exhaust it. Stages other than the leader's send from their
    first tensor- and data-parallel rank, one tensor at a time.
    """
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if parallel_state.get_data_parallel_rank() == 0:
        mine = export_stage(model, config)
        if stage == 0 and world.is_leader:
            yield from mine
        elif parallel_state.get_tensor_model_parallel_rank() == 0 and stage > 0:
            for name, tensor in mine:
                _send(world, name, tensor)
            _send(world, "", torch.empty(0))
        else:
            for _ in mine:
                pass
    if world.is_leader:
        for other in range(1, world.layout.pipeline):
            source = other * world.layout.tensor * world.layout.data
            while (received := _receive(world, source)) is not None:
                yield received


_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADER_BYTES = 512


def _send(world: World, name: str, tensor: torch.Tensor) -> None:
    header = json.dumps([name, list(tensor.shape), _DTYPES.index(tensor.dtype)]).encode()
    padded = bytearray(header.ljust(_HEADER_BYTES))
    dist.send(torch.frombuffer(padded, dtype=torch.uint8), dst=0, group=world.host_group)
    if name:
        dist.send(tensor.cpu(), dst=0, group=world.host_group)


def _receive(world: World, source: int) -> tuple[str, torch.Tensor] | None:
    header = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
    dist.recv(header, src=source, group=world.host_group)
    name, shape, dtype = json.loads(header.numpy().tobytes())
    if not name:
        return None
    tensor = torch.empty(shape, dtype=_DTYPES[dtype])
    dist.recv(tensor, src=source, group=world.host_group)
    return name, tensor


def _parameters(model: GPTModel, config: Any) -> Iterator[tuple[torch.nn.Parameter, Rule]]:
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, local, rest = name.split(".", 3)
            number = model.decoder.layers[int(local)].layer_number - 1
            rule = _LAYER_RULES[rest]
            names = tuple(_LAYER.format(i=number) + n for n in rule.names)
            yield parameter, Rule(rule.split, names)
        elif name == "output_layer.weight" and config.tie_word_embeddings:
            yield parameter, _TIED_OUTPUT
        else:
            yield parameter, _TOP_RULES[name]


# Under pipeline parallelism the last stage holds its own copy of a tied embedding.
_TIED_OUTPUT = Rule("vocabulary", ("model.embed_tokens.weight",))

_Reader = Callable[[list[Any], int, int, int, Any], torch.Tensor]
"""(lazy tensors, rows of this rank's parameter, tensor-parallel size and rank, config) -> the parameter."""


def _read_whole(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    return slices[0][:]


def _read_columns(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    width = slices[0].get_shape()[1] // tp
    return slices[0][:, rank * width : (rank + 1) * width]


def _read_vocabulary(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    size = slices[0].get_shape()[0]
    real = slices[0][min(rank * rows, size) : min((rank + 1) * rows, size)]
    return torch.nn.functional.pad(real, (0, 0, 0, rows - real.shape[0]))


def _read_gate_up(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    return torch.cat([_part(s, tp, rank) for s in slices])


def _read_qkv(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    groups = config.num_key_value_heads // tp
    parts = [_part(s, tp, rank) for s in slices]
    per_group = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
    return torch.cat(per_group, dim=1).reshape(-1, *parts[0].shape[1:])


_READERS: dict[Split, _Reader] = {
    "none": _read_whole,
    "columns": _read_columns,
    "vocabulary": _read_vocabulary,
    "gate_up": _read_gate_up,
    "qkv": _read_qkv,
}


def _part(tensor: Any, tp: int, rank: int) -> torch.Tensor:
    rows = tensor.get_shape()[0] // tp
    return tensor[rank * rows : (rank + 1) * rows]


def _gather(shard: torch.Tensor) -> list[torch.Tensor]:
    tp = parallel_state.get_tensor_model_parallel_world_size()
    if tp == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(tp)]
    dist.all_gather(shards, shard.contiguous(), group=parallel_state.get_tensor_model_parallel_group())
    return shards


def _joined(shards: list[torch.Tensor], split: Split, config: Any) -> list[torch.Tensor]:
    if split == "none":
        return shards
    if split == "columns":
        return [torch.cat(shards, dim=1)]
    if split == "vocabulary":
        return [torch.cat(shards)[: config.vocab_size]]
    if split == "gate_up":
        gates, ups = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(gates), torch.cat(ups)]
    assert split == "qkv", split
    fused = torch.cat(shards)
    size = head_size(config)
    grouped = fused.reshape(config.num_key_value_heads, -1, *fused.shape[1:])
    parts = grouped.split([grouped.shape[1] - 2 * size, size, size], dim=1)
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]

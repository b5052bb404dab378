"""This rank's parameters and the Hugging Face tensors they are parts of, in both directions.

The tables are in `hf/families.py`; here is what each `Split` of theirs does with a tensor.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel

from megatron_hacpo.hf.families import (
    EMBEDDING,
    FINAL_NORM,
    OUTPUT,
    Split,
    Weight,
    expert_count,
    family_of,
    head_size,
    is_tied,
    key_value_heads,
    layer_tensor,
)
from megatron_hacpo.hf.read import HFWeights


@dataclass(frozen=True)
class Part:
    """One parameter of this rank's model.

    name: in the model. layer: in the whole model, from 0; None outside the layers. expert: among all experts
    of the layer; 0 where there are none. is_copy: the last pipeline stage's copy of a tied embedding.
    """

    name: str
    tensor: torch.Tensor
    weight: Weight
    layer: int | None = None
    expert: int = 0
    is_copy: bool = False

    def hf_names(self, expert: int | None = None) -> list[str]:
        """The Hugging Face tensors it is a part of, or those of another expert."""
        if self.layer is None:
            return list(self.weight.tensors)
        number = self.expert if expert is None else expert
        return [layer_tensor(self.layer, name, number) for name in self.weight.tensors]


def parts(models: Sequence[GPTModel], config: Any) -> Iterator[Part]:
    """Every parameter of this rank, in the order of the model and of its virtual pipeline parts."""
    for model in models:
        yield from _parts(model, config)


def _parts(model: GPTModel, config: Any) -> Iterator[Part]:
    family = family_of(config)
    first_expert = local_experts(config) * parallel_state.get_expert_model_parallel_rank()
    for name, tensor in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            layer = model.decoder.layers[int(index)].layer_number - 1
            weight, expert = _find(rest, family.layer)
            if weight.is_expert:
                expert += first_expert
            yield Part(name, tensor, weight, layer, expert)
        elif name == OUTPUT.megatron and is_tied(config):
            yield Part(name, tensor, EMBEDDING, is_copy=True)
        else:
            weight, _ = _find(name, (EMBEDDING, FINAL_NORM, OUTPUT))
            yield Part(name, tensor, weight)


def _find(name: str, weights: tuple[Weight, ...]) -> tuple[Weight, int]:
    matches = [(weight, expert) for weight in weights if (expert := weight.match(name)) is not None]
    assert len(matches) == 1, f"{name}: {len(matches)} rows of the family's table have this name"
    return matches[0]


def local_experts(config: Any) -> int:
    """Experts of a layer that this rank holds."""
    return expert_count(config) // parallel_state.get_expert_model_parallel_world_size()


def load_weights(models: Sequence[GPTModel], weights: HFWeights, config: Any) -> None:
    """Fill this rank's parameters from a Hugging Face folder, reading only this rank's slices.

    Raises ValueError, naming the tensor, if the folder does not hold what `config` implies.
    """
    weights.check(config)
    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for part in parts(models, config):
            part.tensor.copy_(read_part(part, weights, config, tp=tp, rank=rank))


def read_part(part: Part, weights: HFWeights, config: Any, *, tp: int, rank: int) -> torch.Tensor:
    """The part's value on tensor-parallel rank `rank` of `tp`, in the folder's dtype."""
    if part.weight.is_expert:
        tp, rank = 1, 0
    slices = [weights.slice(name) for name in part.hf_names()]
    value = _READERS[part.weight.split](slices, part.tensor.shape[0], tp, rank, config)
    assert value.shape == part.tensor.shape, f"{part.name}: {value.shape} for {part.tensor.shape}"
    return value


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
    missing = rows - real.shape[0]
    return torch.nn.functional.pad(real, (0, 0, 0, missing)) if missing else real


def _read_gate_up(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    return torch.cat([_rows(s, tp, rank) for s in slices])


def _read_qkv(slices: list[Any], rows: int, tp: int, rank: int, config: Any) -> torch.Tensor:
    groups = key_value_heads(config) // tp
    values = [_rows(s, tp, rank) for s in slices]
    per_group = [value.reshape(groups, -1, *value.shape[1:]) for value in values]
    return torch.cat(per_group, dim=1).reshape(-1, *values[0].shape[1:])


_READERS: dict[Split, _Reader] = {
    "whole": _read_whole,
    "columns": _read_columns,
    "vocabulary": _read_vocabulary,
    "gate_up": _read_gate_up,
    "qkv": _read_qkv,
}


def _rows(tensor: Any, tp: int, rank: int) -> torch.Tensor:
    rows = tensor.get_shape()[0] // tp
    return tensor[rank * rows : (rank + 1) * rows]


def join(shards: list[torch.Tensor], split: Split, config: Any) -> list[torch.Tensor]:
    """The Hugging Face tensors, in the table's order, of a parameter's parts in the ranks' order."""
    if split == "whole":
        return shards[:1]
    if split == "columns":
        return [torch.cat(shards, dim=1) if shards[1:] else shards[0]]
    if split == "vocabulary":
        return [(torch.cat(shards) if shards[1:] else shards[0])[: config.vocab_size]]
    if split == "gate_up":
        halves = zip(*(shard.chunk(2) for shard in shards), strict=True)
        return [torch.cat(parts) if parts[1:] else parts[0] for parts in halves]
    assert split == "qkv", split
    fused = torch.cat(shards) if shards[1:] else shards[0]
    size = head_size(config)
    grouped = fused.reshape(key_value_heads(config), -1, *fused.shape[1:])
    values = grouped.split([grouped.shape[1] - 2 * size, size, size], dim=1)
    return [value.reshape(-1, *fused.shape[1:]) for value in values]

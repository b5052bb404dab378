"""What each Hugging Face model family is, as tables: adding a family is adding an entry to `FAMILIES`.

A family is a list of `Weight` rows, one per Megatron parameter, each with the Hugging Face tensors it is made
of and their shapes; and the configuration fields that must hold given values because the part that another
value would ask for is not built here. Everything else (reading, sharding, export, the check of a folder) is
derived from these rows. docs/conversion.md shows how a family is added.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["whole", "columns", "vocabulary", "qkv", "gate_up"]
"""How a parameter is put together and divided over tensor-parallel ranks:

whole: the tensor as it is, on every rank. columns: by its second dimension. vocabulary: by its rows, padded
with zeros to a multiple of the ranks. qkv: per key-value group the group's query heads, its key head and its
value head; by groups. gate_up: gate above up; by each one's rows.
"""


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter and the Hugging Face tensors it is made of.

    megatron: its name below the layer (or the model) in the local layer spec; te: in TransformerEngine's,
    where it differs. tensors: the Hugging Face tensors in Megatron's order, each with its shape as keys of
    `sizes`.
    `{e}` in a name is the expert's number: in Megatron among the rank's own, in Hugging Face among all.
    """

    megatron: str
    split: Split
    tensors: Mapping[str, tuple[str, ...]]
    te: str | None = None

    @property
    def is_expert(self) -> bool:
        """Experts are divided over expert-parallel ranks, each of them whole on one rank."""
        return "{e}" in self.megatron

    def match(self, name: str) -> int | None:
        """The expert's number (0 where there is none) if `name` is this parameter in either spec."""
        for pattern in filter(None, (self.megatron, self.te)):
            found = re.fullmatch(re.escape(pattern).replace(r"\{e\}", r"(\d+)"), name)
            if found:
                return int(found[1]) if self.is_expert else 0
        return None


@dataclass(frozen=True)
class Family:
    """layer: the parameters of one layer. required: field of config.json -> the values that are supported.
    defaults: what transformers takes for an absent one, where that is not the first supported value or, of
    heads, what follows from the other fields.
    """

    layer: tuple[Weight, ...]
    required: dict[str, tuple[Any, ...]]
    defaults: dict[str, Any] = field(default_factory=dict)

    @property
    def qkv_bias(self) -> bool:
        return any(weight in self.layer for weight in QKV_BIAS)

    @property
    def qk_norm(self) -> bool:
        return any(weight in self.layer for weight in QK_NORM)

    @property
    def has_experts(self) -> bool:
        return any(weight.is_expert for weight in self.layer)


EMBEDDING = Weight(
    "embedding.word_embeddings.weight", "vocabulary", {"model.embed_tokens.weight": ("vocab", "hidden")}
)
FINAL_NORM = Weight("decoder.final_layernorm.weight", "whole", {"model.norm.weight": ("hidden",)})
OUTPUT = Weight("output_layer.weight", "vocabulary", {"lm_head.weight": ("vocab", "hidden")})

_ATTENTION_NORM = Weight(
    "input_layernorm.weight",
    "whole",
    {"input_layernorm.weight": ("hidden",)},
    te="self_attention.linear_qkv.layer_norm_weight",
)
ATTENTION = (
    _ATTENTION_NORM,
    Weight(
        "self_attention.linear_qkv.weight",
        "qkv",
        {
            "self_attn.q_proj.weight": ("queries", "hidden"),
            "self_attn.k_proj.weight": ("keys", "hidden"),
            "self_attn.v_proj.weight": ("keys", "hidden"),
        },
    ),
    Weight(
        "self_attention.linear_proj.weight", "columns", {"self_attn.o_proj.weight": ("hidden", "queries")}
    ),
)
QKV_BIAS = (
    Weight(
        "self_attention.linear_qkv.bias",
        "qkv",
        {
            "self_attn.q_proj.bias": ("queries",),
            "self_attn.k_proj.bias": ("keys",),
            "self_attn.v_proj.bias": ("keys",),
        },
    ),
)
QK_NORM = (
    Weight("self_attention.q_layernorm.weight", "whole", {"self_attn.q_norm.weight": ("head",)}),
    Weight("self_attention.k_layernorm.weight", "whole", {"self_attn.k_norm.weight": ("head",)}),
)
_MLP_NORM = {"post_attention_layernorm.weight": ("hidden",)}
MLP = (
    Weight("pre_mlp_layernorm.weight", "whole", _MLP_NORM, te="mlp.linear_fc1.layer_norm_weight"),
    Weight(
        "mlp.linear_fc1.weight",
        "gate_up",
        {"mlp.gate_proj.weight": ("ffn", "hidden"), "mlp.up_proj.weight": ("ffn", "hidden")},
    ),
    Weight("mlp.linear_fc2.weight", "columns", {"mlp.down_proj.weight": ("hidden", "ffn")}),
)
EXPERTS = (
    Weight("pre_mlp_layernorm.weight", "whole", _MLP_NORM),
    Weight("mlp.router.weight", "whole", {"mlp.gate.weight": ("experts", "hidden")}),
    Weight(
        "mlp.experts.local_experts.{e}.linear_fc1.weight",
        "gate_up",
        {
            "mlp.experts.{e}.gate_proj.weight": ("expert_ffn", "hidden"),
            "mlp.experts.{e}.up_proj.weight": ("expert_ffn", "hidden"),
        },
        te="mlp.experts.linear_fc1.weight{e}",
    ),
    Weight(
        "mlp.experts.local_experts.{e}.linear_fc2.weight",
        "columns",
        {"mlp.experts.{e}.down_proj.weight": ("hidden", "expert_ffn")},
        te="mlp.experts.linear_fc2.weight{e}",
    ),
)

_SILU = {"hidden_act": ("silu",)}
_NO_BIAS = {"attention_bias": (False,)}
_NO_WINDOW = {"use_sliding_window": (False,)}
FAMILIES = {
    "llama": Family(ATTENTION + MLP, {**_SILU, **_NO_BIAS, "mlp_bias": (False,)}),
    "mistral": Family(
        ATTENTION + MLP,
        {**_SILU, "sliding_window": (None,)},
        {"sliding_window": 4096, "num_key_value_heads": 8},
    ),
    "qwen2": Family(ATTENTION + QKV_BIAS + MLP, {**_SILU, **_NO_WINDOW}, {"num_key_value_heads": 32}),
    "qwen3": Family(
        ATTENTION + QK_NORM + MLP,
        {**_SILU, **_NO_BIAS, **_NO_WINDOW},
        {"num_key_value_heads": 32, "head_dim": 128},
    ),
    "qwen3_moe": Family(
        ATTENTION + QK_NORM + EXPERTS,
        {**_SILU, **_NO_BIAS, **_NO_WINDOW, "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
        {"num_key_value_heads": 4},
    ),
}
"""By `model_type` of config.json. SmolLM2 and Llama 1 to 3.2 are `llama`, Qwen2.5 is `qwen2`."""

ROPE_TYPES: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
"""Those whose frequencies depend neither on the length nor come with a factor on the attention, and the
numbers that they need."""

DTYPES = ("float32", "bfloat16", "float16")
"""Of weights in a folder."""


def family_of(config: Any) -> Family:
    """The family of a config (transformers' or config.json's fields as attributes).

    Raises ValueError with the field and the value that are not supported.
    """
    family = FAMILIES.get(str(config.model_type))
    if family is None:
        raise ValueError(
            f"model_type: {short(config.model_type)} is not supported; "
            f"supported are {', '.join(sorted(FAMILIES))}"
        )
    for name, allowed in family.required.items():
        absent = family.defaults.get(name, allowed[0])
        _require(config.model_type, name, getattr(config, name, absent), allowed)
    others = {str(kind) for kind in getattr(config, "layer_types", None) or []} - {"full_attention"}
    if others:
        raise ValueError(
            f"layer_types: {sorted(others)} is not supported for {config.model_type}; "
            "needs 'full_attention' in every layer"
        )
    rope = rope_parameters(config)
    if any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"rope_parameters: {short(rope)} is not supported; needs the same in every layer")
    _require(config.model_type, "rope_type", rope["rope_type"], tuple(ROPE_TYPES))
    for source in (rope, vars(config)):
        _require(
            config.model_type,
            "partial_rotary_factor",
            source.get("partial_rotary_factor", 1.0),
            (1.0, None),
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"quantization_config: {short(config.quantization_config)} is not supported; "
            "convert the weights to bfloat16 first"
        )
    return family


def _require(model_type: str, name: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        choices = " or ".join(repr(choice) for choice in allowed)
        raise ValueError(f"{name}: {short(value)} is not supported for {model_type}; needs {choices}")


def short(value: Any) -> str:
    """A value for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary parameters with `rope_theta` and `rope_type`, as transformers 5 (`rope_parameters`) and 4
    (`rope_theta`, `rope_scaling`) write them."""
    stated = getattr(config, "rope_parameters", None)
    if stated is None:
        stated = getattr(config, "rope_scaling", None) or {}
    kind = stated.get("rope_type", stated.get("type", "default"))
    theta = stated.get("rope_theta", getattr(config, "rope_theta", 10000.0))
    return {**stated, "rope_theta": theta, "rope_type": kind}


def is_tied(config: Any) -> bool:
    """Whether the output layer is the embedding."""
    return bool(getattr(config, "tie_word_embeddings", False))


def key_value_heads(config: Any) -> int:
    """Heads of keys and of values."""
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def head_size(config: Any) -> int:
    """Channels per attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def expert_count(config: Any) -> int:
    """Experts per layer (`num_experts` of transformers 4, `num_local_experts` of 5); 0 without experts."""
    if not family_of(config).has_experts:
        return 0
    stated = getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None)
    return int(stated or 0)


def sizes(config: Any) -> dict[str, int]:
    """What the names of dimensions in the tables stand for."""
    head = head_size(config)
    known = {
        "vocab": config.vocab_size,
        "hidden": config.hidden_size,
        "head": head,
        "queries": config.num_attention_heads * head,
        "keys": key_value_heads(config) * head,
        "ffn": config.intermediate_size,
    }
    if family_of(config).has_experts:
        known |= {"experts": expert_count(config), "expert_ffn": config.moe_intermediate_size}
    return known


def divided_sizes(config: Any) -> dict[str, dict[str, int]]:
    """By parallel dimension, the fields of config.json that its size must divide."""
    divided = {
        "tensor": {
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": key_value_heads(config),
            "intermediate_size": config.intermediate_size,
        },
        "pipeline": {"num_hidden_layers": config.num_hidden_layers},
        "expert": {"the number of experts": max(1, expert_count(config))},
    }
    if family_of(config).has_experts:
        del divided["tensor"]["intermediate_size"]
    return divided


def model_weights(config: Any) -> tuple[Weight, ...]:
    """The parameters outside the layers."""
    return (EMBEDDING, FINAL_NORM) if is_tied(config) else (EMBEDDING, FINAL_NORM, OUTPUT)


def layer_tensor(layer: int, name: str, expert: int = 0) -> str:
    """The full name of a Hugging Face tensor of a layer, both counted from 0."""
    return f"model.layers.{layer}.{name.replace('{e}', str(expert))}"


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    return dict(each_tensor(config))


def each_tensor(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """`tensor_shapes`, one by one."""
    known = sizes(config)
    for weight in model_weights(config):
        for name, shape in weight.tensors.items():
            yield name, tuple(known[size] for size in shape)
    for layer in range(config.num_hidden_layers):
        for weight in family_of(config).layer:
            for expert in range(known["experts"] if weight.is_expert else 1):
                for name, shape in weight.tensors.items():
                    yield layer_tensor(layer, name, expert), tuple(known[size] for size in shape)

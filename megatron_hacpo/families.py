"""What each Hugging Face model family is, as a table: adding a family is adding a row.

A row says which optional parts the family's layers have, and which configuration fields must hold a given
value because the part that another value would ask for is not built here.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """qkv_bias: biases on the query, key and value projections. qk_norm: RMSNorm per query and key head.
    tied_by_default: what transformers takes where config.json says nothing of `tie_word_embeddings`.
    required: field of config.json -> the values that are supported; an absent field is fine.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    tied_by_default: bool = False
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)


_SILU = {"hidden_act": ("silu",)}
FAMILIES = {
    "llama": Family(
        required={
            **_SILU,
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "partial_rotary_factor": (1.0, None),
        }
    ),
    "mistral": Family(required={**_SILU, "sliding_window": (None,)}),
    "qwen2": Family(qkv_bias=True, required={**_SILU, "use_sliding_window": (False,)}),
    "qwen3": Family(
        qk_norm=True, required={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)}
    ),
}


def family_of(config: Any) -> Family:
    """The family of a transformers config; ValueError names the field and value that are not supported."""
    family = FAMILIES.get(str(config.model_type))
    if family is None:
        raise ValueError(
            f"model_type: {config.model_type!r} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    for name, allowed in family.required.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            raise ValueError(
                f"{name}: {value!r} is not supported for {config.model_type}; needs {allowed[0]!r}"
            )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "quantization_config: quantized weights are not supported; convert to bfloat16 first"
        )
    return family


def head_size(config: Any) -> int:
    """Channels per attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def tensor_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a checkpoint of this config holds."""
    family, size, hidden = family_of(config), head_size(config), config.hidden_size
    queries = config.num_attention_heads * size
    keys = (getattr(config, "num_key_value_heads", None) or config.num_attention_heads) * size
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (config.intermediate_size, hidden),
        "mlp.up_proj.weight": (config.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, config.intermediate_size),
    }
    if family.qkv_bias:
        layer |= {f"self_attn.{x}_proj.bias": (queries if x == "q" else keys,) for x in "qkv"}
    if family.qk_norm:
        layer |= {f"self_attn.{x}_norm.weight": (size,) for x in "qk"}
    shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    for number in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    if not getattr(config, "tie_word_embeddings", family.tied_by_default):
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes

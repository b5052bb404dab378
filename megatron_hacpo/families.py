"""What each Hugging Face model family is, as a table: adding a family is adding a row.

A row says which optional parts the family's layers have, and which configuration fields must hold a given
value because the part that another value would ask for is not built here.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """qkv_bias: biases on the query, key and value projections. qk_norm: RMSNorm per query and key head.
    required: field of config.json -> the values that are supported; an absent field is fine.
    """

    qkv_bias: bool = False
    qk_norm: bool = False
    required: dict[str, tuple[Any, ...]] = field(default_factory=dict)


_SILU = {"hidden_act": ("silu",)}
FAMILIES = {
    "llama": Family(required={**_SILU, "attention_bias": (False,), "mlp_bias": (False,)}),
    "mistral": Family(required={**_SILU, "sliding_window": (None,)}),
    "qwen2": Family(qkv_bias=True, required={**_SILU, "use_sliding_window": (False,)}),
    "qwen3": Family(
        qk_norm=True, required={**_SILU, "attention_bias": (False,), "use_sliding_window": (False,)}
    ),
}


def family_of(config: Any) -> Family:
    """The family of a transformers config; ValueError names the field and value that are not supported."""
    family = FAMILIES.get(config.model_type)
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

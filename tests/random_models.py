"""Small random models of every supported kind, as Hugging Face folders."""

from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

# Two tensor-parallel ranks do not divide the vocabulary.
SIZES = {
    "vocab_size": 37,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
SIZES_2 = {name: size for name, size in SIZES.items() if name != "head_dim"}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
CONFIGS = {
    "qwen3 tied": Qwen3Config(**SIZES, tie_word_embeddings=True),
    "qwen3 untied": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES_2, tie_word_embeddings=True),
    "qwen2 untied": Qwen2Config(**SIZES_2, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama3 rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "linear rope": LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    ),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "multi-head": LlamaConfig(**{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 2}),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "qwen3 moe": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3 moe tied": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False, tie_word_embeddings=True),
}


def random_model(
    config: PretrainedConfig, folder: Path, dtype: torch.dtype = torch.float32, scale: float = 0.2
) -> torch.nn.Module:
    """A random model, saved in `folder`; with the default scale every part of the network matters."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, scale)
    model.to(dtype).save_pretrained(folder)
    return model.to(dtype)

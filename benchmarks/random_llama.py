"""A random Llama of 0.11 billion parameters in float32, for what moves the weights of a whole model."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_hacpo.config import OptimizerConfig
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World

SHAPE = LlamaConfig(
    vocab_size=32_000,
    hidden_size=768,
    intermediate_size=2048,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=12,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def write_folder(folder: Path) -> None:
    """As a Hugging Face folder; other weights with every call."""
    LlamaForCausalLM(SHAPE).save_pretrained(folder)


def make_policy(folder: Path, world: World) -> Policy:
    """The trainable model of such a folder."""
    return Policy(
        folder,
        world=world,
        dtype=torch.float32,
        optimizer=OptimizerConfig(),
        steps=1,
        temperature=1.0,
        microbatch_tokens=1024,
        keep_reference=False,
    )

"""A Megatron GPTModel that computes what a Hugging Face causal LM computes."""

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_hacpo.families import family_of, head_size
from megatron_hacpo.megatron.layers import HAVE_TE, layer_spec
from megatron_hacpo.megatron.runtime import Layout


def hf_config(folder: Path) -> Any:
    """The transformers config of a Hugging Face folder; never runs code from the folder."""
    return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def transformer_config(config: Any, *, layout: Layout, dtype: torch.dtype) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face model.

    Gradients are summed over micro-batches and data-parallel ranks and nothing else
    (`calculate_per_token_loss`): the objective divides by the nominal number of sequences itself.
    """
    family = family_of(config)
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=family.qk_norm,
        add_qkv_bias=family.qkv_bias,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_dropout=0.0,  # Megatron's defaults are 0.1
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, experts or not
        calculate_per_token_loss=True,
        use_cpu_initialization=not on_gpu,
        apply_rope_fusion=HAVE_TE,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
    )


def padded_vocab_size(config: Any, layout: Layout) -> int:
    """The vocabulary, padded so that every tensor-parallel rank holds equally many rows."""
    return math.ceil(config.vocab_size / layout.tensor) * layout.tensor


def build(config: Any, megatron_config: TransformerConfig, layout: Layout) -> GPTModel:
    """This rank's part of the model, with random weights, on the device that Megatron uses."""
    rope = rope_parameters(config)
    model = GPTModel(
        megatron_config,
        layer_spec(megatron_config),
        vocab_size=padded_vocab_size(config, layout),
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=True,
        share_embeddings_and_output_weights=bool(config.tie_word_embeddings),
        position_embedding_type="rope",
        rotary_base=rope["rope_theta"],
    )
    kind = rope.get("rope_type", "default")
    if kind != "default":
        # Megatron hard-codes Llama 3's constants; transformers computes the frequencies of every kind.
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        if attention_factor != 1.0:
            raise ValueError(f"rope_type: {kind!r} scales attention by {attention_factor}; not supported")
        model.rotary_pos_emb.inv_freq = inv_freq.to(model.rotary_pos_emb.inv_freq)
    return model.cuda() if torch.cuda.is_available() else model


def rope_parameters(config: Any) -> dict[str, Any]:
    """Rotary parameters under transformers 5 (`rope_parameters`) and 4 (`rope_theta`, `rope_scaling`)."""
    if getattr(config, "rope_parameters", None):
        return dict(config.rope_parameters)
    scaling = getattr(config, "rope_scaling", None) or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**scaling, "rope_theta": config.rope_theta, "rope_type": kind}

"""A Megatron GPTModel that computes what a Hugging Face causal LM computes."""

import math
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_hacpo.hf.families import (
    expert_count,
    family_of,
    head_size,
    is_tied,
    key_value_heads,
    rope_parameters,
)
from megatron_hacpo.megatron.layers import layer_spec, uses_transformer_engine
from megatron_hacpo.megatron.runtime import Layout


def hf_config(folder: Path) -> Any:
    """The transformers config of a Hugging Face folder; never runs code from the folder.

    Raises ValueError for a config.json that transformers refuses.
    """
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of many types: AttributeError, KeyError and transformers' own
        reason = str(error).strip().splitlines()[-1].strip()
        raise ValueError(f"{folder}: config.json: refused by transformers ({reason}); correct it") from error


Recompute = Literal["none", "selective", "full"]


def transformer_config(
    config: Any,
    *,
    layout: Layout,
    dtype: torch.dtype,
    recompute: Recompute = "none",
    router_aux_loss_coef: float = 0.0,
) -> TransformerConfig:
    """Megatron's configuration of a Hugging Face model.

    recompute: what backward computes again instead of keeping it: nothing, attention, whole layers.
    router_aux_loss_coef: of the Switch Transformer's load balancing loss (`LoadBalance` scales it).
    Gradients are summed over micro-batches and data-parallel ranks and nothing else
    (`calculate_per_token_loss`): the objective divides by the nominal number of sequences itself.
    """
    family = family_of(config)
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=key_value_heads(config),
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
        sequence_parallel=layout.divides_sequence,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        # With Megatron's defaults an interleaved pipeline of two stages is silently wrong.
        overlap_p2p_comm=layout.virtual_pipeline > 1,
        batch_p2p_comm=layout.virtual_pipeline == 1,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=1,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, experts or not
        calculate_per_token_loss=True,
        use_cpu_initialization=not torch.cuda.is_available(),
        apply_rope_fusion=uses_transformer_engine(dtype),
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **_RECOMPUTE[recompute],
        **(_expert_settings(config, router_aux_loss_coef, dtype) if family.has_experts else {}),
    )


_RECOMPUTE: dict[Recompute, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def _expert_settings(config: Any, router_aux_loss_coef: float, dtype: torch.dtype) -> dict[str, Any]:
    """Routing as transformers does it: softmax in float32 over all experts, the best, and their sum made 1
    where the model asks for it, which is the softmax over the best alone."""
    return {
        "num_moe_experts": expert_count(config),
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if router_aux_loss_coef else "none",
        "moe_aux_loss_coeff": router_aux_loss_coef,
        "moe_grouped_gemm": uses_transformer_engine(dtype),
        # The other way back from the experts adds in an order that changes on GPUs, and with it own ratios.
        "moe_permute_fusion": uses_transformer_engine(dtype),
    }


def padded_vocab_size(config: Any, layout: Layout) -> int:
    """The vocabulary, padded so that every tensor-parallel rank holds equally many rows."""
    return math.ceil(config.vocab_size / layout.tensor) * layout.tensor


class HiddenStatesModel(GPTModel):
    """A GPTModel that stops at the final hidden states [t, 1, h], of which log-probs are computed without all
    logits (`logprob.py`); its output layer is there for its weight."""

    def _postprocess(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return hidden_states

    @property
    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [padded vocabulary / tensor-parallel size, h]."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def build(config: Any, megatron_config: TransformerConfig, layout: Layout) -> list[HiddenStatesModel]:
    """This rank's parts of the model, on the device that Megatron uses, with random weights."""
    virtual = layout.virtual_pipeline
    return [
        _build_part(config, megatron_config, layout, part if virtual > 1 else None) for part in range(virtual)
    ]


def _build_part(
    config: Any, megatron_config: TransformerConfig, layout: Layout, vp_stage: int | None
) -> HiddenStatesModel:
    place = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    model = _gpt_model(
        config,
        megatron_config,
        vocab_size=padded_vocab_size(config, layout),
        pre_process=parallel_state.is_pipeline_first_stage(**place),
        post_process=parallel_state.is_pipeline_last_stage(**place),
        vp_stage=vp_stage,
    )
    kind = rope_parameters(config)["rope_type"]
    if kind != "default":
        # Megatron hard-codes Llama 3's constants; transformers computes the frequencies of every kind.
        inv_freq, attention_factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        assert attention_factor == 1.0, kind
        model.rotary_pos_emb.inv_freq = inv_freq.to(model.rotary_pos_emb.inv_freq)
    return model.cuda() if torch.cuda.is_available() else model


def build_without_weights(config: Any, *, dtype: torch.dtype, layout: Layout) -> HiddenStatesModel:
    """The whole model on the meta device: names, shapes and how they are divided, in a world of one rank.

    It has the modules of the local spec, since checkpoints are the same for both; its vocabulary is padded as
    `layout` wants it.
    """
    megatron_config = transformer_config(config, layout=Layout(), dtype=dtype)
    megatron_config.use_cpu_initialization = True  # else Megatron asks for a GPU
    megatron_config.perform_initialization = False  # there is nothing to initialize
    megatron_config.moe_grouped_gemm = megatron_config.moe_permute_fusion = False
    with torch.device("meta"):
        return _gpt_model(
            config, megatron_config, vocab_size=padded_vocab_size(config, layout), transformer_engine=False
        )


def _gpt_model(
    config: Any,
    megatron_config: TransformerConfig,
    *,
    vocab_size: int,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    transformer_engine: bool | None = None,
) -> HiddenStatesModel:
    return HiddenStatesModel(
        megatron_config,
        layer_spec(megatron_config, transformer_engine=transformer_engine, vp_stage=vp_stage),
        vocab_size=vocab_size,
        max_sequence_length=config.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=is_tied(config),
        position_embedding_type="rope",
        rotary_base=rope_parameters(config)["rope_theta"],
        vp_stage=vp_stage,
    )

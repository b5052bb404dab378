"""The layer spec: TransformerEngine where it is installed, otherwise Megatron's local modules with our
attention and norm, which Megatron's own local ones cannot replace: they know neither packed sequences nor
sequence parallelism.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

HAVE_TE = torch.cuda.is_available() and find_spec("transformer_engine") is not None


def uses_transformer_engine(dtype: torch.dtype) -> bool:
    """In bfloat16 alone: for float32 TransformerEngine has no fused attention over packed sequences, and its
    matrix products are rounded to TF32."""
    return HAVE_TE and dtype is torch.bfloat16


@dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's packed-sequence parameters, and where each token lies in the padded [n, longest] grid.

    slots: int64 [t], sequence * longest + position, of the tokens of all context-parallel ranks, rank by
    rank.
    """

    slots: torch.Tensor = None  # type: ignore[assignment]


class RMSNorm(torch.nn.Module):
    """RMSNorm for the local spec, with the sequence-parallel mark that WrappedTorchNorm refuses to set."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, self.eps)


class PackedAttention(torch.nn.Module):
    """Causal attention over packed sequences [t, heads, head_size] with torch's fused kernel.

    The tokens are laid out as [n, longest] and padded on the right: under a causal mask no real token sees
    the padding, so no mask tensor is needed and one kernel call serves all sequences. Context-parallel ranks
    gather the tokens of all and keep the rows of their own: right, and wasteful; TransformerEngine's is not.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.context = parallel_state.get_context_parallel_group()

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> torch.Tensor:
        """[t, heads * head_size]."""
        own = len(query) * self.context.rank() + torch.arange(len(query), device=query.device)
        query, key, value = (self._over_context(x) for x in (query, key, value))
        n = len(packed_seq_params.cu_seqlens_q) - 1
        longest = packed_seq_params.max_seqlen_q
        slots = packed_seq_params.slots

        def padded(x: torch.Tensor) -> torch.Tensor:
            grid = x.new_zeros(n * longest, *x.shape[1:]).index_copy(0, slots, x)
            return grid.view(n, longest, *x.shape[1:]).transpose(1, 2)

        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            padded(query), padded(key), padded(value), is_causal=True, scale=self.scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).reshape(n * longest, -1).index_select(0, slots[own])

    def _over_context(self, x: torch.Tensor) -> torch.Tensor:
        """The tokens of all context-parallel ranks; backward adds up what each rank's rows made of them."""
        if self.context.size() == 1:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.context)


def layer_spec(
    config: TransformerConfig, *, transformer_engine: bool | None = None, vp_stage: int | None = None
) -> Any:
    """The decoder's layers (and final norm) for `GPTModel(transformer_layer_spec=...)`.

    transformer_engine: whether its modules are used; None: as `uses_transformer_engine` says.
    """
    if transformer_engine is None:
        transformer_engine = uses_transformer_engine(config.params_dtype)
    kind = {
        "num_experts": config.num_moe_experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
    }
    if transformer_engine:
        return get_gpt_layer_with_transformer_engine_spec(**kind)
    layer: ModuleSpec = get_gpt_layer_local_spec(**kind, normalization="RMSNorm")
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[layer] * get_num_layers_to_build(config, vp_stage=vp_stage), layer_norm=RMSNorm
    )

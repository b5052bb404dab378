"""The auxiliary loss that balances experts (Switch Transformer), at a weight that no layout changes."""

from collections.abc import Sequence

import torch
from megatron.core.package_info import MAJOR, MINOR
from megatron.core.transformer.moe.moe_utils import (
    clear_aux_losses_tracker,
    get_moe_layer_wise_logging_tracker,
    reduce_aux_losses_tracker_across_ranks,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hacpo.megatron.packing import PackedMicroBatch
from megatron_hacpo.megatron.runtime import World

_NAME = "load_balancing_loss"  # Megatron's, in its tracker
_COUNTS_EVERY_RANK = (MAJOR, MINOR) >= (0, 19)


class LoadBalance:
    """coef * mean over an update's tokens of L, where L of a token is its micro-batch's balance loss.

    L = E sum_e f_e P_e over the E experts: f_e the share of the micro-batch's choices that fell on expert e,
    P_e its mean probability (Megatron's `switch_load_balancing_loss_func`, over the tensor- and
    context-parallel ranks of the micro-batch; padding counts). 1 where all experts are used alike.

    Under `calculate_per_token_loss` each rank of a micro-batch adds coefficient * its part of L * the tokens
    it holds (since 0.19: that all these ranks hold), meant for a later division by a token count that does
    not happen here. The coefficient that routers read is therefore set anew for each update.
    """

    def __init__(self, config: TransformerConfig, world: World, coef: float) -> None:
        self._config = config
        self._world = world
        self._coef = coef
        self._micro_batches = 0

    def start(self, micro_batches: Sequence[PackedMicroBatch]) -> None:
        """Before an update: weigh each micro-batch with its share of the update's tokens."""
        layout = self._world.layout
        parts = layout.tensor if layout.divides_sequence else 1  # of the tokens of a context-parallel rank
        ranks = layout.tensor * layout.context if _COUNTS_EVERY_RANK else 1
        local = sum(m.tokens.shape[1] for m in micro_batches)
        tokens = torch.tensor(ranks * local, device=self._world.device)
        self._config.moe_aux_loss_coeff = self._coef * parts / int(self._world.sum_over_data(tokens))
        self._micro_batches = len(micro_batches)
        if _NAME in get_moe_layer_wise_logging_tracker():
            clear_aux_losses_tracker()

    def mean(self) -> float:
        """After an update: L, averaged over layers, micro-batches and data-parallel ranks. Collective."""
        reduce_aux_losses_tracker_across_ranks([_NAME])
        return float(get_moe_layer_wise_logging_tracker()[_NAME]["values"].mean()) / self._micro_batches

"""An agent's AdamW and its learning-rate schedule, built from Megatron's."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_hacpo import config as settings
from megatron_hacpo.megatron.layers import HAVE_TE


def build_optimizer(
    optimizer: settings.OptimizerConfig,
    parts: Sequence[DistributedDataParallel],
    dtype: torch.dtype,
    device: torch.device,
) -> Any:
    """Megatron's optimizer of the model's parts. dtype, device: of the model.

    Raises ValueError where the settings need what is not installed.
    """
    offload = _offloads(optimizer, device)
    config = OptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=optimizer.distributed,
        optimizer_cpu_offload=offload,
        optimizer_offload_fraction=1.0,
        use_precision_aware_optimizer=offload,  # else the float32 weights would stay on the device
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )
    return get_megatron_optimizer(config, list(parts))


def _offloads(optimizer: settings.OptimizerConfig, device: torch.device) -> bool:
    """Whether float32 weights and optimizer states leave the device for host memory, where a CPU's are."""
    if not optimizer.cpu_offload or device.type == "cpu":
        return False
    if not HAVE_TE:
        raise ValueError(
            "optimizer.cpu_offload: true: megatron-core needs TransformerEngine; install the extra `gpu`"
        )
    return True


def build_schedule(
    megatron_optimizer: Any, optimizer: settings.OptimizerConfig, steps: int
) -> OptimizerParamScheduler:
    """Of the learning rate, which Megatron's optimizer reads from it. steps: of the whole run."""
    return OptimizerParamScheduler(
        megatron_optimizer,
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_steps=optimizer.warmup_steps,
        lr_decay_steps=max(steps, optimizer.warmup_steps + 1),
        lr_decay_style=optimizer.schedule,
        start_wd=optimizer.weight_decay,
        end_wd=optimizer.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
    )


def single_optimizers(megatron_optimizer: Any) -> list[Any]:
    """Those that an optimizer consists of: dense weights and experts may have one each."""
    return list(getattr(megatron_optimizer, "chained_optimizers", [megatron_optimizer]))

"""The model that learns: log-probs and updates through Megatron's forward-backward schedule."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_hacpo import config as settings
from megatron_hacpo.algorithm.segments import segment_sum
from megatron_hacpo.hf.read import HFWeights, is_checkpoint
from megatron_hacpo.megatron import batching
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.conversion import load_weights, parts
from megatron_hacpo.megatron.load_balance import LoadBalance
from megatron_hacpo.megatron.logprob import response_log_probs
from megatron_hacpo.megatron.model import Recompute, build, hf_config, transformer_config
from megatron_hacpo.megatron.offload import Offload, TrainerMemory
from megatron_hacpo.megatron.optimizer import build_optimizer, build_schedule, single_optimizers
from megatron_hacpo.megatron.packing import Division, PackedMicroBatch, TokenSequence, pack
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.megatron.stream import hf_tensors, to_leader
from megatron_hacpo.megatron.torch_dist import Writing
from megatron_hacpo.megatron.training_state import TrainingState

Gradient = list[list[torch.Tensor]]
"""fp32, per Megatron optimizer: what this rank counts in the norm, so that over the optimizer's ranks each
element appears once."""

Loss = Callable[[PackedMicroBatch, torch.Tensor], tuple[torch.Tensor, Any]]
"""(micro-batch, log-probs of its response tokens, float32 [r]) -> (loss to be summed, what to hand back)."""


@dataclass(frozen=True)
class LogProbs:
    """Log-probs of the sequences of one mini-batch under one set of weights.

    tokens: per local micro-batch, float32 [r] on the last pipeline stage (empty elsewhere), in the order in
    which the update will see them. sums: float32 [n], per sequence, on every rank. entropy: of the model at
    the response tokens, nats, summed over all of them, on every rank; None where it was not asked for.
    """

    tokens: list[torch.Tensor]
    sums: torch.Tensor
    entropy: float | None = None


@dataclass(frozen=True)
class Update:
    """grad_norm: before clipping. applied: False when it or the loss was not finite.
    outputs: what the loss handed back per local micro-batch (last pipeline stage only).
    load_balance: the routers' auxiliary loss without its coefficient, mean over layers and micro-batches: 1
    where all experts are used alike; None without one. gradient: before clipping, where it was asked for.
    """

    grad_norm: float
    applied: bool
    outputs: list[Any]
    load_balance: float | None = None
    gradient: Gradient | None = None


class Policy:
    """One agent's trainable Megatron model, its optimizer, and (for a KL penalty) its frozen reference.

    updates: optimizer steps made, over all RL steps. memory: of its device, for others to use.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World,
        dtype: torch.dtype,
        optimizer: settings.OptimizerConfig,
        steps: int,
        temperature: float,
        microbatch_tokens: int,
        keep_reference: bool,
        recompute: Recompute = "none",
        router_aux_loss_coef: float = 0.0,
        offload: Offload = "none",
    ) -> None:
        """microbatch_tokens: of a forward pass on one rank. recompute: as in `transformer_config`.
        router_aux_loss_coef: weight of the loss that balances experts; 0 for a model without experts.
        offload: as of `TrainerMemory`.
        """
        self.world = world
        self.hf_config = hf_config(folder)
        self._temperature = temperature
        layout = world.layout
        self._budget = microbatch_tokens * layout.context
        self._division = Division(
            layout.context,
            parallel_state.get_context_parallel_rank(),
            layout.tensor if layout.divides_sequence else 1,
        )
        megatron_config = transformer_config(
            self.hf_config,
            layout=layout,
            dtype=dtype,
            recompute=recompute,
            router_aux_loss_coef=router_aux_loss_coef,
        )
        self._routers = (
            LoadBalance(megatron_config, world, router_aux_loss_coef) if router_aux_loss_coef else None
        )
        self._cost = _cost(megatron_config, self.hf_config.vocab_size)
        self.modules = build(self.hf_config, megatron_config, layout)
        if is_checkpoint(folder):
            load_checkpoint(self.modules, folder)
        else:
            load_weights(self.modules, HFWeights(folder), self.hf_config)
        self._reference = self._weights() if keep_reference else None

        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=dtype is torch.bfloat16, use_distributed_optimizer=optimizer.distributed
        )
        self._parts = [
            DistributedDataParallel(megatron_config, ddp, part, disable_bucketing=number > 0)
            for number, part in enumerate(self.modules)
        ]
        for part in self._parts:
            part.train()  # there is no dropout; one mode for log-probs and updates keeps them equal
        self._optimizer = build_optimizer(optimizer, self._parts, dtype, world.device)
        self._schedule = build_schedule(self._optimizer, optimizer, steps)
        self.memory = TrainerMemory(offload, self._parts, self._optimizer, world.device)
        self._state = TrainingState(self.modules, self._optimizer, world)
        self.updates = 0
        megatron_config.finalize_model_grads_func = _sum_model_grads
        megatron_config.grad_scale_func = self._optimizer.scale_loss

    @property
    def learning_rate(self) -> float:
        """Of the current RL step."""
        return float(self._optimizer.param_groups[0]["lr"])

    def advance_learning_rate(self) -> None:
        """Advance the learning-rate schedule, which counts RL steps, not updates."""
        self._schedule.step(increment=1)

    def plan(self, sequences: Sequence[TokenSequence]) -> batching.MicroBatchPlan:
        """The micro-batches in which these sequences are computed, on every data-parallel rank."""
        layout = self.world.layout
        return batching.plan(
            [self._division.padded(len(s)) for s in sequences],
            budget=self._budget,
            ranks=layout.data,
            cost=self._cost,
            multiple_of=layout.pipeline if layout.virtual_pipeline > 1 else 1,
        )

    def log_probs(
        self,
        sequences: Sequence[TokenSequence],
        plan: batching.MicroBatchPlan,
        *,
        with_entropy: bool = False,
    ) -> LogProbs:
        """Log-probs under the current weights, by the very forward pass that `update` runs on this plan."""
        entropies: list[torch.Tensor] | None = [] if with_entropy else None

        def hand_back(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
            return log_probs.sum(), (micro, log_probs)  # the schedule wants a loss; nobody uses it

        with torch.no_grad():
            outputs = self._run(
                self._micro_batches(sequences, plan), hand_back, forward_only=True, entropies=entropies
            )
        sums = torch.zeros(len(sequences), dtype=torch.float32, device=self.world.device)
        for micro, log_probs in outputs:
            if micro.rows:
                sums[list(micro.rows)] = segment_sum(log_probs, micro.segments, len(micro.rows))
        sums = self.world.from_last_stage(self.world.sum_over_data(sums))
        entropy = None if entropies is None else self._total(sum(x.double().sum() for x in entropies))
        return LogProbs([log_probs for _, log_probs in outputs], sums.cpu(), entropy)

    def _total(self, value: torch.Tensor | float) -> float:
        """The last stage's values, summed over data-parallel ranks, on every rank."""
        total = torch.zeros((), dtype=torch.float64, device=self.world.device) + value
        return float(self.world.from_last_stage(self.world.sum_over_data(total)))

    def update(
        self,
        sequences: Sequence[TokenSequence],
        plan: batching.MicroBatchPlan,
        loss: Loss,
        *,
        keep_gradient: bool = False,
    ) -> Update:
        """One optimizer step on the sum of `loss` over the micro-batches of all data-parallel ranks.

        A loss or gradient norm that is not finite leaves weights and optimizer state as they are.
        """
        total, outputs = self.forward_backward(sequences, plan, loss)
        # `step` does both again and then clips; it lacks a look at the norm before the weights change.
        self._optimizer.prepare_grads()
        grad_norm = float(self._optimizer.get_grad_norm())
        gradient = self._gradient() if keep_gradient else None
        applied = math.isfinite(grad_norm) and math.isfinite(total)
        if applied:
            self._optimizer.step()
            self.updates += 1
        load_balance = None if self._routers is None else self._routers.mean()
        return Update(grad_norm, applied, outputs, load_balance, gradient)

    def forward_backward(
        self, sequences: Sequence[TokenSequence], plan: batching.MicroBatchPlan, loss: Loss
    ) -> tuple[float, list[Any]]:
        """Leave the gradient of the sum of `loss` over all micro-batches in the buffers of Megatron's
        DistributedDataParallel. Returns the sum, on every rank, and what the loss handed back."""
        micro_batches = self._micro_batches(sequences, plan)
        if self._routers is not None:
            self._routers.start(micro_batches)
        total = torch.zeros((), device=self.world.device)

        def counted(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, Any]:
            value, output = loss(micro, log_probs)
            total.add_(value.detach())
            return value, output

        for part in self._parts:
            part.zero_grad_buffer()
        self._optimizer.zero_grad()
        outputs = self._run(micro_batches, counted, forward_only=False)
        return float(self.world.from_last_stage(self.world.sum_over_data(total))), outputs

    def gradient_cosine(self, a: Gradient, b: Gradient) -> float | None:
        """cos(a, b) of two gradients over all ranks; None if one is 0. Collective."""
        total = torch.zeros(3, dtype=torch.float64, device=self.world.device)
        for optimizer, mine, other in zip(single_optimizers(self._optimizer), a, b, strict=True):
            part = torch.zeros_like(total)
            for x, y in zip(mine, other, strict=True):
                part += torch.stack([(p.double() * q.double()).sum() for p, q in ((x, y), (x, x), (y, y))])
            torch.distributed.all_reduce(part, group=optimizer.get_grad_stats_parallel_group())
            total += part
        dot, first, second = total.tolist()
        return dot / math.sqrt(first * second) if first * second > 0.0 else None

    def _gradient(self) -> Gradient:
        return [[g.clone() for g in o.get_grads_for_grad_norm()] for o in single_optimizers(self._optimizer)]

    def state_writing(self, folder: Path, *, copy: bool) -> Writing:
        """What writes weights and optimizer states into `folder`; see `TrainingState.writing`."""
        return self._state.writing(folder, self.updates, copy=copy)

    def start_after(self, step: int) -> None:
        """Put the learning-rate schedule of a new policy where it is after RL step `step`."""
        self._schedule.step(increment=step)

    def load_state(self, folder: Path, *, updates: int) -> None:
        """Go on as the policy that wrote `folder` after `updates` optimizer steps."""
        self._state.load(folder, updates)
        self.updates = updates

    def stage_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) of this pipeline stage; every rank of it must exhaust it."""
        return hf_tensors(parts(self.modules, self.hf_config), self.hf_config)

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full tensor) on the leader; every rank must exhaust it."""
        return to_leader(self.stage_tensors(), self.world)

    def local_rows(self, plan: batching.MicroBatchPlan) -> list[list[int]]:
        """The sequences of each of this data-parallel rank's micro-batches."""
        return plan[parallel_state.get_data_parallel_rank()]

    def _micro_batches(
        self, sequences: Sequence[TokenSequence], plan: batching.MicroBatchPlan
    ) -> list[PackedMicroBatch]:
        return [
            pack(index, rows, sequences, self.world.device, self._division)
            for index, rows in enumerate(self.local_rows(plan))
        ]

    def _run(
        self,
        micro_batches: list[PackedMicroBatch],
        loss: Loss,
        *,
        forward_only: bool,
        entropies: list[torch.Tensor] | None = None,
    ) -> list[Any]:
        """`loss` summed over the micro-batches, in Megatron's schedule; the last stage gets its outputs.

        entropies: where to append each micro-batch's, float32 [r].
        """

        def finish(micro: PackedMicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Any]:
            log_probs, entropy = response_log_probs(
                self.modules[-1],
                hidden,
                micro,
                temperature=self._temperature,
                vocab_size=self.hf_config.vocab_size,
                with_entropy=entropies is not None,
            )
            if entropies is not None and entropy is not None:
                entropies.append(entropy)
            value, output = loss(micro, log_probs)
            no_tokens = torch.zeros((), dtype=torch.int)  # the loss is normalised: nothing is to be counted
            return value, no_tokens, output

        def forward(batches: Iterator[PackedMicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            micro = next(batches)
            hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.attention)
            return hidden, partial(finish, micro)

        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(micro_batches) for _ in self._parts],
            model=self._parts,
            num_microbatches=len(micro_batches),
            seq_length=max(m.tokens.shape[1] for m in micro_batches),
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _weights(self) -> list[torch.Tensor]:
        return [p.detach().to("cpu", copy=True) for p in self.parameters()]

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """Of this rank's parts of the model."""
        for part in self.modules:
            yield from part.parameters()

    @contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Within, `log_probs` are those under the weights that training started from."""
        assert self._reference is not None, "the policy was built without a reference"
        current = self._weights()
        self._put(self._reference)
        try:
            yield
        finally:
            self._put(current)

    @torch.no_grad()
    def _put(self, weights: list[torch.Tensor]) -> None:
        for parameter, value in zip(self.parameters(), weights, strict=True):
            parameter.copy_(value)


def _cost(config: TransformerConfig, vocab_size: int) -> batching.Cost:
    """Work of a sequence, for balance between ranks."""
    ffn = config.ffn_hidden_size
    if config.num_moe_experts is not None:
        ffn = config.moe_router_topk * config.moe_ffn_hidden_size
    return batching.Cost.of_model(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        kv_channels=config.kv_channels,
        ffn_hidden_size=ffn,
        vocab_size=vocab_size,
    )


def _sum_model_grads(model: list[torch.nn.Module], num_tokens: Any = None, **kwargs: Any) -> None:
    """Megatron's gradient reductions without its division by a token count: losses come normalised."""
    finalize_model_grads(model, None, **kwargs)

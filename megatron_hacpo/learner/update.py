"""One optimizer update on one mini-batch, and what it says about itself, summed over ranks."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from megatron_hacpo.config import AlgorithmConfig
from megatron_hacpo.learner.batch import LearnerMiniBatch
from megatron_hacpo.learner.loss import MicroBatchOutput, minibatch_loss, tally_names
from megatron_hacpo.megatron.policy import Gradient, Policy

LOAD_BALANCE = "router/load_balance"


@dataclass(frozen=True)
class UpdateRecord:
    """computed: False for a mini-batch without any signal, which is skipped but counts in m.
    applied: False also when loss or gradient norm was not finite.
    ratios: s of the mini-batch's sequences, float32 [n], None where not computed.
    tallies: (sum, count) by metric name, over all ranks. gradient: before clipping, where it was asked for.
    """

    computed: bool
    applied: bool
    grad_norm: float | None
    ratios: torch.Tensor | None
    tallies: Mapping[str, tuple[float, float]]
    gradient: Gradient | None = None


def update(
    policy: Policy, minibatch: LearnerMiniBatch, algorithm: AlgorithmConfig, *, keep_gradient: bool = False
) -> UpdateRecord:
    """Train on one mini-batch; every rank of the agent gets the same record, but for its own gradient."""
    if not has_signal(minibatch, algorithm):
        return UpdateRecord(computed=False, applied=False, grad_norm=None, ratios=None, tallies={})
    sequences = minibatch.sequences
    plan = minibatch.own.plan if minibatch.own is not None else policy.plan(sequences)
    loss = minibatch_loss(minibatch, algorithm)
    result = policy.update(sequences, plan, loss, keep_gradient=keep_gradient)
    names = tally_names(minibatch)
    sums = torch.zeros(2 * len(names) + len(sequences), dtype=torch.float64, device=policy.world.device)
    output: MicroBatchOutput
    for output in result.outputs:
        sums[: 2 * len(names)] += output.tallies.flatten()
        sums[[2 * len(names) + row for row in output.rows]] = output.ratios.double()
    sums = policy.world.from_last_stage(policy.world.sum_over_data(sums)).cpu()
    pairs = sums[: 2 * len(names)].view(-1, 2).tolist()
    tallies = {name: (total, count) for name, (total, count) in zip(names, pairs, strict=True)}
    if result.load_balance is not None:
        tallies[LOAD_BALANCE] = (result.load_balance, 1)
    return UpdateRecord(
        computed=True,
        applied=result.applied,
        grad_norm=result.grad_norm,
        ratios=sums[2 * len(names) :].float(),
        tallies=tallies,
        gradient=result.gradient,
    )


def has_signal(minibatch: LearnerMiniBatch, algorithm: AlgorithmConfig) -> bool:
    """Whether the mini-batch's objective depends on the weights at all."""
    if not minibatch.sequences:
        return False
    penalised = minibatch.own is not None and algorithm.kl_coef > 0.0
    return penalised or bool((minibatch.advantages != 0.0).any())

"""The HACPO objective of a mini-batch, as the loss of each of its micro-batches."""

import math
from dataclasses import dataclass

import torch

from megatron_hacpo.algorithm import diagnostics
from megatron_hacpo.algorithm.diagnostics import Bound
from megatron_hacpo.algorithm.kl import sequence_kl
from megatron_hacpo.algorithm.minibatch import window_lower_bound, window_nats
from megatron_hacpo.algorithm.objective import (
    clipped_surrogate,
    cross_objective,
    importance_ratio,
    token_clipped_surrogate,
    token_importance_ratio,
    unclipped_cross_objective,
)
from megatron_hacpo.algorithm.segments import segment_sum
from megatron_hacpo.config import AlgorithmConfig
from megatron_hacpo.learner.batch import LearnerMiniBatch
from megatron_hacpo.megatron.packing import PackedMicroBatch
from megatron_hacpo.megatron.policy import Loss

OBJECTIVE, KL = "loss/objective", "loss/kl"
KEPT = "cross/rewarded_kept_fraction"
REWARDED, UNREWARDED = "ratio/cross/rewarded", "ratio/cross/unrewarded"
WEIGHT, WEIGHT_SQUARE = "cross/weight", "cross/weight_square"
OWN_TALLIES = (OBJECTIVE, KL, "ratio/own/mean", "ratio/own/abs_dev", "clip/own/fraction")
CROSS_TALLIES = (
    OBJECTIVE,
    KL,
    "ratio/cross/mean",
    REWARDED,
    UNREWARDED,
    KEPT,
    "clip/cross/low_fraction",
    "clip/cross/high_fraction",
    WEIGHT,
    WEIGHT_SQUARE,
)


@dataclass(frozen=True)
class MicroBatchOutput:
    """rows: the sequences' places in their mini-batch. ratios: s, float32 [n], detached.
    tallies: (sum, count) of every metric, float64 [metrics, 2], in the order of OWN_ or CROSS_TALLIES.
    """

    rows: tuple[int, ...]
    ratios: torch.Tensor
    tallies: torch.Tensor


def minibatch_loss(minibatch: LearnerMiniBatch, algorithm: AlgorithmConfig) -> Loss:
    """The negative objective (eq. 12-14, 47-53), summed by Megatron over the mini-batch's micro-batches.

    Divided by the nominal number of responses, so the sum over micro-batches and ranks is the mean over the
    mini-batch's sequences, whatever the split.
    """
    if minibatch.own is not None:
        return _OwnLoss(minibatch, algorithm)
    return _CrossLoss(minibatch, algorithm)


class _OwnLoss:
    """GSPO's (or GRPO's) clipped surrogate on the learner's own responses, minus the KL penalty."""

    def __init__(self, minibatch: LearnerMiniBatch, algorithm: AlgorithmConfig) -> None:
        assert minibatch.own is not None
        self._minibatch = minibatch
        self._algorithm = algorithm
        self._old_tokens = minibatch.own.log_probs.tokens
        self._reference = minibatch.own.reference.tokens if minibatch.own.reference else None

    def __call__(
        self, micro: PackedMicroBatch, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchOutput]:
        algorithm, nominal = self._algorithm, self._minibatch.nominal
        old_tokens = self._old_tokens[micro.index]
        ratios, advantages = _ratios(self._minibatch, micro, log_probs, algorithm)
        low, high = algorithm.clip_low, algorithm.clip_high
        if algorithm.own_ratio == "token":
            terms = token_clipped_surrogate(
                log_probs, old_tokens, micro.segments, advantages, low, high, algorithm.log_ratio_clamp
            )
            token_ratios = token_importance_ratio(log_probs, old_tokens, algorithm.log_ratio_clamp).detach()
            clipped = diagnostics.own_clip_fraction(token_ratios, advantages[micro.segments], low, high)
        else:
            terms = clipped_surrogate(ratios, advantages, low, high)
            clipped = diagnostics.own_clip_fraction(ratios.detach(), advantages, low, high)
        objective = terms.sum() / nominal
        kl = torch.zeros_like(objective)
        if self._reference is not None:
            penalties = sequence_kl(log_probs, self._reference[micro.index], micro.segments, len(micro.rows))
            kl = penalties.sum() / nominal
        s = ratios.detach()
        tallies = _tallies(
            _value(objective),
            _value(kl),
            _mean(s),
            _mean((s - 1.0).abs()),
            clipped,
        )
        loss = algorithm.kl_coef * kl - objective
        return loss, MicroBatchOutput(micro.rows, s, tallies)


class _CrossLoss:
    """The weighted, window-clipped objective on one other agent's responses."""

    def __init__(self, minibatch: LearnerMiniBatch, algorithm: AlgorithmConfig) -> None:
        self._minibatch = minibatch
        self._algorithm = algorithm

    def __call__(
        self, micro: PackedMicroBatch, log_probs: torch.Tensor
    ) -> tuple[torch.Tensor, MicroBatchOutput]:
        algorithm, omega = self._algorithm, self._minibatch.omega
        ratios, advantages = _ratios(self._minibatch, micro, log_probs, algorithm)
        s, low, high = ratios.detach(), algorithm.clip_low, algorithm.clip_high
        lower: Bound
        upper: Bound
        if algorithm.cross_clip == "surrogate":
            terms = clipped_surrogate(ratios, omega * advantages, low, high)
            # min() bites on one side alone: below for what is unwanted, above for what is wanted.
            lower = torch.where(advantages < 0.0, 1.0 - low, 0.0)
            upper = torch.where(advantages > 0.0, 1.0 + high, math.inf)
            weight = diagnostics.gradient_weight(s, 0.0, lower, upper)
            below = diagnostics.surrogate_clip_low_fraction(s, advantages, low)
            above = diagnostics.surrogate_clip_high_fraction(s, advantages, high)
        else:
            lengths = self._minibatch.counts[list(micro.rows)].to(s.device)
            lower, upper = cross_window(algorithm, self._minibatch.place.m, lengths)
            if algorithm.cross_clip == "stepwise":
                terms = cross_objective(ratios, advantages, omega, algorithm.alpha, lower)
            else:
                terms = unclipped_cross_objective(ratios, advantages, omega, algorithm.alpha)
            weight = diagnostics.gradient_weight(s, algorithm.alpha, lower, upper)
            below = diagnostics.cross_clip_low_fraction(s, advantages, lower)
            above = diagnostics.cross_clip_high_fraction(s, advantages, upper)
        objective = terms.sum() / self._minibatch.nominal
        no_kl = _value(torch.zeros_like(objective))
        tallies = _tallies(
            _value(objective),
            no_kl,
            _mean(s),
            diagnostics.mean_ratio(s, advantages, rewarded=True),
            diagnostics.mean_ratio(s, advantages, rewarded=False),
            diagnostics.rewarded_kept_fraction(s, advantages, lower, upper),
            below,
            above,
            *diagnostics.weight_moments(weight, advantages),
        )
        return -objective, MicroBatchOutput(micro.rows, s, tallies)


def cross_window(algorithm: AlgorithmConfig, m: int, lengths: torch.Tensor) -> tuple[Bound, float]:
    """The ratios between which a cross response gives a gradient in mini-batch m.

    lengths: int64 [n], tokens of the learner's views. The lower bound is one for all, or float32 [n].
    """
    if algorithm.cross_clip == "none":
        return 0.0, math.inf
    if algorithm.cross_window == "per_sequence":
        nats = window_nats(m, algorithm.tau, algorithm.delta, algorithm.delta_step)
        return torch.exp(-nats / lengths.clamp(min=1).float()), 1.0
    return window_lower_bound(m, algorithm.delta, algorithm.delta_step), 1.0


def tally_names(minibatch: LearnerMiniBatch) -> tuple[str, ...]:
    """Names of the rows of `MicroBatchOutput.tallies`."""
    return OWN_TALLIES if minibatch.own is not None else CROSS_TALLIES


def _ratios(
    minibatch: LearnerMiniBatch, micro: PackedMicroBatch, log_probs: torch.Tensor, algorithm: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence-level importance ratios, float32 [n], and advantages, float64 [n], of a micro-batch."""
    rows, device = list(micro.rows), log_probs.device
    ratios = importance_ratio(
        segment_sum(log_probs, micro.segments, len(rows)),
        minibatch.counts[rows].to(device),
        minibatch.old_means[rows].to(device),
        algorithm.log_ratio_clamp,
    )
    return ratios, minibatch.advantages[rows].to(device)


def _value(total: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A part of the mini-batch's objective: parts add up, nothing is averaged."""
    return total.detach().double(), torch.zeros_like(total, dtype=torch.float64)


def _mean(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values.sum(dtype=torch.float64), torch.full(
        (), len(values), dtype=torch.float64, device=values.device
    )


def _tallies(*pairs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.stack([torch.stack(pair) for pair in pairs])

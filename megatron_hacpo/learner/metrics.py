"""What a step says about itself: the row of metrics.jsonl and a sample of its responses."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, get_args

import numpy as np
import torch

from megatron_hacpo.algorithm.diagnostics import effective_share
from megatron_hacpo.bridge.trajectory import Contribution
from megatron_hacpo.bridge.view import DROP_REASONS
from megatron_hacpo.learner.batch import StepBatch
from megatron_hacpo.learner.loss import (
    CROSS_TALLIES,
    KEPT,
    KL,
    OWN_TALLIES,
    REWARDED,
    UNREWARDED,
    WEIGHT,
    WEIGHT_SQUARE,
)
from megatron_hacpo.learner.own import OwnRollouts
from megatron_hacpo.learner.update import UpdateRecord
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.report.meter import Meter
from megatron_hacpo.reward.base import Reason

Metrics = dict[str, float | None]
"""By name; None where a value does not exist."""

FIRST_UPDATE_DEVIATION = "ratio/own/first_update_max_abs_dev"
GAP_MAX, GAP_MEAN = "logprob/engine_trainer_max_abs_diff", "logprob/engine_trainer_mean_abs_diff"

EDGE_METRICS = {"rewarded_kept_fraction": KEPT, "ratio_rewarded": REWARDED, "ratio_unrewarded": UNREWARDED}
"""Name of a metric per edge -> the tally that it is the mean of."""


class StepClock:
    """Seconds of each phase of a step: `with clock("rollout"): ...`; on_phase is told when one begins."""

    def __init__(self, on_phase: Callable[[str], None]) -> None:
        self._on_phase = on_phase
        self._start = time.perf_counter()
        self._phases: dict[str, float] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._on_phase(phase)
        start = time.perf_counter()
        yield
        self._phases[phase] = self._phases.get(phase, 0.0) + time.perf_counter() - start

    def metrics(self) -> Metrics:
        """`time/PHASE` of every phase and `time/step` since the clock was made."""
        phases: Metrics = {f"time/{phase}": seconds for phase, seconds in self._phases.items()}
        return {**phases, "time/step": time.perf_counter() - self._start}


def rollout_metrics(own: OwnRollouts) -> Metrics:
    """Rewards, failures of the verifier, and lengths of the own responses."""
    meter = Meter()
    for name in ("reward/mean", "response/length_mean", "response/truncated_fraction"):
        meter.add(name, 0.0, 0)
    for response in own.responses:
        if response.reward is not None:
            meter.add("reward/mean", response.reward)
        meter.add("response/length_mean", response.length)
        meter.add("response/truncated_fraction", response.finish_reason == "length")
    for block in own.blocks:
        if block.log_probs.entropy is not None:
            meter.add("response/entropy", block.log_probs.entropy, int(block.counts.sum()))
    valid = sum(r.reward is not None for r in own.responses)
    failed = Counter(r.failure for r in own.responses if r.failure is not None)
    return {
        **meter.values(),
        "reward/count": valid,
        "reward/invalid": len(own.responses) - valid,
        "reward/failed": failed.total(),
        **{f"reward/failed/{reason}": failed[reason] for reason in get_args(Reason)},
    }


def engine_gap(policy: Policy, own: OwnRollouts) -> Metrics:
    """|engine's - trainer's| log-prob of the sampled tokens, largest and mean, over all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=policy.world.device)
    largest = torch.zeros(1, dtype=torch.float64, device=policy.world.device)
    for block in own.blocks:
        # Only the last pipeline stage has the trainer's log-probs.
        local = policy.local_rows(block.plan) if block.log_probs.tokens else []
        for rows, trainer in zip(local, block.log_probs.tokens, strict=True):
            if not rows:
                continue
            # Without its stop token (`exchange.keep_stop: false`) a view is shorter than what was sampled.
            engine = np.concatenate(
                [
                    np.frombuffer(own.responses[block.rows[row]].log_probs, "<f4")[: int(block.counts[row])]
                    for row in rows
                ]
            )
            gap = (trainer.double() - torch.from_numpy(engine).to(trainer.device).double()).abs()
            sums += torch.stack([gap.sum(), torch.full_like(gap.sum(), len(gap))])
            largest = torch.maximum(largest, gap.max())
    total, count = policy.world.from_last_stage(policy.world.sum_over_data(sums)).tolist()
    largest = policy.world.from_last_stage(policy.world.max_over_data(largest))
    return {GAP_MAX: float(largest), GAP_MEAN: total / count} if count else {GAP_MAX: None, GAP_MEAN: None}


def update_metrics(records: Sequence[UpdateRecord], *, kl_coef: float) -> Metrics:
    """Means over the step's updates; null for what no update computed (no cross edge, no signal)."""
    meter = _meter(records, (*OWN_TALLIES, *CROSS_TALLIES))
    meter.add("grad_norm", 0.0, 0)
    for record in records:
        if record.applied:
            assert record.grad_norm is not None
            meter.add("grad_norm", record.grad_norm)
    meter.maximum(FIRST_UPDATE_DEVIATION, _first_deviation(records))
    counts = {
        "updates/applied": sum(r.applied for r in records),
        "updates/without_signal": sum(not r.computed for r in records),
        "updates/nonfinite": sum(r.computed and not r.applied for r in records),
    }
    values = meter.values()
    if kl_coef == 0.0:
        values[KL] = 0.0
    values["cross/effective_share"] = _effective_share(values)
    return {**values, **counts}


def edge_metrics(
    batch: StepBatch, records: Sequence[UpdateRecord], pool: Sequence[Contribution], learner: int
) -> Metrics:
    """What this learner makes of each other agent's responses, as `edge/SOURCE/NAME`."""
    result: Metrics = {}
    for source, contribution in enumerate(pool):
        if source == learner:
            continue
        pairs = zip(batch.minibatches, records, strict=True)
        values = _meter([r for m, r in pairs if m.place.source == source], CROSS_TALLIES).values()
        edge = f"edge/{contribution.agent}"
        result |= {f"{edge}/{name}": values[tally] for name, tally in EDGE_METRICS.items()}
        result[f"{edge}/effective_share"] = _effective_share(values)
    return result


def _meter(records: Sequence[UpdateRecord], names: Sequence[str]) -> Meter:
    """The tallies of the records, and `names` even where no record has them."""
    meter = Meter()
    for name in names:
        meter.add(name, 0.0, 0)
    for record in records:
        for name, (total, count) in record.tallies.items():
            meter.add(name, total, 1 if name.startswith("loss/") else count)
    return meter


def _effective_share(values: Metrics) -> float | None:
    """In place of the two moments that it is made of."""
    weight, square = values.pop(WEIGHT), values.pop(WEIGHT_SQUARE)
    return None if weight is None or square is None else effective_share(weight, square)


def batch_metrics(batch: StepBatch, pool: Sequence[Contribution], learner: int) -> Metrics:
    """Capability, advantages and what the bridge left out."""
    capability = {f"capability/{agent}": value for agent, value in batch.capability.items()}
    dropped = {f"bridge/dropped/{reason}": float(batch.dropped[reason]) for reason in DROP_REASONS}
    return {
        "capability": batch.capability[pool[learner].agent],
        **capability,
        "advantage/equal_groups": batch.advantages.equal_groups,
        "advantage/baseline_fallbacks": batch.advantages.baseline_fallbacks,
        "advantage/too_few_valid": batch.advantages.too_few_valid,
        "bridge/dropped": float(sum(batch.dropped.values())),
        **dropped,
        "cross/without_signal_fraction": batch.skipped / batch.crossing if batch.crossing else None,
    }


def response_samples(
    step: int,
    prompts: Sequence[str],
    pool: Sequence[Contribution],
    batch: StepBatch,
    records: Sequence[UpdateRecord],
    count: int,
) -> list[dict[str, Any]]:
    """Up to `count` of the responses that the step trained on, another one of each mini-batch every step."""
    rows = []
    for minibatch, record in list(zip(batch.minibatches, records, strict=True))[:count]:
        if record.ratios is None:
            continue
        place = step % len(minibatch.rows)
        source = pool[minibatch.place.source]
        trajectory = source.trajectories[minibatch.rows[place]]
        rows.append(
            {
                "step": step,
                "prompt": prompts[trajectory.prompt],
                "text": trajectory.text,
                "reward": trajectory.reward,
                "source": source.agent,
                "ratio": float(record.ratios[place]),
                "advantage": float(minibatch.advantages[place]),
            }
        )
    return rows


def _first_deviation(records: Sequence[UpdateRecord]) -> float | None:
    """max |s - 1| of the first update: own responses come first, and their weights are those that sampled."""
    first = next((r for r in records if r.computed), None)
    if first is None or first.ratios is None or OWN_TALLIES[2] not in first.tallies:
        return None
    return float((first.ratios - 1.0).abs().max())

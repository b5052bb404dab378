"""Notices a clipping window that shuts out the very responses which would teach most.

A right response where the learner would give it probability p has a ratio of about p^(1/L). With short
answers a window that suits long ones drops just these, while the mean ratio of all responses looks fine.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_hacpo.algorithm.minibatch import window_nats
from megatron_hacpo.bridge.trajectory import Contribution
from megatron_hacpo.config import AlgorithmConfig
from megatron_hacpo.learner.batch import StepBatch
from megatron_hacpo.learner.loss import cross_window
from megatron_hacpo.learner.update import UpdateRecord

STEPS = 5
"""A warning looks back so many steps."""
LEAST_RESPONSES = 32
"""Fewer rewarded responses say nothing."""
SHUT_OUT = 0.5
"""The share below the window from which on there is a warning."""
KEPT = 0.9
"""The share that the recommended settings would have kept."""


@dataclass(frozen=True)
class _Rewarded:
    """A source's responses of one step with A > 0: ratios, lower bounds (float32 [n]), tokens (int64 [n])."""

    ratios: torch.Tensor
    bounds: torch.Tensor
    lengths: torch.Tensor


class WindowWatch:
    """Of one learner; `look` once a step, after its updates. Warns at most once per source."""

    def __init__(self, algorithm: AlgorithmConfig) -> None:
        self._algorithm = algorithm
        self._seen: dict[str, deque[_Rewarded]] = {}
        self._warned: set[str] = set()

    @property
    def warned(self) -> list[str]:
        """The sources that were told of."""
        return sorted(self._warned)

    def hold_back(self, warned: Sequence[str]) -> None:
        """Do not tell of these sources again."""
        self._warned |= set(warned)

    def look(
        self, batch: StepBatch, records: Sequence[UpdateRecord], pool: Sequence[Contribution], learner: int
    ) -> list[str]:
        """What is to be told about this step, one line per source whose rewarded responses are shut out."""
        if self._algorithm.cross_clip != "stepwise":
            return []
        warnings = []
        for source, contribution in enumerate(pool):
            if source == learner:
                continue
            seen = self._seen.setdefault(contribution.agent, deque(maxlen=STEPS))
            seen.append(self._rewarded(batch, records, source))
            if len(seen) < STEPS or contribution.agent in self._warned:
                continue
            last_m = max(m.place.m for m in batch.minibatches if m.place.source != learner)
            line = self._judge(contribution.agent, seen, last_m)
            if line is not None:
                self._warned.add(contribution.agent)
                warnings.append(line)
        return warnings

    def _rewarded(self, batch: StepBatch, records: Sequence[UpdateRecord], source: int) -> _Rewarded:
        ratios, bounds, lengths = [], [], []
        for minibatch, record in zip(batch.minibatches, records, strict=True):
            if minibatch.place.source != source or record.ratios is None:
                continue
            chosen = (minibatch.advantages > 0.0) & record.ratios.isfinite()
            counts = minibatch.counts[chosen]
            lower, _ = cross_window(self._algorithm, minibatch.place.m, counts)
            ratios.append(record.ratios[chosen])
            bounds.append(torch.as_tensor(lower, dtype=torch.float32).expand(len(counts)))
            lengths.append(counts)
        if not ratios:
            return _Rewarded(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        return _Rewarded(torch.cat(ratios), torch.cat(bounds), torch.cat(lengths))

    def _judge(self, source: str, seen: Sequence[_Rewarded], last_m: int) -> str | None:
        ratios = torch.cat([s.ratios for s in seen])
        bounds, lengths = torch.cat([s.bounds for s in seen]), torch.cat([s.lengths for s in seen])
        if len(ratios) < LEAST_RESPONSES:
            return None
        below = float((ratios < bounds).double().mean())
        if below <= SHUT_OUT:
            return None
        return (
            f"{below:.0%} of the {len(ratios)} rewarded responses of {source} in the last {STEPS} steps lie "
            f"below the clipping window and teach nothing: median ratio {float(ratios.median()):.2f}, lower "
            f"bound {float(bounds.median()):.2f}, {float(lengths.double().mean()):.0f} tokens in the mean; "
            + self._remedy(ratios, lengths, last_m)
        )

    def _remedy(self, ratios: torch.Tensor, lengths: torch.Tensor, last_m: int) -> str:
        """Settings with which KEPT of these responses would have been inside, even in mini-batch `last_m`."""
        algorithm, share = self._algorithm, f"{KEPT:.0%} of them"
        nats = -ratios.double().log() * lengths
        closing = window_nats(last_m, 1.0, algorithm.delta, algorithm.delta_step)
        tau = math.ceil(float(nats.quantile(KEPT)) / closing)
        by_length = f"algorithm.cross_window: per_sequence with algorithm.tau: {tau} keeps {share}"
        width = 1.0 - float(ratios.double().quantile(1.0 - KEPT)) + last_m * algorithm.delta_step
        delta = math.ceil(100.0 * width) / 100.0
        if algorithm.cross_window == "per_sequence" or delta > 1.0:
            return by_length
        return f"algorithm.delta: {delta:g} keeps {share}, and {by_length}"

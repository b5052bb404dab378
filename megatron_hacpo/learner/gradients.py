"""Whether another agent's responses pull the weights where the own ones do: angles between gradients."""

from collections.abc import Sequence

import torch

from megatron_hacpo.learner.batch import StepBatch
from megatron_hacpo.learner.update import UpdateRecord
from megatron_hacpo.megatron.policy import Gradient, Policy


def gradient_cosines(
    policy: Policy,
    batch: StepBatch,
    records: Sequence[UpdateRecord],
    learner: int,
    sources: Sequence[str],
) -> dict[str, float | None]:
    """`edge/SOURCE/gradient_cosine`: the sum of a step's own gradients against that of a source's, before
    clipping, each gradient at the weights of its own update. Empty where no record has a gradient, None for a
    source without updates. Collective.
    """
    sums: dict[int, Gradient] = {}
    for minibatch, record in zip(batch.minibatches, records, strict=True):
        if record.gradient is None or not record.applied:
            continue
        known = sums.setdefault(minibatch.place.source, record.gradient)
        if known is not record.gradient:
            for total, part in zip(known, record.gradient, strict=True):
                torch._foreach_add_(total, part)
    if not sums:
        return {}
    return {
        f"edge/{name}/gradient_cosine": (
            policy.gradient_cosine(sums[learner], sums[source]) if {learner, source} <= sums.keys() else None
        )
        for source, name in enumerate(sources)
        if source != learner
    }

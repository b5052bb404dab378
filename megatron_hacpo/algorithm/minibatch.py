"""The mini-batches of a step, in order, and the clipping window that moves with them. Imports no torch."""

import math
from dataclasses import dataclass

NARROW_WINDOW = 0.05
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class MiniBatch:
    """All responses of ONE source to a contiguous block of prompts: one optimizer update.

    source: index of the agent that generated them. prompt_start, prompt_stop: the block, in batch order.
    m: index of the mini-batch within the step, own ones included.
    """

    source: int
    prompt_start: int
    prompt_stop: int
    m: int


def minibatch_order(
    n_agents: int, learner: int, step: int, prompts: int, minibatch_prompts: int, alternate: bool = False
) -> list[MiniBatch]:
    """The learner's mini-batches of one step, in the order of its updates.

    Invariants: every (source, block) exactly once, blocks contiguous and the same for every source, one
    source per mini-batch, m = position. The learner's own come first, then the other sources cyclically from
    learner + 1, the starting source shifted by one each step. Nothing is shuffled.

    step: counts from 1. alternate: go block by block (own first within each) instead of source by source.
    Raises ValueError when `minibatch_prompts` does not divide `prompts`.
    """
    assert 0 <= learner < n_agents
    assert step >= 1
    if minibatch_prompts < 1 or prompts < 1 or prompts % minibatch_prompts:
        raise ValueError(
            f"batch.minibatch_prompts: {minibatch_prompts} does not divide batch.prompts = {prompts}; "
            f"use a divisor of {prompts}"
        )
    others = [(learner + 1 + i) % n_agents for i in range(n_agents - 1)]
    shift = (step - 1) % len(others) if others else 0
    sources = [learner, *others[shift:], *others[:shift]]
    blocks = range(0, prompts, minibatch_prompts)
    if alternate:
        pairs = [(source, start) for start in blocks for source in sources]
    else:
        pairs = [(source, start) for source in sources for start in blocks]
    return [
        MiniBatch(source=source, prompt_start=start, prompt_stop=start + minibatch_prompts, m=m)
        for m, (source, start) in enumerate(pairs)
    ]


def window_lower_bound(m: int, delta: float, delta_step: float) -> float:
    """Lower bound of a cross response's ratio in mini-batch m: min(1 - delta + m * delta_step, 1)."""
    return min(1.0 - delta + m * delta_step, 1.0)


def window_nats(m: int, tau: float, delta: float, delta_step: float) -> float:
    """`per_sequence`: tau of mini-batch m. It shrinks by the share of its width that the fixed window loses.

    The lower bound of a response of L tokens is exp(-window_nats / L): its whole text may be that many nats
    less likely to the learner than to its source, whatever its length.
    """
    return tau * (1.0 - window_lower_bound(m, delta, delta_step)) / delta


def check_window(
    n_agents: int,
    prompts: int,
    minibatch_prompts: int,
    delta: float,
    delta_step: float,
    alternate: bool = False,
) -> str | None:
    """Check that the clipping window [lower bound, 1] is still open in the last cross mini-batch.

    Returns a warning in one line when it is narrower than 0.05 there, else None (also when there is no cross
    mini-batch). Raises ValueError when it is closed: the last source would never train, in silence.
    """
    order = minibatch_order(n_agents, 0, 1, prompts, minibatch_prompts, alternate)
    cross = [minibatch.m for minibatch in order if minibatch.source != 0]
    if not cross:
        return None
    m = max(cross)
    bound = 1.0 - delta + m * delta_step
    numbers = (
        f"with {n_agents} agents and {prompts // minibatch_prompts} mini-batches per source the last cross "
        f"mini-batch has m = {m} and the lower bound 1 - {delta:g} + {m} * {delta_step:g} = {bound:.4g}"
    )
    if bound >= 1.0 - _TOLERANCE:
        raise ValueError(
            f"algorithm.delta_step: {delta_step:g} closes the clipping window: {numbers} >= 1; "
            f"{_fix(delta, m)}"
        )
    if 1.0 - bound < NARROW_WINDOW - _TOLERANCE:
        return f"algorithm.delta_step: {delta_step:g} leaves a window of {1.0 - bound:.3g}: {numbers}"
    return None


def _fix(delta: float, m: int) -> str:
    """What to use instead of a step that closes the window."""
    if delta <= _TOLERANCE:
        return "use an algorithm.delta above 0"
    fits = f"use at most {_largest_step(delta, m):g}"
    if delta > 2 * NARROW_WINDOW:
        fits += f" ({_largest_step(delta - NARROW_WINDOW, m):g} keeps it {NARROW_WINDOW:g} wide)"
    return fits


def _largest_step(width: float, m: int) -> float:
    """The largest number of three significant digits below width / m, where m steps use up the width."""
    unit = 10.0 ** (math.floor(math.log10(width / m)) - 2)
    steps = math.floor(width / m / unit)
    while m * steps * unit >= width - _TOLERANCE:
        steps -= 1
    return steps * unit

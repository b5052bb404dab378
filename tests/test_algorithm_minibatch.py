"""The order of mini-batches and the window that must not close."""

import re
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hacpo.algorithm.minibatch import (
    MiniBatch,
    check_window,
    minibatch_order,
    window_lower_bound,
    window_nats,
)


def sources(n_agents: int, learner: int, step: int, alternate: bool = False) -> list[int]:
    return [b.source for b in minibatch_order(n_agents, learner, step, 128, 64, alternate)]


def test_two_agents_as_the_authors() -> None:
    for step in (1, 2, 3):
        assert minibatch_order(2, 1, step, 128, 64) == [
            MiniBatch(source=1, prompt_start=0, prompt_stop=64, m=0),
            MiniBatch(source=1, prompt_start=64, prompt_stop=128, m=1),
            MiniBatch(source=0, prompt_start=0, prompt_stop=64, m=2),
            MiniBatch(source=0, prompt_start=64, prompt_stop=128, m=3),
        ]


def test_one_agent_trains_only_on_its_own() -> None:
    assert sources(1, 0, 7) == [0, 0]


def test_starting_source_shifts_by_one_each_step() -> None:
    first_of_block = [sources(5, 3, step)[::2] for step in range(1, 7)]
    assert first_of_block == [
        [3, 4, 0, 1, 2],
        [3, 0, 1, 2, 4],
        [3, 1, 2, 4, 0],
        [3, 2, 4, 0, 1],
        [3, 4, 0, 1, 2],
        [3, 0, 1, 2, 4],
    ]


def test_alternate_changes_only_the_order() -> None:
    assert sources(3, 1, 1) == [1, 1, 2, 2, 0, 0]
    assert sources(3, 1, 1, alternate=True) == [1, 2, 0, 1, 2, 0]
    assert sources(3, 1, 2, alternate=True) == [1, 0, 2, 1, 0, 2]
    plain, alternate = minibatch_order(3, 1, 1, 128, 64), minibatch_order(3, 1, 1, 128, 64, alternate=True)
    assert {(b.source, b.prompt_start) for b in plain} == {(b.source, b.prompt_start) for b in alternate}


@settings(deadline=None)
@given(
    n_agents=st.integers(1, 6),
    learner=st.integers(0, 5),
    step=st.integers(1, 20),
    blocks=st.integers(1, 5),
    size=st.integers(1, 7),
    alternate=st.booleans(),
)
def test_every_source_and_block_exactly_once(
    n_agents: int, learner: int, step: int, blocks: int, size: int, alternate: bool
) -> None:
    learner %= n_agents
    order = minibatch_order(n_agents, learner, step, blocks * size, size, alternate)
    assert [b.m for b in order] == list(range(n_agents * blocks))
    assert order[0].source == learner
    assert sorted((b.source, b.prompt_start, b.prompt_stop) for b in order) == [
        (source, i * size, (i + 1) * size) for source in range(n_agents) for i in range(blocks)
    ]


@pytest.mark.parametrize("prompts, minibatch_prompts", [(16, 6), (16, 32), (16, 0)])
def test_indivisible_batches_are_refused(prompts: int, minibatch_prompts: int) -> None:
    with pytest.raises(ValueError, match=rf"batch.minibatch_prompts: {minibatch_prompts} .* {prompts}"):
        minibatch_order(2, 0, 1, prompts, minibatch_prompts)


@pytest.mark.parametrize(
    "m, expected",
    [(0, 0.8), (2, 0.85), (3, 0.875), (7, 0.975), (8, 1.0), (9, 1.0)],  # 0.8 + m * 0.025, at most 1
)
def test_lower_bound(m: int, expected: float) -> None:
    bound = window_lower_bound(m, 0.2, 0.025)
    assert bound == pytest.approx(expected, abs=1e-12)
    assert bound <= 1.0


def test_no_stepwise_keeps_the_bound() -> None:
    assert [window_lower_bound(m, 0.2, 0.0) for m in (2, 9)] == [0.8, 0.8]


def test_window_by_length_closes_with_the_fixed_one() -> None:
    # at m = 4 half of 0.2 is gone, at m = 8 all of it
    nats = [window_nats(m, 9.0, 0.2, 0.025) for m in (0, 4, 8, 9)]
    assert nats == pytest.approx([9.0, 4.5, 0.0, 0.0])
    assert window_nats(9, 9.0, 0.2, 0.0) == pytest.approx(9.0)


def test_five_agents_with_the_papers_window_are_refused() -> None:
    # m = 5 * 2 - 1 = 9: 0.8 + 9 * 0.025 = 1.025. Largest: 0.2 / 9 = 0.0222; (0.2 - 0.05) / 9 = 0.01666
    message = (
        "algorithm.delta_step: 0.025 closes the clipping window: with 5 agents and 2 mini-batches per source "
        "the last cross mini-batch has m = 9 and the lower bound 1 - 0.2 + 9 * 0.025 = 1.025 >= 1; "
        "use at most 0.0222 (0.0166 keeps it 0.05 wide)"
    )
    for alternate in (False, True):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            check_window(5, 128, 64, 0.2, 0.025, alternate)


def test_a_bound_of_exactly_one_is_closed() -> None:
    with pytest.raises(ValueError, match=r"m = 8 .* = 1 >= 1; use at most 0.0249 "):
        check_window(9, 64, 64, 0.2, 0.025)


def test_narrow_windows_warn() -> None:
    warning = check_window(4, 128, 64, 0.2, 0.025)  # m = 7: 0.975
    assert warning is not None
    assert "window of 0.025" in warning
    assert "m = 7" in warning
    assert check_window(7, 64, 64, 0.2, 0.025) is None  # m = 6: 0.95, exactly 0.05 wide
    assert check_window(3, 128, 64, 0.2, 0.025) is None  # m = 5: 0.925


def test_no_cross_minibatch_no_window() -> None:
    assert check_window(1, 128, 1, 0.2, 0.025) is None


def test_no_step_fits_without_a_window() -> None:
    with pytest.raises(ValueError, match=r"use an algorithm\.delta above 0$"):
        check_window(2, 128, 64, 0.0, 0.0)


@settings(deadline=None)
@given(
    n_agents=st.integers(2, 9),
    blocks=st.integers(1, 8),
    delta=st.floats(0.001, 0.9),
    step=st.floats(0.0, 1.0),
)
def test_the_suggested_step_is_the_largest_that_fits(
    n_agents: int, blocks: int, delta: float, step: float
) -> None:
    try:
        warning = check_window(n_agents, blocks, 1, delta, step)
    except ValueError as refusal:
        suggested = re.search(r"use at most ([\d.e-]+)", str(refusal))
        assert suggested is not None
        largest = float(suggested[1])
        assert largest < step
        check_window(n_agents, blocks, 1, delta, largest)
        with pytest.raises(ValueError, match="closes"):
            check_window(n_agents, blocks, 1, delta, largest * 1.011)  # one more in the third digit
        wide = re.search(r"\(([\d.e-]+) keeps it", str(refusal))
        assert (wide is not None) == (delta > 0.1)
        assert wide is None or check_window(n_agents, blocks, 1, delta, float(wide[1])) is None
    else:
        width = 1.0 - window_lower_bound(n_agents * blocks - 1, delta, step)
        assert width > 0.0
        assert (warning is not None) == (width < 0.05 - 1e-9)


def test_imports_without_torch() -> None:
    code = "import sys, megatron_hacpo.algorithm.minibatch; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)

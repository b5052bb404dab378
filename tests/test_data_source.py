"""The order of training prompts, and what is left out of them."""

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.filters import without_duplicates, without_long
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.source import ListSource, TaskSource


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(str(i), ({"role": "user", "content": f"q{i}"},), str(i)) for i in range(count)]


def answers(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.answer) for prompt in prompts]


@given(batch_size=st.integers(1, 12), more=st.integers(0, 11), seed=st.integers(0, 3))
def test_every_prompt_once_an_epoch_and_once_a_batch(batch_size: int, more: int, seed: int) -> None:
    size = batch_size + more
    source = ListSource(prompts_of(size), seed=seed, batch_size=batch_size)
    batches = [answers(source.batch(step)) for step in range(1, size + 1)]  # batch_size epochs
    assert source.epochs(size) == batch_size
    assert all(len(set(batch)) == batch_size for batch in batches)
    drawn = [answer for batch in batches for answer in batch]
    for epoch in range(batch_size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_order_depends_on_the_seed_alone() -> None:
    prompts = prompts_of(40)
    source = ListSource(prompts, seed=1, batch_size=16)
    forward = [answers(source.batch(step)) for step in range(1, 7)]
    again = ListSource(prompts, seed=1, batch_size=16)
    backward = [answers(again.batch(step)) for step in reversed(range(1, 7))]
    assert backward == forward[::-1]  # as after a resume
    assert answers(ListSource(prompts, seed=2, batch_size=16).batch(1)) != forward[0]
    assert all(sorted(left) != sorted(right) for left, right in pairwise(forward))
    assert forward[0][:6] == [9, 23, 17, 28, 0, 7]  # on every machine


def test_the_task() -> None:
    source = TaskSource(seed=3, batch_size=4)
    assert source.batch(5) == rule_task.batch(3, 5, 4)
    assert source.epochs(5) is None


def test_a_prompt_needs_room_in_every_agent() -> None:
    prompts = prompts_of(4)
    lengths = {"A": [3, 5, 6, 1], "B": [5, 2, 2, 6]}
    assert without_long(prompts, lengths, {"A": 5, "B": 5}) == [prompts[0], prompts[1]]
    assert without_long(prompts, lengths, {"A": 3, "B": 6}) == [prompts[0], prompts[3]]
    assert without_long(prompts, lengths, {"A": 6, "B": 6}) == prompts
    assert without_long([], {"A": []}, {"A": 5}) == []


def test_duplicates_are_the_same_messages() -> None:
    user, system = {"role": "user", "content": "x"}, {"role": "system", "content": "x"}
    first = Prompt("first", (user,), "1")
    dialogue = Prompt("dialogue", (user, user), "1")
    other_role = Prompt("role", (system,), "1")
    again, other = Prompt("again", (user,), "1"), Prompt("other", (user,), "2")
    kept, disputed = without_duplicates([first, dialogue, again, other_role, other])
    assert kept == [first, dialogue, other_role]
    assert disputed == [(first, other)]

"""Servers and trainer on the same GPUs: who has the memory when, and in which order it changes hands."""

import pytest

from megatron_hacpo.rollout.sglang.turns import Turns

ROOM = ["trainer offload_states", "barrier"]
SENT = ["trainer offload_weights", "barrier", "kv_cache taken"]
RELEASED = ["kv_cache given back", "weights given back", "barrier", "trainer reload"]


class Recorder:
    """Both sides, written down; asserts that nobody takes what the other still has."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.turns = Turns(self, barrier=lambda: self.events.append("barrier"), hold=self.hold)
        assert self.since() == ROOM

    def hold(self, tag: str, held: bool) -> None:
        self.events.append(f"{tag} {'taken' if held else 'given back'}")

    def offload_states(self) -> None:
        self.events.append("trainer offload_states")

    def offload_weights(self) -> None:
        self.events.append("trainer offload_weights")

    def reload_weights(self) -> None:
        self.events.append("trainer reload_weights")

    def reload(self) -> None:
        self.events.append("trainer reload")

    def since(self) -> list[str]:
        events, self.events = self.events, []
        return events


def test_a_step_goes_round() -> None:
    both = Recorder()
    turns = both.turns
    turns.send()  # the first sync: servers started in the room that was made
    turns.generate()
    assert both.since() == SENT
    for _ in range(2):
        turns.train()
        assert both.since() == RELEASED
        turns.send()
        assert both.since() == [*ROOM, "weights taken"]
        turns.generate()
        assert both.since() == SENT


def test_weights_for_a_server_that_came_back_amid_a_batch() -> None:
    both = Recorder()
    both.turns.generate()
    both.since()
    both.turns.send()
    assert both.since() == ["trainer reload_weights"]
    both.turns.generate()
    assert both.since() == SENT


def test_asked_twice_nothing_happens_twice() -> None:
    both = Recorder()
    both.turns.train()
    both.since()
    both.turns.train()
    assert both.since() == []
    both.turns.send()
    both.turns.send()
    assert both.since() == [*ROOM, "weights taken"]
    both.turns.generate()
    both.since()
    both.turns.generate()
    assert both.since() == []


def test_servers_without_weights_do_not_generate() -> None:
    both = Recorder()
    both.turns.train()
    with pytest.raises(AssertionError, match="weights before they generate"):
        both.turns.generate()

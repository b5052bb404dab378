"""Training states on the disk: to the bit in the same layout, and in every other one."""

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_steps import make_policy, pair_config, run_steps
from parity import differences
from parity_models import write_models
from ranks import run_ranks
from state_worker import BEFORE, CASES, STEPS, go_on, policy_of, save, write

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.megatron.runtime import World


def saved(policy: Any, folder: Path) -> Path:
    folder.mkdir()
    write(policy.state_writing(folder, copy=False))
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", ["false", "true"])
def test_goes_on_to_the_bit(dtype: str, distributed: str, world: World, tmp_path: Path) -> None:
    config = pair_config(f"agents.A.dtype={dtype}", f"optimizer.distributed={distributed}")
    tracker = CapabilityTracker()
    one = make_policy(config, "A", world)
    run_steps(config, "A", one, 2, tracker=tracker)
    saved(one, tmp_path / "state")
    window = tracker.state_dict()
    expected = run_steps(config, "A", one, 4, first=3, tracker=tracker)
    other = make_policy(config, "A", world)
    other.start_after(2)
    other.load_state(tmp_path / "state", updates=one.updates - len(expected))
    tracker = CapabilityTracker()
    tracker.load_state_dict(window)
    got = run_steps(config, "A", other, 4, first=3, tracker=tracker)
    assert [r.grad_norm for r in got] == [r.grad_norm for r in expected]
    assert (other.learning_rate, other.updates) == (one.learning_rate, one.updates)
    for (name, mine), (_, theirs) in zip(other.export(), one.export(), strict=True):
        assert torch.equal(mine, theirs), name


def test_a_state_from_before_the_first_update_is_the_model(world: World, tmp_path: Path) -> None:
    config = pair_config("agents.A.dtype=bfloat16")
    folder = saved(make_policy(config, "A", world), tmp_path / "state")
    policy = make_policy(config, "A", world)
    with torch.no_grad():
        next(policy.parameters()).add_(1.0)
    policy.start_after(1)
    policy.load_state(folder, updates=0)
    fresh = make_policy(config, "A", world)
    fresh.advance_learning_rate()
    assert [r.grad_norm for r in run_steps(config, "A", policy, 2, first=2)] == [
        r.grad_norm for r in run_steps(config, "A", fresh, 2, first=2)
    ]


def test_a_copy_is_of_the_moment(world: World, tmp_path: Path) -> None:
    """What is written later is what was, whatever training did meanwhile."""
    config = pair_config()
    policy = make_policy(config, "A", world)
    run_steps(config, "A", policy, 1)
    then = {name: tensor.clone() for name, tensor in policy.export()}
    (tmp_path / "state").mkdir()
    writing = policy.state_writing(tmp_path / "state", copy=True)
    run_steps(config, "A", policy, 2, first=2)
    write(writing)
    policy.start_after(0)
    policy.load_state(tmp_path / "state", updates=4)
    for name, tensor in policy.export():
        assert torch.equal(tensor, then[name]), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("states")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def reshaped(world: World, folder: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """By layout: one rank that was never stopped, from one rank's state, and on one rank from its state."""
    trackers = {name: save(folder, name, world, folder / "one" / name, alone=True) for name in CASES}
    expected = {}
    for layout in CASES:
        policy, config, name = policy_of(folder, layout, world, alone=True)
        tracker = CapabilityTracker()
        run_steps(config, name, policy, BEFORE, tracker=tracker)
        records = run_steps(config, name, policy, STEPS, first=BEFORE + 1, tracker=tracker)
        expected[layout] = {
            "norms": [r.grad_norm for r in records],
            "tallies": [dict(r.tallies) for r in records],
            "weights": {key: value.clone() for key, value in policy.export()},
            "rate": policy.learning_rate,
        }
    run_ranks("state_worker.py", 4, folder)
    back = {
        layout: go_on(folder, layout, world, folder / "states" / layout, trackers[layout], alone=True)
        for layout in CASES
    }
    return expected, torch.load(folder / "states.pt"), back


FLOATS = [layout for layout, (_, settings) in CASES.items() if not settings]


@pytest.mark.real
@pytest.mark.parametrize("layout", CASES)
def test_a_state_is_the_same_to_the_bit_through_another_layout(
    layout: str, reshaped: Any, folder: Path, world: World
) -> None:
    before, after = (tensors(folder, layout, world, folder / name / layout) for name in ("one", "again"))
    assert before.keys() == after.keys()
    assert any(key.startswith("optimizer.state.exp_avg_sq.") for key, _ in before)
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key


@pytest.mark.real
@pytest.mark.parametrize("layout", FLOATS)
def test_another_layout_goes_on_from_one_ranks_state(layout: str, reshaped: Any) -> None:
    expected, there, _ = reshaped
    check(there[layout], expected[layout])


@pytest.mark.real
@pytest.mark.parametrize("layout", FLOATS)
def test_one_rank_goes_on_from_a_layouts_state(layout: str, reshaped: Any) -> None:
    expected, _, back = reshaped
    check(back[layout], expected[layout])


def check(got: dict[str, Any], expected: dict[str, Any]) -> None:
    """As close as the layout itself is."""
    assert max(astuple(differences(got, expected))) <= 1e-5
    assert got["rate"] == expected["rate"]


def tensors(folder: Path, layout: str, world: World, state: Path) -> dict[Any, torch.Tensor]:
    """Everything in a state, by key and place, as one rank reads it."""
    policy, _, _ = policy_of(folder, layout, world, alone=True)
    policy.start_after(BEFORE)
    policy.load_state(state, updates=4 * BEFORE)
    shards = policy._state.shards(policy.updates)
    return {(shard.key, shard.global_offset): shard.data.clone() for shard in shards}

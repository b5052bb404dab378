"""Checkpoints on the disk: written, failed, pruned, compared, and the folder as it was after one of them."""

import copy
import json
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from learner_steps import make_policy, pair_config, run_steps
from ranks import run_ranks

from megatron_hacpo.checkpoint.files import describe, find_damage, write_atomically
from megatron_hacpo.checkpoint.identity import AgentIdentity, Identity, differences
from megatron_hacpo.checkpoint.pool import Pool
from megatron_hacpo.checkpoint.resume import find_resume_point, load_state, note_attempt, rewind
from megatron_hacpo.checkpoint.saver import Saver
from megatron_hacpo.checkpoint.state import AgentState, Manifest, Marker, encode, read
from megatron_hacpo.checkpoint.steps import (
    checkpoint_folder,
    complete_steps,
    prune,
    remove_checkpoint,
    step_folder,
    steps,
)
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.megatron.torch_dist import Writing
from megatron_hacpo.report.files import keep_until

CONFIG = pair_config()
MODEL = Path(CONFIG.agents["A"].model)


def identity(*overrides: str, **changed: Any) -> Identity:
    """As a marker has it: read from JSON."""
    found = Identity(
        config=pair_config(*overrides).model_dump(mode="json"),
        data="data",
        agents={name: AgentIdentity("weights", "tokenizer") for name in "AB"},
        versions={"torch": "1"},
    )
    return msgspec.json.decode(msgspec.json.encode(msgspec.structs.replace(found, **changed)), type=Identity)


@contextmanager
def files_up_to(size: int | None) -> Iterator[None]:
    """Writing beyond so many bytes of a file fails, as on a full disk. None: it does not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft if size is None else size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state(step: int, updates: int = 0) -> AgentState:
    return AgentState(
        agent="A",
        step=step,
        updates=updates,
        capability={"metric": "mean", "history": {"A": [0.5]}},
        warned=["B"],
        nonfinite_updates=0,
        wide_gap_steps=1,
        layout={},
    )


def make_saver(
    run_dir: Path,
    world: World,
    warned: list[str],
    *,
    finished: Callable[[int], Sequence[str] | None] = lambda step: ["A"],
    model: Path = MODEL,
    **settings: Any,
) -> Saver:
    """Agent A's."""
    return Saver(
        run_dir,
        "A",
        model,
        world,
        CONFIG.checkpoint.model_copy(update=settings),
        identity(),
        finished=finished,
        warn=warned.append,
        on_phase=lambda step, phase: None,
    )


# Files


def test_a_file_is_complete_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_atomically(path, b"first")
    with files_up_to(1000), pytest.raises(OSError, match="too large"):
        write_atomically(path, b"second" * 1000)
    assert path.read_bytes() == b"first"
    assert list(path.parent.iterdir()) == [path]
    write_atomically(path, b"third")
    assert path.read_bytes() == b"third"
    with pytest.raises(OSError):
        write_atomically(path / "below", b"")
    with pytest.raises(OSError):
        write_atomically(path.parent, b"")
    assert list(path.parent.iterdir()) == [path]
    assert list(tmp_path.iterdir()) == [path.parent]


def test_a_folder_that_others_remove_while_it_is_empty_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "step" / "pool"
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            for path in (folder, folder.parent):
                try:
                    path.rmdir()
                except OSError:
                    continue

    other = threading.Thread(target=remove)
    other.start()
    try:
        for number in range(50):
            write_atomically(folder / "A", b"%d" % number)
            (folder / "A").unlink()
    finally:
        stop.set()
        other.join()


def test_damage_is_found(tmp_path: Path) -> None:
    for name in ("one", "two", "three"):
        write_atomically(tmp_path / "sub" / name, name.encode())
    files = {f"sub/{name}": describe(tmp_path / "sub" / name) for name in ("one", "two", "three")}
    assert find_damage(tmp_path, files) is None
    assert find_damage(tmp_path, {}) is None
    two = tmp_path / "sub/two"
    two.write_bytes(b"owt")
    assert find_damage(tmp_path, files) == f"{two} has changed: its SHA-256 is not the one that was saved"
    assert find_damage(tmp_path, files, hashes=False) is None
    two.write_bytes(b"twoo")
    assert find_damage(tmp_path, files, hashes=False) == f"{two} has 4 bytes, not 3"
    two.unlink()
    assert find_damage(tmp_path, files) == f"{two} is missing"
    two.mkdir()
    assert find_damage(tmp_path, files, hashes=False) == f"{two} is missing"


# Steps and pools


def put(run_dir: Path, step: int, *, complete: bool = True, agents: str = "AB") -> None:
    """A checkpoint of empty agents."""
    folder = checkpoint_folder(run_dir, step)
    for agent in agents:
        write_atomically(folder / agent / "training/state.json", encode(state(step)))
        files = {"training/state.json": describe(folder / agent / "training/state.json")}
        write_atomically(
            folder / agent / "training/manifest.json", encode(Manifest(agent=agent, step=step, files=files))
        )
    if complete:
        manifests = {agent: describe(folder / agent / "training/manifest.json") for agent in agents}
        marker = Marker(step=step, manifests=manifests, identity=identity())
        write_atomically(folder / "complete.json", encode(marker))


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "left"),
    [(1, 0, [8, 9]), (2, 0, [6, 8, 9]), (1, 3, [6, 8, 9]), (1, 1, [2, 4, 6, 8, 9]), (9, 0, [2, 4, 6, 8, 9])],
)
def test_old_checkpoints_go(keep_last: int, keep_every: int, left: list[int], tmp_path: Path) -> None:
    """Incomplete ones too (3), but for those that are being written (9)."""
    for step in (2, 3, 4, 6, 8, 9):
        put(tmp_path, step, complete=step not in (3, 9))
    write_atomically(tmp_path / "step_000004/pool/A", b"")
    prune(tmp_path, keep_last=keep_last, keep_every=keep_every)
    assert [step for step in steps(tmp_path) if checkpoint_folder(tmp_path, step).is_dir()] == left
    assert (tmp_path / "step_000004/pool/A").is_file()
    assert not step_folder(tmp_path, 3).exists()


def test_nothing_goes_without_a_complete_checkpoint(tmp_path: Path) -> None:
    put(tmp_path, 1, complete=False)
    prune(tmp_path, keep_last=1, keep_every=0)
    assert checkpoint_folder(tmp_path, 1).is_dir()


def test_two_agents_may_delete_a_checkpoint_at_once(tmp_path: Path) -> None:
    for attempt in range(10):
        for number in range(100):
            path = checkpoint_folder(tmp_path, 1) / f"{number % 7}/{number}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        failures: list[Exception] = []

        def delete(failures: list[Exception] = failures) -> None:
            try:
                remove_checkpoint(tmp_path, 1)
            except Exception as error:
                failures.append(error)

        threads = [threading.Thread(target=delete) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == [], attempt
        assert not step_folder(tmp_path, 1).exists()


def files(run_dir: Path) -> dict[int, list[str]]:
    """Of all pools."""
    found = {step: sorted(p.name for p in run_dir.glob(f"step_{step:06}/pool/*")) for step in steps(run_dir)}
    return {step: names for step, names in found.items() if names}


def contribute(pool: Pool, first: int, last: int) -> None:
    for step in range(first, last + 1):
        pool.save_sampled(step, b"sampled")
        pool.save_contribution(step, b"told")


def test_pools_of_agents_at_their_own_pace(tmp_path: Path) -> None:
    a, b = (Pool(tmp_path, agent, keep=2, since_checkpoint=False) for agent in "AB")
    contribute(a, 1, 6)
    contribute(b, 1, 3)
    own = {agent: [agent, f"{agent}.sampled"] for agent in "AB"}
    assert files(tmp_path) == {2: own["B"], 3: own["B"], 5: own["A"], 6: own["A"]}
    assert steps(tmp_path) == [2, 3, 5, 6]
    assert a.load_contribution(3, "B") == b"told"
    assert a.load_contribution(4, "B") is None


def test_pools_since_the_newest_checkpoint_stay(tmp_path: Path) -> None:
    a, b = (Pool(tmp_path, agent, keep=2, since_checkpoint=True) for agent in "AB")
    contribute(a, 1, 5)
    contribute(b, 1, 3)
    assert list(files(tmp_path)) == [1, 2, 3, 4, 5]
    put(tmp_path, 2)
    put(tmp_path, 4, complete=False)
    contribute(a, 6, 6)
    assert {step for step, names in files(tmp_path).items() if "A" in names} == {3, 4, 5, 6}
    contribute(b, 4, 4)
    assert {step for step, names in files(tmp_path).items() if "B" in names} == {3, 4}
    put(tmp_path, 4)
    contribute(b, 5, 5)
    assert {step for step, names in files(tmp_path).items() if "B.sampled" in names} == {4, 5}


# Going back


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run after step 6 with checkpoints of steps 2, 4 and (half) 5; B lacks the responses of step 4."""
    folder = tmp_path / "run"
    pools = [Pool(folder, agent, keep=9, since_checkpoint=False) for agent in "AB"]
    for pool in pools:
        contribute(pool, 1, 6)
    pools[1].sampled_path(4).unlink()
    put(folder, 1, complete=False)
    put(folder, 2)
    put(folder, 4)
    put(folder, 5, complete=False, agents="A")
    (folder / "step_000002/pool/.A.sampled.77").write_text("half")
    for agent in "AB":
        (folder / agent).mkdir()
        rows = [{"step": step} for step in range(1, 7) for _ in range(2)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / agent / "metrics.jsonl").write_text(text + '{"step": 7, "ha')
        (folder / agent / "samples.jsonl").write_text("")
        for step in (0, 2, 6):
            write_atomically(folder / agent / f"eval/step_{step}/sampled.jsonl", b"")
    (folder / "B/eval.jsonl").write_text('{"step": 0}\n{"step": 2}\n{"step": 6}\n')
    write_atomically(folder / "logs/A.rank0.log", b"first attempt")
    (folder / "summary.json").write_text("{}")
    note_attempt(folder, identity())
    return folder


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in folder.rglob("*")}


def go_back(run_dir: Path, step: int, now: Identity | None = None, allow: Sequence[str] = ()) -> list[str]:
    return rewind(run_dir, find_resume_point(run_dir, now or identity(), step=step, allow=allow), "AB")


def test_a_folder_is_as_it_was(run_dir: Path) -> None:
    assert go_back(run_dir, 2) == [
        f"the later checkpoint of step 4 is now {run_dir}/step_000004.1",
        "steps 3 to 3 are replayed with the responses that were sampled",
    ]
    for agent in "AB":
        rows = [json.loads(line) for line in (run_dir / agent / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 1, 2, 2]
        assert (run_dir / agent / "samples.jsonl").read_text() == ""
        assert sorted(p.name for p in (run_dir / agent / "eval").iterdir()) == ["step_0", "step_2"]
    assert (run_dir / "B/eval.jsonl").read_text() == '{"step": 0}\n{"step": 2}\n'
    assert complete_steps(run_dir) == [2]
    assert not checkpoint_folder(run_dir, 1).exists()
    assert (run_dir / "step_000004.1/checkpoint/complete.json").is_file()
    everything = ["A", "A.sampled", "B", "B.sampled"]
    assert files(run_dir) == {1: everything, 2: everything, 3: ["A.sampled", "B.sampled"], 4: ["A.sampled"]}
    assert not list(run_dir.rglob(".*"))
    assert steps(run_dir) == [1, 2, 3, 4]
    assert (run_dir / "logs.1/A.rank0.log").read_bytes() == b"first attempt"
    assert not (run_dir / "logs").exists()
    assert not (run_dir / "summary.json").exists()


@pytest.mark.parametrize("step", [0, 2, 4])
def test_going_back_twice_is_as_once(step: int, run_dir: Path) -> None:
    go_back(run_dir, step)
    once = tree(run_dir)
    go_back(run_dir, step)
    assert tree(run_dir) == once


class Killed(Exception):  # noqa: N818 - reads as what happened
    pass


@pytest.mark.parametrize("after", [0, 3, 8, 13, 21, 34])
def test_going_back_after_a_kill(after: int, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kill comes after so many deletions and renamings."""
    count = 0

    def dying(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if count > after:
                raise Killed
            return real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in ("unlink", "rename", "rmdir", "replace"):
            patch.setattr(os, name, dying(getattr(os, name)))
        try:
            go_back(run_dir, 2)
        except Killed:
            pass
        else:
            pytest.fail("it was not killed: fewer calls than expected")
    go_back(run_dir, 2)
    assert complete_steps(run_dir) == [2]
    assert list(run_dir.glob("step_000004.*/checkpoint/complete.json"))
    everything = ["A", "A.sampled", "B", "B.sampled"]
    assert files(run_dir) == {1: everything, 2: everything, 3: ["A.sampled", "B.sampled"], 4: ["A.sampled"]}
    assert [p.name for p in run_dir.glob("logs*")] == ["logs.1"]
    assert steps(run_dir) == [1, 2, 3, 4]
    assert not list(run_dir.rglob(".*"))


def test_logs_of_every_attempt_stay(run_dir: Path) -> None:
    go_back(run_dir, 4)
    write_atomically(run_dir / "logs/A.rank0.log", b"second attempt")
    go_back(run_dir, 2)
    assert (run_dir / "logs.1/A.rank0.log").read_bytes() == b"first attempt"
    assert (run_dir / "logs.2/A.rank0.log").read_bytes() == b"second attempt"


def test_a_later_checkpoint_is_put_aside_each_time(run_dir: Path) -> None:
    go_back(run_dir, 2)
    put(run_dir, 4)
    go_back(run_dir, 2)
    names = sorted(path.name for path in run_dir.glob("step_000004.*"))
    assert names == ["step_000004.1", "step_000004.2"]


def test_a_run_without_a_checkpoint_starts_again(run_dir: Path) -> None:
    """With other settings than before only if they are allowed, and then without the responses."""
    note_attempt(run_dir, identity("rollout.temperature=0.5"))
    for step in complete_steps(run_dir):
        remove_checkpoint(run_dir, step)
    with pytest.raises(ValueError, match=r"agents.A.rollout.temperature: was 0.5 and is 1.0; --allow"):
        find_resume_point(run_dir, identity())
    point = find_resume_point(run_dir, identity(), allow=["agents"])
    assert (point.step, point.replays) == (0, False)
    rewind(run_dir, point, "AB")
    assert steps(run_dir) == []
    assert (run_dir / "A/metrics.jsonl").stat().st_size == 0
    assert (run_dir / "B/eval.jsonl").stat().st_size == 0
    assert list((run_dir / "A/eval").iterdir()) == []
    contribute(Pool(run_dir, "A", keep=1, since_checkpoint=True), 1, 1)
    assert find_resume_point(run_dir, identity()).replays
    assert not find_resume_point(run_dir, identity("rollout.temperature=0.5"), allow=["agents"]).replays


def test_rows_of_agents_that_left_are_cut_too(run_dir: Path) -> None:
    rewind(run_dir, find_resume_point(run_dir, identity(), step=2), ["A"])
    assert '"step": 3' not in (run_dir / "B/metrics.jsonl").read_text()


def test_responses_of_other_settings_are_not_replayed(run_dir: Path) -> None:
    """Neither those of the run before it was changed, nor later those of the changed run."""
    hot, allow = identity("rollout.temperature=2"), ["agents"]
    go_back(run_dir, 4, hot, allow)
    told = {step: ["A", "B"] for step in (1, 2, 3, 4)}
    assert files(run_dir) == told
    for agent in "AB":
        contribute(Pool(run_dir, agent, keep=9, since_checkpoint=True), 5, 6)
    assert find_resume_point(run_dir, hot, step=4, allow=allow).replays
    go_back(run_dir, 4, hot, allow)
    assert files(run_dir) == told | {5: ["A.sampled", "B.sampled"], 6: ["A.sampled", "B.sampled"]}
    go_back(run_dir, 4)
    assert files(run_dir) == told


def test_rows_are_cut_between_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "text": "\u00fc"}\n{"step": 2}\n{"step": 2', encoding="utf-8")
    keep_until(tmp_path, 5)
    assert path.read_text(encoding="utf-8") == '{"step": 1, "text": "\u00fc"}\n{"step": 2}\n'
    keep_until(tmp_path, 1)
    assert path.read_text(encoding="utf-8") == '{"step": 1, "text": "\u00fc"}\n'
    keep_until(tmp_path, 0)
    assert path.read_bytes() == b""
    path.write_text('{"step": 1}\nhalf\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl: b'half\\n' is not a row .*; remove the line"):
        keep_until(tmp_path, 2)


def test_a_folder_of_an_agent_that_the_marker_lacks_is_nobodys(tmp_path: Path) -> None:
    put(tmp_path, 3, agents="A")
    (checkpoint_folder(tmp_path, 3) / "B").mkdir()
    assert load_state(tmp_path, 3, "B") == (state(3), False)
    assert load_state(tmp_path, 3, "A") == (state(3), True)


# Saving


@pytest.fixture(scope="module")
def policy(world: World) -> Policy:
    """After one step, with optimizer states."""
    policy = make_policy(CONFIG, "A", world)
    run_steps(CONFIG, "A", policy, 1)
    return policy


def save(saver: Saver, policy: Policy, step: int) -> None:
    saver.begin(policy, state(step, policy.updates))
    saver.settle(wait=True)


def assert_complete(run_dir: Path, step: int, ranks: int = 1) -> None:
    """Every file but the manifest is in it, as it is."""
    folder = checkpoint_folder(run_dir, step) / "A"
    manifest = read(folder / "training/manifest.json", Manifest)
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there - {"training/manifest.json"} == manifest.files.keys()
    parts = {f"__{rank}_0.distcp" for rank in range(ranks)} | {
        f"training/random/{rank}" for rank in range(ranks)
    }
    assert parts | {".metadata", "metadata.json", "common.pt", "training/state.json", "config.json"} <= there
    assert find_damage(folder, manifest.files) is None
    marker = read(folder.parent / "complete.json", Marker)
    assert marker.manifests == {"A": describe(folder / "training/manifest.json")}
    assert (marker.step, manifest.step, load_state(run_dir, step, "A")[0].step) == (step, step, step)
    assert marker.identity == identity().of(["A"])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_is_complete(asynchronous: bool, policy: Policy, world: World, tmp_path: Path) -> None:
    warned: list[str] = []
    saver = make_saver(tmp_path, world, warned, asynchronous=asynchronous, keep_last=1)
    for step in (1, 2, 2):  # and a second time
        save(saver, policy, step)
        assert_complete(tmp_path, step)
    assert warned == []
    assert steps(tmp_path) == [2]
    other = make_policy(CONFIG, "A", world)
    other.start_after(2)
    other.load_state(checkpoint_folder(tmp_path, 2) / "A", updates=policy.updates)
    for (name, mine), (_, theirs) in zip(other.export(), policy.export(), strict=True):
        assert torch.equal(mine, theirs), name


def test_training_does_not_wait_for_the_thread(policy: Policy, world: World, tmp_path: Path) -> None:
    saver = make_saver(tmp_path, world, [])
    go_on = threading.Event()
    saver._thread.submit(go_on.wait)
    saver.begin(policy, state(1, policy.updates))
    saver.settle(wait=False)
    assert [path.name for path in (checkpoint_folder(tmp_path, 1) / "A").iterdir()] == ["training"]
    go_on.set()
    saver.begin(policy, state(2, policy.updates))  # waits for the one before
    assert_complete(tmp_path, 1)
    while complete_steps(tmp_path) == [1]:
        saver.settle(wait=False)
    assert_complete(tmp_path, 2)
    saver.settle(wait=True)


def test_the_last_agent_sets_the_marker(policy: Policy, world: World, tmp_path: Path) -> None:
    told: list[int] = []

    def finished(step: int) -> list[str] | None:
        told.append(step)
        assert (checkpoint_folder(tmp_path, step) / "A/training/manifest.json").is_file()
        return ["A", "B"] if step == 2 else None

    saver = make_saver(tmp_path, world, [], finished=finished)
    save(saver, policy, 1)
    assert complete_steps(tmp_path) == []
    put(tmp_path, 2, complete=False, agents="B")
    save(saver, policy, 2)
    assert told == [1, 2]
    assert read(checkpoint_folder(tmp_path, 2) / "complete.json", Marker).manifests.keys() == {"A", "B"}
    assert steps(tmp_path) == [2]


def test_saving_a_complete_step_again_takes_its_marker(policy: Policy, world: World, tmp_path: Path) -> None:
    save(make_saver(tmp_path, world, []), policy, 1)
    make_saver(tmp_path, world, []).begin(policy, state(1, policy.updates))
    assert complete_steps(tmp_path) == []


def test_a_model_made_of_a_checkpoint(policy: Policy, world: World, tmp_path: Path) -> None:
    """Or of anything else with files of such names."""
    model = tmp_path / "model"
    for name in ("config.json", "state.json", "manifest.json", "notes.txt"):
        write_atomically(model / name, b"{}")
    save(make_saver(tmp_path / "run", world, [], model=model), policy, 3)
    assert_complete(tmp_path / "run", 3)
    assert load_state(tmp_path / "run", 3, "A") == (state(3, policy.updates), True)
    assert (checkpoint_folder(tmp_path / "run", 3) / "A/notes.txt").is_file()


FULL = r"agent A: the checkpoint of step 2 could not be written \(\[Errno \d+\] [A-Z].*\); "


def block_rank(run_dir: Path, saver: Saver, policy: Policy) -> None:
    """A full disk when tensors are written."""
    with files_up_to(20_000):
        save(saver, policy, 2)


def block_folder(run_dir: Path, saver: Saver, policy: Policy) -> None:
    step_folder(run_dir, 2).write_text("a file")
    save(saver, policy, 2)


def block_leader(run_dir: Path, saver: Saver, policy: Policy) -> None:
    saver.begin(policy, state(2, policy.updates))
    (checkpoint_folder(run_dir, 2) / "A/common.pt").mkdir()
    saver.settle(wait=True)


@pytest.mark.parametrize(("on_error", "asynchronous"), [("stop", True), ("continue", False)])
@pytest.mark.parametrize("block", [block_rank, block_folder, block_leader])
def test_what_cannot_be_written_is_told(
    block: Callable[[Path, Saver, Policy], None],
    asynchronous: bool,
    on_error: str,
    policy: Policy,
    world: World,
    tmp_path: Path,
) -> None:
    warned: list[str] = []
    told: list[int] = []

    def finished(step: int) -> list[str]:
        told.append(step)
        return ["A"]

    saver = make_saver(
        tmp_path, world, warned, finished=finished, asynchronous=asynchronous, on_error=on_error
    )
    save(saver, policy, 1)
    if on_error == "stop":
        with pytest.raises(RuntimeError, match=FULL + "earlier ones are as they were; .* is stop"):
            block(tmp_path, saver, policy)
        assert warned == []
    else:
        block(tmp_path, saver, policy)
        (line,) = warned
        assert line.endswith("; the run goes on without it")
        assert "\n" not in line
    assert told == [1]
    assert not (checkpoint_folder(tmp_path, 2) / "A").exists()
    assert_complete(tmp_path, 1)
    save(saver, policy, 3)
    assert_complete(tmp_path, 3)


def test_what_the_run_was_told_of_stays(policy: Policy, world: World, tmp_path: Path) -> None:
    """Another agent may be setting the same marker."""
    warned: list[str] = []
    saver = make_saver(tmp_path, world, warned, on_error="continue")
    saver.begin(policy, state(1, policy.updates))
    write_atomically(checkpoint_folder(tmp_path, 1) / "complete.json/in/the/way", b"")
    saver.settle(wait=True)
    (line,) = warned
    assert line.startswith(
        "agent A: the checkpoint of step 1 could not be written ([Errno 21] Is a directory"
    )
    assert (checkpoint_folder(tmp_path, 1) / "A/training/manifest.json").is_file()


def test_a_complete_checkpoint_stays_though_no_earlier_one_can_go(
    policy: Policy, world: World, tmp_path: Path
) -> None:
    warned: list[str] = []
    saver = make_saver(tmp_path, world, warned, keep_last=1)
    save(saver, policy, 1)
    put(tmp_path, 2, complete=False)
    (checkpoint_folder(tmp_path, 2) / "complete.json").mkdir()
    save(saver, policy, 3)
    assert len(warned) == 1
    assert warned[0].startswith("agent A: earlier checkpoints could not be deleted ([Errno 21] Is a dir")
    assert_complete(tmp_path, 3)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_mistakes_of_the_program_are_not_taken_for_a_full_disk(
    asynchronous: bool, world: World, tmp_path: Path
) -> None:
    def write() -> None:
        raise TypeError("of the program's")

    saver = make_saver(tmp_path, world, [], asynchronous=asynchronous, on_error="continue")
    broken: Any = SimpleNamespace(updates=0, state_writing=lambda folder, copy: SimpleNamespace(write=write))
    with pytest.raises(TypeError, match="of the program's"):
        save(saver, broken, 1)


def test_other_errors_of_writing_are_what_they_are(policy: Policy, world: World, tmp_path: Path) -> None:
    def data(number: int) -> torch.Tensor:
        raise RuntimeError("device lost")

    with pytest.raises(RuntimeError, match="device lost"):
        Writing(policy._state.shards(0), data, tmp_path).write()


def test_two_ranks_save_together(tmp_path: Path) -> None:
    run_ranks("checkpoint_worker.py", 2, tmp_path)
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in range(2)]
    text = "agent A: the checkpoint of step {} could not be written ([Errno 27] File too large); "
    stop = f"raised: {text.format(3)}earlier ones are as they were; checkpoint.on_error is stop"
    goes_on = f"{text.format(2)}the run goes on without it"
    assert told == [{"1": [], "2": warned, "3": [stop], "4": []} for warned in ([goes_on], [])]
    run_dir = tmp_path / "run"
    assert complete_steps(run_dir) == [1, 4]
    for step in (1, 4):
        assert_complete(run_dir, step, ranks=2)
        sizes = [(checkpoint_folder(run_dir, step) / f"A/__{r}_0.distcp").stat().st_size for r in range(2)]
        assert min(sizes) > 0.2 * max(sizes)
    assert not list(run_dir.glob("step_00000[23]/checkpoint/A"))


# Loading


class Evil:
    """Runs a command when it is unpickled without care."""

    def __init__(self, mark: Path) -> None:
        self.command = f"touch {mark}"

    def __reduce__(self) -> tuple:
        return os.system, (self.command,)


def test_no_code_is_run(policy: Policy, world: World, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    save(make_saver(tmp_path / "run", world, []), policy, 1)
    folder = checkpoint_folder(tmp_path / "run", 1) / "A"
    torch.save(Evil(mark), folder / "common.pt")
    other = make_policy(CONFIG, "A", world)
    other.load_state(folder, updates=policy.updates)
    (folder / "common.pt").unlink()
    other.load_state(folder, updates=policy.updates)
    texts = [b"\x8c" + bytes([len(t)]) + t.encode() for t in ("os", "system", f"touch {mark}")]
    (folder / ".metadata").write_bytes(b"\x80\x04" + texts[0] + texts[1] + b"\x93" + texts[2] + b"\x85R.")
    with pytest.raises(ValueError, match=rf"^{folder}: .metadata holds more than data \(os.system\); do not"):
        other.load_state(folder, updates=policy.updates)
    assert not mark.exists()


# Whose it is

FREE = [
    "run.name",
    "run.dir",
    "run.steps",
    "data.path",
    "batch.microbatch_tokens",
    "exchange.keep_steps",
    "exchange.timeout_minutes",
    "reward.workers",
    "reward.deadline_seconds",
    "reward.memory_mb",
    "agents.A.model",
    "agents.A.recompute",
    "agents.A.parallel.*",
    "agents.A.placement.*",
    "agents.A.optimizer.distributed",
    "agents.A.optimizer.cpu_offload",
    "agents.A.rollout.engine",
    "agents.A.rollout.max_logprob_gap",
    "agents.A.rollout.sglang.*",
    "optimizer.*",
    "rollout.*",
    "evaluation.*",
    "checkpoint.*",
    "checks.*",
    "report.*",
]
"""`optimizer` and `rollout` are compared as every agent has them, models and data by what is in them."""


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[dict[str, Any], str, str]]:
    """(section, its key, the dotted key) of every value of a configuration."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield section, key, prefix + key


def changed_keys(config: dict[str, Any], saved: Identity) -> list[str]:
    return [d.key for d in differences(saved, msgspec.structs.replace(saved, config=config))]


def test_every_key_is_compared_or_free_on_purpose() -> None:
    saved = identity("agents.B=null", agents={"A": AgentIdentity("weights", "tokenizer")})
    free, compared = set(), set()
    for number, (_, _, dotted) in enumerate(list(leaves(saved.config))):
        config = copy.deepcopy(saved.config)
        section, key, _ = list(leaves(config))[number]
        section[key] = "other"
        found = changed_keys(config, saved)
        assert found in ([], [dotted])
        (compared if found else free).add(dotted)
    sections = tuple(key[:-1] for key in FREE if key.endswith("*"))
    assert {key for key in free if not key.startswith(sections)} == {k for k in FREE if k[-1] != "*"}
    assert not [key for key in compared if key.startswith(sections)]
    assert compared >= {
        "run.seed",
        "algorithm.name",
        "algorithm.alpha",
        "algorithm.capability_window",
        "agents.A.dtype",
        "agents.A.chat_template",
        "agents.A.router_aux_loss_coef",
        "agents.A.optimizer.lr",
        "agents.A.rollout.temperature",
        "agents.A.rollout.top_p",
        "agents.A.rollout.max_response_tokens",
        "reward.verifier",
        "reward.truncated",
        "exchange.over_long",
        "exchange.keep_stop",
        "batch.minibatch_prompts",
        "data.task",
        "debug.replay",
        "debug.rollout_only",
    }


def test_run_steps_are_compared_where_the_learning_rate_depends_on_them() -> None:
    constant, cosine = identity(), identity("agents.B.optimizer.schedule=cosine")
    more = identity("run.steps=999")
    assert list(differences(constant, more)) == []
    assert changed_keys(cosine.config, constant) == ["agents.B.optimizer.schedule"]
    both = identity("run.steps=999", "agents.B.optimizer.schedule=cosine")
    (found,) = differences(cosine, both)
    assert (found.key, found.text) == ("run.steps", "was 240 and is 999")
    assert changed_keys(both.config, constant) == ["run.steps", "agents.B.optimizer.schedule"]

"""From a run's folder to the step that it goes on from, and the folder as it was after that step."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from megatron_hacpo.checkpoint import pool
from megatron_hacpo.checkpoint.files import find_damage, write_atomically
from megatron_hacpo.checkpoint.identity import Difference, Identity, differences, not_allowed, version_changes
from megatron_hacpo.checkpoint.state import (
    MANIFEST,
    STATE,
    AgentState,
    Attempt,
    Manifest,
    Marker,
    encode,
    read,
)
from megatron_hacpo.checkpoint.steps import (
    MARKER,
    after,
    checkpoint_folder,
    complete_steps,
    remove_checkpoint,
    remove_if_empty,
    step_folder,
    steps,
)
from megatron_hacpo.report.files import keep_until

LOGS = "logs"
ATTEMPT = "identity.json"
"""Of the attempt that runs or ran last; none after the loss of an agent."""


@dataclass(frozen=True)
class ResumePoint:
    """step: the last one that is done; 0: none, the run starts again. changes: in what the configuration
    differs from the checkpoint's, as was allowed. remarks: for people. identity: with which the run goes on.
    replays: whether the responses that were sampled are of that."""

    step: int
    changes: list[Difference]
    remarks: list[str]
    identity: Identity
    replays: bool


def find_resume_point(
    run_dir: Path, now: Identity, *, step: int | None = None, allow: Sequence[str] = (), hashes: bool = True
) -> ResumePoint:
    """Where a run goes on: after its newest complete checkpoint, or after `step`.

    allow: dotted keys of the configuration in which the run may differ from what it was. hashes: False looks
    at the sizes of files alone. Raises ValueError, a line for each mistake, if there is no such step, a file
    of it is damaged, or the configuration is another run's.
    """
    complete = complete_steps(run_dir)
    if step is None:
        step = complete[-1] if complete else 0
    if step and step not in complete:
        there = f"there are steps {', '.join(map(str, complete))}" if complete else "there is none"
        raise ValueError(f"--from-step: {step}: {run_dir} has no complete checkpoint of it; {there}")
    before = _undamaged(run_dir, step, complete, hashes=hashes).identity if step else _last_attempt(run_dir)
    found = list(differences(before, now)) if before else []
    refused = not_allowed(found, allow)
    if refused:
        lines = [f"{d.key}: {d.text}; --allow {d.key} if that is meant" for d in refused]
        raise ValueError("\n".join(lines))
    remarks = [f"{d.key} {d.text}" for d in found] + (version_changes(before, now) if before else [])
    if not step:
        why = "as asked" if complete else "as there is no complete checkpoint"
        remarks.append(f"the run starts from the beginning, {why}")
    last = _last_attempt(run_dir)
    replays = last is not None and not any(differences(last, now))
    return ResumePoint(step, found, remarks, now, replays)


def note_attempt(run_dir: Path, identity: Identity) -> None:
    """Write down what is going to run, before anything of it is in the run's folder."""
    write_atomically(run_dir / ATTEMPT, encode(Attempt(identity=identity)))


def _last_attempt(run_dir: Path) -> Identity | None:
    """Whose responses are in the run's folder: an attempt that differs deletes what it finds."""
    path = run_dir / ATTEMPT
    return read(path, Attempt).identity if path.is_file() else None


def _undamaged(run_dir: Path, step: int, complete: Sequence[int], *, hashes: bool) -> Marker:
    """The marker of a checkpoint whose files are what was saved."""
    folder = checkpoint_folder(run_dir, step)
    try:
        marker = read(folder / MARKER, Marker)
        damage = find_damage(
            folder, {f"{agent}/{MANIFEST}": entry for agent, entry in marker.manifests.items()}
        )
        for agent in marker.manifests if damage is None else ():
            manifest = read(folder / agent / MANIFEST, Manifest)
            damage = damage or find_damage(folder / agent, manifest.files, hashes=hashes)
    except ValueError as error:
        damage = str(error)
        if "newer version" in damage:
            raise
    if damage is not None:
        earlier = [other for other in complete if other < step]
        offer = f"--from-step {earlier[-1]} goes on from the one before" if earlier else "there is no earlier"
        raise ValueError(f"--resume: the checkpoint of step {step} is damaged: {damage}; {offer}")
    return marker


def rewind(run_dir: Path, point: ResumePoint, agents: Iterable[str]) -> list[str]:
    """Make the run's folder what it was after `point.step`: metrics, checkpoints, responses and logs.

    Responses of the steps that follow stay, if they would be sampled again. Logs of the attempt before become
    logs.N, and checkpoints of later steps step_NNNNNN.N. Returns what was done, for people. One that was
    killed is made up for by another.
    """
    step, names = point.step, list(agents)
    done = []
    for folder in sorted(run_dir.iterdir()):  # also of agents that have left
        if folder.is_dir():
            keep_until(folder, step)
    complete = complete_steps(run_dir)
    for later in list(after(run_dir, step)):
        if later in complete:
            target = _free_name(step_folder(run_dir, later))
            target.mkdir()
            checkpoint_folder(run_dir, later).rename(target / "checkpoint")
            done.append(f"the later checkpoint of step {later} is now {target}")
        else:
            remove_checkpoint(run_dir, later)
    for earlier in steps(run_dir):  # half-written ones
        if earlier <= step and earlier not in complete:
            remove_checkpoint(run_dir, earlier)
    if not point.replays:
        pool.forget_all(run_dir, step)
    else:
        last = pool.forget_later(run_dir, step, names)
        if last > step:
            done.append(f"steps {step + 1} to {last} are replayed with the responses that were sampled")
    for later in list(after(run_dir, step)):
        remove_if_empty(step_folder(run_dir, later))
    note_attempt(run_dir, point.identity)
    if (run_dir / LOGS).is_dir():
        (run_dir / LOGS).rename(_free_name(run_dir / LOGS))
    for name in ("summary.json", "curves.png"):
        (run_dir / name).unlink(missing_ok=True)
    return done


def load_state(run_dir: Path, step: int, agent: str) -> tuple[AgentState, bool]:
    """An agent's counters after `step`, and whether they are its own: one that was not there then takes the
    others' view of how capable everybody is. One that was lost while it saved has left a folder, which nobody
    vouches for; nobody keeps a window of an agent that was not there."""
    folder = checkpoint_folder(run_dir, step)
    there = list(read(folder / MARKER, Marker).manifests)
    source = agent if agent in there else there[0]
    state = read(folder / source / STATE, AgentState)
    history = {name: values for name, values in state.capability["history"].items() if name in there}
    known = msgspec.structs.replace(state, capability={**state.capability, "history": history})
    return known, source == agent


def _free_name(path: Path) -> Path:
    number = 1
    while os.path.lexists(f"{path}.{number}"):
        number += 1
    return Path(f"{path}.{number}")

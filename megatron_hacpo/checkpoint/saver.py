"""Saving: every rank writes its part, every agent finishes its folder, the last agent sets the marker."""

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_hacpo.checkpoint.files import FileEntry, describe, sync_file, sync_folder, write_atomically
from megatron_hacpo.checkpoint.identity import Identity
from megatron_hacpo.checkpoint.state import MANIFEST, RANDOM, STATE, AgentState, Manifest, Marker, encode
from megatron_hacpo.checkpoint.steps import MARKER, checkpoint_folder, prune
from megatron_hacpo.config import CheckpointConfig
from megatron_hacpo.hf.write import copy_companions
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.random_state import random_states
from megatron_hacpo.megatron.runtime import World
from megatron_hacpo.megatron.torch_dist import Writing


@dataclass
class _Pending:
    """A checkpoint that this rank's thread is writing. files: of this rank. error: what went wrong."""

    step: int
    folder: Path
    state: AgentState
    writing: Writing
    thread: threading.Thread | None = None
    files: dict[str, FileEntry] | None = None
    error: str | None = None

    def run(self, rank: int, random: bytes) -> None:
        """Write this rank's files and hash them."""
        try:
            self.writing.write()
            write_atomically(self.folder / RANDOM / str(rank), random)
            names = [path.name for path in self.folder.glob(f"__{rank}_*.distcp")]
            self.files = {name: describe(self.folder / name) for name in (*names, f"{RANDOM}/{rank}")}
        except (OSError, RuntimeError) as error:  # as torch tells what the file system said
            self.error = str(error).splitlines()[0]


class Saver:
    """One agent's part in the run's checkpoints; every method is a collective of its world.

    What is `begun` is written by a thread while training goes on (`checkpoint.asynchronous`), and `settle`
    completes it once all ranks have written. A failure is told and leaves the earlier checkpoint as it is;
    `checkpoint.on_error` says whether the run ends.
    """

    def __init__(
        self,
        run_dir: Path,
        agent: str,
        model: Path,
        world: World,
        settings: CheckpointConfig,
        identity: Identity | None,
        finished: Callable[[int], Sequence[str] | None],
        warn: Callable[[str], None],
        on_phase: Callable[[int, str], None],
    ) -> None:
        """model: the folder with the agent's config.json and tokenizer, which are copied. identity: known to
        the leader. finished: tells the run that this agent has saved a step; returns the names of all agents
        if all have, else None. warn: for people. on_phase: told the step when its marker is
        being set."""
        self._run_dir = run_dir
        self._agent = agent
        self._model = model
        self._world = world
        self._settings = settings
        self._identity = identity
        self._finished = finished
        self._warn = warn
        self._on_phase = on_phase
        self._pending: _Pending | None = None

    def due(self, step: int, last: bool) -> bool:
        """Whether the configuration wants a checkpoint after this step."""
        every = self._settings.every
        return every > 0 and (last or step % every == 0)

    def begin(self, policy: Policy, state: AgentState) -> None:
        """Save the policy as it is now and `state`."""
        self.settle(wait=True)
        folder = checkpoint_folder(self._run_dir, state.step) / self._agent
        if error := self._leader_does(lambda: _make_empty(folder)):
            self._give_up(state.step, folder, error)
            return
        copy = self._settings.asynchronous
        pending = _Pending(state.step, folder, state, policy.state_writing(folder, copy=copy))
        work = (self._world.rank, random_states())
        if copy:
            pending.thread = threading.Thread(target=pending.run, args=work, name="checkpoint")
            pending.thread.start()
        else:
            pending.run(*work)
        self._pending = pending

    def settle(self, *, wait: bool) -> None:
        """Complete what was begun, if all ranks have written it or `wait`."""
        pending = self._pending
        if pending is None or not (wait or self._all_have_written(pending)):
            return
        if pending.thread is not None:
            pending.thread.join()
        self._pending = None
        parts: list[tuple[dict[str, FileEntry] | None, str | None]] = [(None, None)] * self._world.size
        dist.all_gather_object(parts, (pending.files, pending.error), group=self._world.host_group)
        error = next((error for _, error in parts if error is not None), None)
        if error is None:
            pending.writing.collect()
            files = {name: entry for part, _ in parts if part for name, entry in part.items()}
            error = self._leader_does(lambda: self._complete(pending, files))
        if error is not None:
            self._give_up(pending.step, pending.folder, error)

    def _all_have_written(self, pending: _Pending) -> bool:
        done = [True] * self._world.size
        mine = pending.thread is None or not pending.thread.is_alive()
        dist.all_gather_object(done, mine, group=self._world.host_group)
        return all(done)

    def _complete(self, pending: _Pending, files: dict[str, FileEntry]) -> None:
        """The leader's part: everything but the ranks' files, and the marker if all agents are done."""
        folder = pending.folder
        before = {path.name for path in folder.iterdir()}
        pending.writing.describe()
        write_atomically(folder / STATE, encode(pending.state))
        copy_companions(self._model, folder)
        own = sorted({path.name for path in folder.iterdir()} - before)
        files = files | {name: describe(folder / name) for name in own}
        for name in own:
            sync_file(folder / name)
        manifest = Manifest(agent=self._agent, step=pending.step, files=files)
        write_atomically(folder / MANIFEST, encode(manifest))
        sync_folder(folder.parent)
        if agents := self._finished(pending.step):
            self._mark(pending.step, agents)

    def _mark(self, step: int, agents: Sequence[str]) -> None:
        assert self._identity is not None
        self._on_phase(step, "marker")
        folder = checkpoint_folder(self._run_dir, step)
        manifests = {agent: describe(folder / agent / MANIFEST) for agent in agents}
        marker = Marker(step=step, manifests=manifests, identity=self._identity)
        sync_folder(folder.parent)
        write_atomically(folder / MARKER, encode(marker))
        prune(self._run_dir, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)

    def _leader_does(self, work: Callable[[], None]) -> str | None:
        """What the file system said on the leader, on every rank."""
        error = b""
        if self._world.is_leader:
            try:
                work()
            except OSError as failure:
                error = str(failure).encode()
        return self._world.broadcast(error if self._world.is_leader else None).decode() or None

    def _give_up(self, step: int, folder: Path, error: str) -> None:
        if self._world.is_leader:
            shutil.rmtree(folder, ignore_errors=True)
        text = f"agent {self._agent}: the checkpoint of step {step} could not be written ({error})"
        if self._settings.on_error == "stop":
            raise RuntimeError(f"{text}; earlier ones are as they were; checkpoint.on_error is stop")
        if self._world.is_leader:
            self._warn(f"{text}; the run goes on without it")


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    (folder / RANDOM).mkdir(parents=True)

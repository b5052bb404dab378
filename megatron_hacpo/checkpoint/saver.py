"""Saving: every rank writes its part, every agent finishes its folder, the last agent sets the marker."""

import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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
    """A checkpoint that this rank is writing. work: of the thread that does it. files: of this rank. error:
    what the file system said."""

    step: int
    folder: Path
    state: AgentState
    writing: Writing
    work: Future[None] | None = None
    files: dict[str, FileEntry] = field(default_factory=dict)
    error: str | None = None

    def run(self, rank: int, random: bytes) -> None:
        """Write this rank's files and hash them."""
        try:
            self.writing.write()
            write_atomically(self.folder / RANDOM / str(rank), random)
            names = [path.name for path in self.folder.glob(f"__{rank}_*.distcp")]
            self.files = {name: describe(self.folder / name) for name in (*names, f"{RANDOM}/{rank}")}
        except OSError as error:
            self.error = str(error)


class Saver:
    """One agent's part in the run's checkpoints; every method is a collective of its world.

    What `begin` was given is written by a thread while training goes on (`checkpoint.asynchronous`);
    `settle` completes it once all ranks have written. A failure is told and leaves the earlier checkpoint as
    it is; `checkpoint.on_error` says whether the run ends.
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
        self._told = 0
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def due(self, step: int, last: bool) -> bool:
        """Whether the configuration wants a checkpoint after this step."""
        every = self._settings.every
        return every > 0 and (last or step % every == 0)

    def begin(self, policy: Policy, state: AgentState) -> None:
        """Save the policy as it is now and `state`."""
        self.settle(wait=True)
        folder = checkpoint_folder(self._run_dir, state.step) / self._agent
        if error := self._leader_does(lambda: _make_empty(folder)):
            self._remove(folder)
            self._fail(state.step, error)
            return
        copy = self._settings.asynchronous
        pending = _Pending(state.step, folder, state, policy.state_writing(folder, copy=copy))
        work = (self._world.rank, random_states())
        if copy:
            pending.work = self._thread.submit(pending.run, *work)
        else:
            pending.run(*work)
        self._pending = pending

    def settle(self, *, wait: bool) -> None:
        """Complete what was begun, if all ranks have written it or `wait`. What is no error of the file
        system is raised here, as without a thread."""
        pending = self._pending
        if pending is None or not (wait or self._all_have_written()):
            return
        if pending.work is not None:
            pending.work.result()
        self._pending = None
        parts: list[tuple[dict[str, FileEntry], str | None]] = [({}, None)] * self._world.size
        dist.all_gather_object(parts, (pending.files, pending.error), group=self._world.host_group)
        error = next((error for _, error in parts if error is not None), None)
        if error is None:
            pending.writing.collect()
            files = {name: entry for part, _ in parts for name, entry in part.items()}
            error = self._leader_does(lambda: self._complete(pending, files))
        if error is not None:
            self._remove(pending.folder)
        else:  # what the run has been told of stays: another agent may be setting the marker
            self._told = pending.step
            error = self._leader_does(lambda: self._tell(pending.step))
        if error is not None:
            self._fail(pending.step, error)

    def has_written(self) -> bool:
        """Whether nothing is left to be written by this rank; of itself, no collective."""
        return self._pending is None or self._pending.work is None or self._pending.work.done()

    def _all_have_written(self) -> bool:
        done = [True] * self._world.size
        dist.all_gather_object(done, self.has_written(), group=self._world.host_group)
        return all(done)

    def _complete(self, pending: _Pending, files: dict[str, FileEntry]) -> None:
        """The leader's part: everything but the ranks' files."""
        folder = pending.folder
        copy_companions(self._model, folder)
        write_atomically(folder / STATE, encode(pending.state))
        pending.writing.describe()
        there = [path for path in folder.rglob("*") if path.is_file()]
        own = sorted({path.relative_to(folder).as_posix() for path in there} - files.keys())
        files = files | {name: describe(folder / name) for name in own}
        for name in own:
            sync_file(folder / name)
        sync_folder(folder)
        manifest = Manifest(agent=self._agent, step=pending.step, files=files)
        write_atomically(folder / MANIFEST, encode(manifest))
        sync_folder(folder.parent)

    def finish(self) -> None:
        """Complete everything, when the agents have left each other. If one was lost while others waited for
        it to save, the last step would have no marker."""
        self.settle(wait=True)
        if self._told:
            error = self._leader_does(lambda: self._tell(self._told))
            if error is not None:
                self._fail(self._told, error)

    def _tell(self, step: int) -> None:
        """The leader's too: that this agent is done, and the marker if all are."""
        if agents := self._finished(step):
            self._mark(step, agents)

    def _mark(self, step: int, agents: Sequence[str]) -> None:
        assert self._identity is not None
        if (checkpoint_folder(self._run_dir, step) / MARKER).is_file():
            return
        self._on_phase(step, "marker")
        folder = checkpoint_folder(self._run_dir, step)
        manifests = {agent: describe(folder / agent / MANIFEST) for agent in agents}
        marker = Marker(step=step, manifests=manifests, identity=self._identity.of(agents))
        for above in (folder.parent, self._run_dir):
            sync_folder(above)
        write_atomically(folder / MARKER, encode(marker))
        try:
            prune(self._run_dir, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)
        except OSError as error:  # this one is complete
            self._warn(f"agent {self._agent}: earlier checkpoints could not be deleted ({error})")

    def _leader_does(self, work: Callable[[], None]) -> str | None:
        """What the file system said on the leader, on every rank."""
        error = b""
        if self._world.is_leader:
            try:
                work()
            except OSError as failure:
                error = str(failure).encode()
        return self._world.broadcast(error if self._world.is_leader else None).decode() or None

    def _remove(self, folder: Path) -> None:
        """Delete what no checkpoint will be made of, as far as the file system does."""
        if self._world.is_leader:
            shutil.rmtree(folder, ignore_errors=True)

    def _fail(self, step: int, error: str) -> None:
        text = f"agent {self._agent}: the checkpoint of step {step} could not be written ({error})"
        if self._settings.on_error == "stop":
            raise RuntimeError(f"{text}; earlier ones are as they were; checkpoint.on_error is stop")
        if self._world.is_leader:
            self._warn(f"{text}; the run goes on without it")


def _make_empty(folder: Path) -> None:
    (folder.parent / MARKER).unlink(missing_ok=True)  # a complete one does not change
    if folder.exists():
        shutil.rmtree(folder)
    (folder / RANDOM).mkdir(parents=True)

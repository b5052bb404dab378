"""A step's trajectories on the disk: what a restart, a replay and a person read."""

from pathlib import Path

from megatron_hacpo.checkpoint.files import remove, write_atomically
from megatron_hacpo.checkpoint.steps import (
    complete_steps,
    pool_folder,
    remove_if_empty,
    step_folder,
    steps,
)

SAMPLED = ".sampled"


class Pool:
    """Of one agent, whose files alone it writes and deletes.

    Kept are the last `keep` steps and, if there are checkpoints, all since the newest: from that and the
    responses of the steps after it a run goes on as it went.
    """

    def __init__(self, run_dir: Path, agent: str, *, keep: int, since_checkpoint: bool) -> None:
        self._run_dir = run_dir
        self._agent = agent
        self._keep = keep
        self._since_checkpoint = since_checkpoint

    def save_contribution(self, step: int, data: bytes) -> None:
        """What goes to the other agents."""
        write_atomically(pool_folder(self._run_dir, step) / self._agent, data)
        self._prune(step)

    def load_contribution(self, step: int, agent: str) -> bytes | None:
        """What `agent` told in `step`; None if it is not there."""
        path = pool_folder(self._run_dir, step) / agent
        return path.read_bytes() if path.is_file() else None

    def save_sampled(self, step: int, data: bytes) -> None:
        """What was sampled, with its rewards."""
        write_atomically(self.sampled_path(step), data)

    def sampled_path(self, step: int) -> Path:
        """Where that is."""
        return pool_folder(self._run_dir, step) / (self._agent + SAMPLED)

    def of_run(self, run_dir: Path) -> "Pool":
        """The same agent's in another run."""
        return Pool(run_dir, self._agent, keep=self._keep, since_checkpoint=self._since_checkpoint)

    def _prune(self, step: int) -> None:
        oldest = step - self._keep + 1
        if self._since_checkpoint:
            oldest = min(oldest, max(complete_steps(self._run_dir), default=0) + 1)
        for old in steps(self._run_dir):
            if old < oldest:
                folder = pool_folder(self._run_dir, old)
                remove([folder / self._agent, folder / (self._agent + SAMPLED)])
                remove_if_empty(folder)
                remove_if_empty(step_folder(self._run_dir, old))


def forget_later(run_dir: Path, step: int, agents: list[str]) -> int:
    """Delete the responses of steps that cannot be replayed after `step`: those behind the first step that
    some agent lacks, since weights then go another way. Returns the last step that can be replayed."""
    last = step
    while all((pool_folder(run_dir, last + 1) / (agent + SAMPLED)).is_file() for agent in agents):
        last += 1
    for one in steps(run_dir):
        # In the step behind `last` some agents have theirs, of the very weights that the step will have.
        _keep(run_dir, one, contributions=one <= step, sampled=one <= last + 1)
    return last


def forget_all(run_dir: Path, step: int) -> None:
    """Delete what was sampled, which is of other settings, in every step: nobody is to go on with it later
    from an earlier one. What was told up to `step` stays."""
    for one in steps(run_dir):
        _keep(run_dir, one, contributions=one <= step, sampled=False)


def _keep(run_dir: Path, step: int, *, contributions: bool, sampled: bool) -> None:
    """Which kinds of a step's files stay; what a kill left half-written does not."""
    folder = pool_folder(run_dir, step)
    if folder.is_dir():
        for file in list(folder.iterdir()):
            stays = sampled if file.suffix == SAMPLED else contributions
            if file.name.startswith(".") or not stays:
                remove([file])
        remove_if_empty(folder)
    remove_if_empty(step_folder(run_dir, step))

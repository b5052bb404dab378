"""The folders of a run's steps, and which of them hold a complete checkpoint.

RUN/step_000012/pool/AGENT, AGENT.sampled     what was told to the others, and what was sampled
RUN/step_000012/checkpoint/AGENT/...          the agent's state after the step
RUN/step_000012/checkpoint/complete.json      written last, when all agents are done
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megatron_hacpo.checkpoint.files import sync_folder

MARKER = "complete.json"
_STEP = re.compile(r"step_(\d{6,})")


def step_folder(run_dir: Path, step: int) -> Path:
    return run_dir / f"step_{step:06}"


def pool_folder(run_dir: Path, step: int) -> Path:
    return step_folder(run_dir, step) / "pool"


def checkpoint_folder(run_dir: Path, step: int) -> Path:
    return step_folder(run_dir, step) / "checkpoint"


def steps(run_dir: Path) -> list[int]:
    """All steps that have a folder, in order."""
    found = (_STEP.fullmatch(folder.name) for folder in run_dir.glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def complete_steps(run_dir: Path) -> list[int]:
    """The steps with a complete checkpoint, in order."""
    return [step for step in steps(run_dir) if (checkpoint_folder(run_dir, step) / MARKER).is_file()]


def prune(run_dir: Path, *, keep_last: int, keep_every: int) -> None:
    """Delete checkpoints but the last `keep_last` complete ones and (if not 0) every `keep_every`-th step's,
    and what older attempts left half-written."""
    complete = complete_steps(run_dir)
    for step in steps(run_dir):
        kept = step in complete[-keep_last:] or (keep_every and step % keep_every == 0 and step in complete)
        if complete and step < complete[-1] and not kept:
            remove_checkpoint(run_dir, step)


def remove_checkpoint(run_dir: Path, step: int) -> None:
    """Delete a step's checkpoint, as another agent may too; what is half deleted is not complete."""
    folder = checkpoint_folder(run_dir, step)
    if folder.is_dir():
        (folder / MARKER).unlink(missing_ok=True)
        with suppress(FileNotFoundError):
            sync_folder(folder)
        shutil.rmtree(folder, onerror=_unless_gone)
    remove_if_empty(step_folder(run_dir, step))


def _unless_gone(
    function: object, path: str, info: tuple[type[BaseException], BaseException, object]
) -> None:
    """For rmtree: an error but for what somebody else has deleted meanwhile."""
    if not isinstance(info[1], FileNotFoundError):
        raise info[1]


def remove_if_empty(folder: Path) -> None:
    with suppress(OSError):  # another agent's files are there
        folder.rmdir()


def after(run_dir: Path, step: int) -> Iterator[int]:
    """The steps with a folder that come after `step`."""
    return (later for later in steps(run_dir) if later > step)

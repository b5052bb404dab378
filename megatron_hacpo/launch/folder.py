"""A run's folder before anything runs: empty for a new run, as it was for one that goes on."""

import fcntl
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from rich.console import Console

from megatron_hacpo.checkpoint.files import write_atomically
from megatron_hacpo.checkpoint.identity import Identity
from megatron_hacpo.checkpoint.resume import find_resume_point, note_attempt, rewind
from megatron_hacpo.config import ConfigError, RunConfig, dump

CONFIG = "config.yaml"


@dataclass(frozen=True)
class Resume:
    """That an earlier run is to go on. step: after which; None: its newest checkpoint. allow: as
    `find_resume_point`."""

    step: int | None
    allow: Sequence[str]


def lock_run(config: RunConfig) -> TextIO:
    """An open file whose lock says that a run of this name is going on; ConfigError if one is."""
    try:
        config.path.parent.mkdir(parents=True, exist_ok=True)
        file = config.path.with_name(f".{config.run.name}.lock").open("w")
    except OSError as error:
        raise ConfigError(
            [f"run.dir: {config.run.dir}: cannot write there ({error.strerror}); choose another"]
        ) from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            [f"run.name: {config.run.name}: a run of this name is going on; choose another name"]
        ) from None
    except OSError as error:  # a file system that is mounted without locks
        print(
            f"warning: run.dir: {config.run.dir}: cannot be locked ({error.strerror}); see to it yourself "
            f"that no two runs are called {config.run.name}",
            file=sys.stderr,
        )
    return file


def holds_a_run(config: RunConfig) -> bool:
    """ConfigError for a folder that holds something else."""
    if (config.path / CONFIG).is_file():
        return True
    refuse_taken(config, overwrite=False)
    return False


def rewind_run(config: RunConfig, identity: Identity, resume: Resume, console: Console) -> int:
    """Make the run's folder what it was at the step that the run goes on after; returns that step."""
    console.print(f"looking at the checkpoints in {config.path}", highlight=False, soft_wrap=True)
    point = find_resume_point(config.path, identity, step=resume.step, allow=resume.allow)
    try:
        done = rewind(config.path, point, config.names)
        write_atomically(config.path / CONFIG, dump(config).encode())
    except OSError as error:
        raise ConfigError(
            [f"run.dir: {config.run.dir}: cannot change {config.path} ({error.strerror}); correct its rights"]
        ) from None
    for remark in (*point.remarks, *done):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    return point.step


def refuse_taken(config: RunConfig, *, overwrite: bool) -> None:
    """ConfigError if the run's folder holds what may not be deleted: no run, or one that is kept."""
    folder, name = config.path, config.run.name
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / CONFIG).is_file():
        raise ConfigError([f"run.name: {name}: {folder} is there and is not a run; choose another name"])
    if not overwrite:
        raise ConfigError([f"run.name: {name}: {folder} holds a run; choose another name or --overwrite"])
    _refuse_to_delete_inputs(config)


def prepare_run_dir(config: RunConfig, identity: Identity, *, overwrite: bool) -> None:
    """An empty run folder with the resolved configuration in it.

    Raises ConfigError if the folder holds something already; with `overwrite` an earlier run is deleted, and
    only what is not a run, or what this run reads from there, stays and is an error.
    """
    folder = config.path
    try:
        refuse_taken(config, overwrite=overwrite)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / CONFIG).write_text(dump(config), encoding="utf-8")
        note_attempt(folder, identity)
    except OSError as error:
        raise ConfigError(
            [f"run.dir: {config.run.dir}: cannot make {folder} ({error.strerror}); choose another run.dir"]
        ) from None


def _refuse_to_delete_inputs(config: RunConfig) -> None:
    inputs = {f"agents.{name}.model": agent.model for name, agent in config.agents.items()}
    inputs |= {
        f"agents.{name}.chat_template": agent.chat_template or "" for name, agent in config.agents.items()
    }
    inputs |= {"data.path": config.data.path or "", "evaluation.path": config.evaluation.path or ""}
    benchmarks = config.evaluation.benchmarks.items()
    inputs |= {f"evaluation.benchmarks.{name}.path": benchmark.path for name, benchmark in benchmarks}
    for key, value in inputs.items():
        if value and Path(value).resolve().is_relative_to(config.path.resolve()):
            raise ConfigError(
                [f"{key}: {value}: lies in the run that --overwrite would delete; change run.name"]
            )

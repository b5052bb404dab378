"""`hacpo launch`: all agents of a run on this machine, from a checked configuration to the final table."""

import fcntl
import os
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from rich.console import Console

from megatron_hacpo.config import ConfigError, RunConfig, dump
from megatron_hacpo.launch.placement import Rank, placement
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, supervise
from megatron_hacpo.launch.view import RunView
from megatron_hacpo.report import draw_curves, table, write_summary

if TYPE_CHECKING:
    from torch.distributed import TCPStore

CONFIG = "config.yaml"

USER_ERROR = 2
"""Exit code of a process that met a mistake of the user's, told in its log in lines with `error: `."""

LOG_LINES = 20
"""How much of a failed process's log is shown."""


def launch(config: RunConfig, console: Console, *, overwrite: bool = False, host: str = "127.0.0.1") -> None:
    """Run a checked configuration to its end; RUN_DIR/summary.json and curves.png stand there afterwards.

    host: address on which this process serves the store where all processes meet.
    Raises ConfigError when the run's folder is taken, WorkerFailed and Interrupted as `supervise` does.
    """
    started = time.monotonic()
    refuse_taken(config, overwrite=overwrite)
    check_prompts(config, console)
    store = serve_store(host)
    lock = lock_run(config)  # noqa: F841 - held until this process ends, however it ends
    prepare_run_dir(config, overwrite=overwrite)
    console.print(
        f"{config.run.name}: {config.algorithm.name}, {config.run.steps} steps; logs in {config.path}/logs",
        highlight=False,
    )
    workers = [worker(rank, config.path, f"{host}:{store.port}") for rank in placement(config)]
    with RunView(config.path, config.names, config.run.steps, console) as view:
        supervise(workers, on_tick=view.tick)
    summary = write_summary(config.path, wall_seconds=time.monotonic() - started)
    draw_curves(config.path)
    console.print(table(summary))
    console.print(f"{summary['wall_seconds']:.0f} s; everything is in {config.path}", highlight=False)


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
    except OSError:
        raise ConfigError(
            [f"run.name: {config.run.name}: a run of this name is going on; choose another name"]
        ) from None
    return file


def check_prompts(config: RunConfig, console: Console) -> None:
    """Load every tokenizer and render every prompt once, so that no process starts on what cannot work.

    Raises ValueError as they do; says what was left out, and how long an epoch is.
    """
    from megatron_hacpo.evaluation.benchmark import open_benchmarks
    from megatron_hacpo.inputs import Prompts, load_tokenizers

    prompts = Prompts(config, load_tokenizers(config))
    prompts.source()
    open_benchmarks(config, prompts)
    for remark in prompts.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)


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


def prepare_run_dir(config: RunConfig, *, overwrite: bool) -> None:
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


def serve_store(host: str) -> "TCPStore":
    """The store of the whole run, on a free port of `host` alone (TCPStore by itself binds every address)."""
    from torch.distributed import TCPStore

    try:
        listener = socket.create_server((host, 0))
    except OSError as error:
        raise ConfigError([f"--host: {host}: cannot listen there ({error.strerror or error})"]) from None
    with listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()
    return store


def worker(rank: Rank, run_dir: Path, store: str) -> Worker:
    """The process that trains as `rank`; it reads the resolved configuration."""
    defaults = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HACPO_TRACEBACK": "1"}
    environment = {key: os.environ.get(key, value) for key, value in defaults.items()}
    return Worker(
        name=rank.name,
        command=[
            sys.executable,
            "-m",
            "megatron_hacpo",
            "train",
            str(run_dir / CONFIG),
            "--agent",
            rank.agent,
        ],
        environment=environment | rank.environment(store),
        log=run_dir / "logs" / f"{rank.name}.log",
    )


def describe_failure(failure: WorkerFailed) -> list[str]:
    """The lines to show the user: which process, and what its log says last, or its `error: ` lines alone."""
    log = failure.worker.log
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    if not lines:
        free = shutil.disk_usage(log.parent if log.parent.is_dir() else "/").free
        return [
            f"error: {failure}; the others were stopped; {log} is empty and its disk has {free:,} bytes free"
        ]
    errors = [line for line in lines if line.startswith("error: ")]
    if failure.code == USER_ERROR and errors:
        return [f"{line} (found by {failure.worker.name}; more in {failure.worker.log})" for line in errors]
    return [
        f"error: {failure}; the others were stopped; the end of {failure.worker.log}:",
        *(f"  | {line}" for line in lines[-LOG_LINES:]),
    ]

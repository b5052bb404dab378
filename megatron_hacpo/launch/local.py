"""`hacpo launch`: all agents of a run on this machine, from a checked configuration to the final table."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from megatron_hacpo.checkpoint.files import write_atomically
from megatron_hacpo.checkpoint.identity import Identity, identify
from megatron_hacpo.checkpoint.resume import ATTEMPT
from megatron_hacpo.checkpoint.steps import complete_steps
from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.launch.cause import find_cause
from megatron_hacpo.launch.folder import (
    CONFIG,
    Resume,
    holds_a_run,
    lock_run,
    prepare_run_dir,
    refuse_taken,
    rewind_run,
)
from megatron_hacpo.launch.liveness import Liveness
from megatron_hacpo.launch.placement import Rank, placement
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, supervise
from megatron_hacpo.launch.view import RunView
from megatron_hacpo.process.heartbeat import STOP_KEY
from megatron_hacpo.report import draw_curves, table, write_summary
from megatron_hacpo.report.files import METRICS, read_rows

if TYPE_CHECKING:
    from torch.distributed import TCPStore

LAUNCH = "launch.json"
"""Who runs it: the launcher's process id, and where its store listens."""

USER_ERROR = 2
"""Exit code of a process that met a mistake of the user's, told in its log in lines with `error: `."""

LOG_LINES = 20
"""How much of a failed process's log is shown."""


def launch(
    config: RunConfig,
    console: Console,
    *,
    overwrite: bool = False,
    resume: Resume | None = None,
    host: str = "127.0.0.1",
) -> None:
    """Run a checked configuration to its end; RUN_DIR/summary.json and curves.png stand there afterwards.

    host: address on which this process serves the store where all processes meet.
    Raises ConfigError when the run's folder is taken or cannot be gone on with, WorkerFailed and Interrupted
    as `supervise` does.
    """
    from megatron_hacpo.bridge.members import current

    started = time.monotonic()
    if resume is None:
        refuse_taken(config, overwrite=overwrite)
    elif not holds_a_run(config):
        if resume.step is not None:
            raise ConfigError(
                [f"--from-step: {resume.step}: {config.path} holds no run; correct run.name or run.dir"]
            )
        console.print(f"{config.path} holds no run: it starts from the beginning", highlight=False)
        resume = None
    identity = check_inputs(config, console)
    store = serve_store(host)
    lock = lock_run(config)  # noqa: F841 - held until this process ends, however it ends
    start = 0
    if resume is not None:
        start = rewind_run(config, identity, resume, console)
    else:
        prepare_run_dir(config, identity, overwrite=overwrite)
    address = f"{host}:{store.port}"
    write_atomically(
        config.path / LAUNCH, json.dumps({"pid": os.getpid(), "store": address}).encode() + b"\n"
    )
    from_step = f", after step {start}" if start else ""
    console.print(
        f"{config.run.name}: {config.algorithm.name}, {config.run.steps} steps{from_step}; "
        f"logs in {config.path}/logs",
        highlight=False,
    )
    workers = [worker(rank, config.path, address, start) for rank in placement(config)]
    liveness = Liveness(store, [w.name for w in workers], config.checks.silent_seconds)
    with RunView(config.path, config.names, config.run.steps, console) as view, _stop_noted() as asked:

        def on_tick() -> None:
            if asked and not store.check([STOP_KEY]):
                saved = ", with a checkpoint" if _saves(config) else ""
                console.print(f"asked to stop: the run ends after this step{saved}", highlight=False)
                store.set(STOP_KEY, "")
            view.tick()

        supervise(
            workers,
            on_tick=on_tick,
            find_hung=lambda: {silent.name: silent.reason for silent in liveness.look(time.monotonic())},
            on_loss=partial(_lose, config, store, view, console),
            blame=find_cause,
        )
    if asked:
        for line in describe_stop(config, current(store, config.names)):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    summary = write_summary(config.path, wall_seconds=time.monotonic() - started)
    draw_curves(config.path)
    console.print(table(summary))
    console.print(f"{summary['wall_seconds']:.0f} s; everything is in {config.path}", highlight=False)


def _saves(config: RunConfig) -> bool:
    """Whether the run makes checkpoints."""
    return config.checkpoint.every > 0 and not config.debug.rollout_only


def describe_stop(config: RunConfig, agents: Sequence[str]) -> list[str]:
    """For people: how far a run has come that was asked to stop, and where it goes on. agents: at the end."""
    last = {agent: _last_step(config.path / agent) for agent in agents}
    done = min(last.values())
    if done == config.run.steps:
        return []
    apart = max(last.values()) > done
    where = ", ".join(f"{agent} after step {step}" for agent, step in last.items())
    told = f"stopped as asked: {where}" if apart else f"stopped as asked after step {done}"
    if not _saves(config):
        return [f"{told}; nothing was saved to go on from"]
    saved = max(complete_steps(config.path), default=0)
    if saved == done and not apart:
        return [f"{told}; --resume goes on from there"]
    why = "agents that share nothing do not wait for each other; " if apart else ""
    start = f"after step {saved}, the newest checkpoint of all" if saved else "from the start, as there is no"
    start += "" if saved else " checkpoint of all"
    return [f"{told}; {why}--resume goes on {start}, and replays the responses that were sampled since"]


def _last_step(folder: Path) -> int:
    """The last step that an agent has reported."""
    rows = read_rows(folder / METRICS)
    return rows[-1]["step"] if rows else 0


@contextmanager
def _stop_noted() -> Iterator[list[int]]:
    """What of SIGUSR1 came: the wish that the run ends in good order, as before a time limit."""
    received: list[int] = []
    previous = signal.signal(signal.SIGUSR1, lambda signum, frame: received.append(signum))
    try:
        yield received
    finally:
        signal.signal(signal.SIGUSR1, previous)


def _lose(
    config: RunConfig, store: "TCPStore", view: RunView, console: Console, agent: str, failure: WorkerFailed
) -> bool:
    """Whether the run survives the loss of an agent; then the others learn of it."""
    from megatron_hacpo.bridge.members import announce, current

    if config.checks.on_agent_loss == "stop" or failure.code == USER_ERROR:
        return False
    before = current(store, config.names)
    generation = len(config.names) - len(before) + 1
    left = [name for name in before if name != agent]
    (config.path / ATTEMPT).unlink(missing_ok=True)  # nobody could tell which responses had how many agents
    announce(store, generation, left)
    view.lose(agent)
    for line in describe_failure(failure, f"agent {agent} is lost and {', '.join(left)} go on"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    return True


def check_inputs(config: RunConfig, console: Console) -> Identity:
    """Load every tokenizer and render every prompt once, so that no process starts on what cannot work.

    Raises ValueError as they do; says what was left out, and how long an epoch is. Returns what tells this
    run from others.
    """
    from megatron_hacpo.evaluation.benchmark import open_benchmarks
    from megatron_hacpo.inputs import Prompts, load_tokenizers

    tokenizers = load_tokenizers(config)
    prompts = Prompts(config, tokenizers)
    source = prompts.source()
    open_benchmarks(config, prompts)
    for remark in prompts.remarks:
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    return identify(config, {n: t.identity for n, t in tokenizers.items()}, source.fingerprint)


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


def worker(rank: Rank, run_dir: Path, store: str, start: int = 0) -> Worker:
    """The process that trains as `rank` after step `start`; it reads the resolved configuration."""
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
            "--from-step",
            str(start),
        ],
        environment=environment | rank.environment(store),
        group=rank.agent,
        log=run_dir / "logs" / f"{rank.name}.log",
    )


def describe_failure(failure: WorkerFailed, end: str = "the others were stopped") -> list[str]:
    """The lines to show the user: which process, and what its log says last, or its `error: ` lines alone.

    end: what became of the other processes.
    """
    log = failure.worker.log
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.is_file() else []
    if not lines:
        free = shutil.disk_usage(log.parent if log.parent.is_dir() else "/").free
        return [f"error: {failure}; {end}; {log} is empty and its disk has {free:,} bytes free"]
    errors = [line for line in lines if line.startswith("error: ")]
    if failure.code == USER_ERROR and errors:
        return [f"{line} (found by {failure.worker.name}; more in {failure.worker.log})" for line in errors]
    return [
        f"error: {failure}; {end}; the end of {failure.worker.log}:",
        *(f"  | {line}" for line in lines[-LOG_LINES:]),
    ]

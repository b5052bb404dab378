"""`hacpo launch`: all agents of a run, from a checked configuration to the final table."""

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rich.console import Console

from megatron_hacpo.bridge.members import announce, current
from megatron_hacpo.checkpoint.files import write_atomically
from megatron_hacpo.checkpoint.identity import Identity, identify
from megatron_hacpo.checkpoint.resume import ATTEMPT
from megatron_hacpo.checkpoint.steps import complete_steps
from megatron_hacpo.config import ConfigError, RunConfig
from megatron_hacpo.launch.cause import find_cause
from megatron_hacpo.launch.folder import (
    Resume,
    holds_a_run,
    lock_run,
    prepare_run_dir,
    refuse_taken,
    rewind_run,
)
from megatron_hacpo.launch.liveness import Liveness
from megatron_hacpo.launch.placement import Node, Placement, place
from megatron_hacpo.launch.supervise import Worker, WorkerFailed, supervise
from megatron_hacpo.launch.view import RunView
from megatron_hacpo.process.heartbeat import STOP_KEY
from megatron_hacpo.process.network import joined
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


@dataclass(frozen=True)
class Outcome:
    """How far a run has come. complete: to its end. progressed: to a later checkpoint than it began after."""

    complete: bool
    progressed: bool


class Machines(Protocol):
    """Where a run's processes run, and how they are started there."""

    @property
    def host(self) -> str:
        """Address of this process that all of them reach."""

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def note(self) -> dict[str, str]:
        """For `LAUNCH`."""

    @property
    def blame_seconds(self) -> float:
        """As of `supervise`: within which the ends of processes that take each other along are seen."""

    def workers(
        self, config: RunConfig, placements: Sequence[Placement], store: str, start: int
    ) -> list[Worker]:
        """What to start for a run that goes on after step `start`. store: HOST:PORT where all meet."""

    def failures(self, worker: Worker, code: int | None) -> list[WorkerFailed]:
        """Of a worker, or of the processes that it stands for. code: which it has ended with; None: it has
        not, but may know of failures already."""


def launch(
    config: RunConfig,
    console: Console,
    machines: Machines,
    *,
    asked: Sequence[int] = (),
    overwrite: bool = False,
    resume: Resume | None = None,
) -> Outcome:
    """Run a checked configuration; RUN_DIR/summary.json and curves.png stand there afterwards.

    asked: not empty once the run is to end in good order, as `stop_noted` gives it.
    Raises ConfigError when the run does not fit the machines, or its folder is taken or cannot be gone on
    with, WorkerFailed and Interrupted as `supervise` does.
    """
    started = time.monotonic()
    placements = place(config, machines.nodes)
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
    store = serve_store(machines.host)
    lock = lock_run(config)  # noqa: F841 - held until this process ends, however it ends
    start = 0
    if resume is not None:
        start = rewind_run(config, identity, resume, console)
    else:
        prepare_run_dir(config, identity, overwrite=overwrite)
    address = joined(machines.host, store.port)
    write_atomically(
        config.path / LAUNCH,
        json.dumps({"pid": os.getpid(), "store": address, **machines.note}).encode() + b"\n",
    )
    from_step = f", after step {start}" if start else ""
    console.print(
        f"{config.run.name}: {config.algorithm.name}, {config.run.steps} steps{from_step}; "
        f"logs in {config.path}/logs",
        highlight=False,
    )
    _supervise(config, console, machines, placements, store, address, start, asked)
    agents = current(store, config.names)
    if asked:
        for line in describe_stop(config, agents):
            console.print(line, highlight=False, markup=False, soft_wrap=True)
    summary = write_summary(config.path, wall_seconds=time.monotonic() - started)
    draw_curves(config.path)
    console.print(table(summary))
    console.print(f"{summary['wall_seconds']:.0f} s; everything is in {config.path}", highlight=False)
    return Outcome(
        complete=all(_last_step(config.path / agent) == config.run.steps for agent in agents),
        progressed=max(complete_steps(config.path), default=0) > start,
    )


def _supervise(
    config: RunConfig,
    console: Console,
    machines: Machines,
    placements: Sequence[Placement],
    store: "TCPStore",
    address: str,
    start: int,
    asked: Sequence[int],
) -> None:
    """All processes of the run, from their start to their end, and what the screen shows meanwhile."""
    workers = machines.workers(config, placements, address, start)
    beating = {part.name: part for worker in workers for part in worker.parts or [worker]}
    liveness = Liveness(
        store, list(beating), config.checks.silent_seconds, 60.0 * config.exchange.timeout_minutes
    )
    with RunView(config.path, config.names, config.run.steps, console) as view:

        def on_tick() -> None:
            if asked and not store.check([STOP_KEY]):
                saved = ", with a checkpoint" if _saves(config) else ""
                console.print(f"asked to stop: the run ends after this step{saved}", highlight=False)
                store.set(STOP_KEY, "")
            view.tick()

        def find_failed() -> list[WorkerFailed]:
            told = [failure for worker in workers for failure in machines.failures(worker, None)]
            hung = liveness.look(time.monotonic())
            return [*told, *(WorkerFailed(beating[h.name], -signal.SIGKILL, h.reason) for h in hung)]

        supervise(
            workers,
            on_tick=on_tick,
            find_failed=find_failed,
            on_loss=partial(_lose, config, store, view, console),
            read_end=machines.failures,
            blame=find_cause,
            blame_seconds=machines.blame_seconds,
        )


def launched_by(config: RunConfig, note: dict[str, str]) -> bool:
    """Whether the run's folder was last launched on machines with this note."""
    file = config.path / LAUNCH
    return file.is_file() and json.loads(file.read_text()).items() >= note.items()


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
def stop_noted() -> Iterator[list[int]]:
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

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError as error:
        raise ConfigError([f"--host: {host}: cannot listen there ({error.strerror or error})"]) from None
    with listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno()
        )
        listener.detach()
    return store


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

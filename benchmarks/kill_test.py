"""Kills processes of a run at named places, goes on, and compares with the run that nobody disturbed.

    python benchmarks/kill_test.py [--kills 60] [--only PHASE/KIND ...]

The run: the tiny pair, agent A in two processes, saving in every step. A cell is a phase of a step and a
kind of process; every cell is hit in turn, by SIGKILL, as soon as the process says that it is in the phase.
Each run is killed at most four times, at later and later steps, and gone on with by `hacpo launch --resume`;
in the end its metrics, responses and weights have to be those of the undisturbed run, to the bit. A killed
reward worker is replaced, and the run goes on by itself. The log names each cell with the step and phase in
which the process was when it died.
"""

import argparse
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from megatron_hacpo.process.heartbeat import Beat, read_beats

ROOT = Path(__file__).parents[1]
PHASES = ("rollout", "reward", "logprob", "exchange", "update", "save", "marker", "sync")
KINDS = ("rank", "leader", "reward worker", "launcher")
STEPS = 6
KILLS_PER_RUN = 4
SETTINGS = (
    f"run.steps={STEPS}",
    "agents.A.parallel.data=2",
    "batch.prompts=8",
    "batch.minibatch_prompts=4",
    "rollout.responses_per_prompt=4",
    "evaluation.prompts=8",
    "evaluation.every=3",
    "checkpoint.every=1",
    "report.tensorboard=false",
)
SECONDS = 240.0
"""Of one attempt, at most."""


@dataclass(frozen=True)
class Cell:
    """Where to kill, and what."""

    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.phase}/{self.kind}"


def cells() -> list[Cell]:
    """All of them."""
    return [Cell(phase, kind) for phase, kind in itertools.product(PHASES, KINDS) if _exists(phase, kind)]


def _exists(phase: str, kind: str) -> bool:
    return not (phase == "marker" and kind == "rank")


class Attempt:
    """One `hacpo launch` of the run."""

    def __init__(self, folder: Path, name: str, settings: Sequence[str], *, resume: bool) -> None:
        self._run_dir = folder / name
        (self._run_dir / "launch.json").unlink(missing_ok=True)
        options = ["--resume"] if resume else []
        command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml", *options]
        for setting in (*SETTINGS, f"run.dir={folder}", f"run.name={name}", *settings):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self._output = (folder / f"{name}.txt").open("ab")
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=self._output, stderr=self._output
        )
        self._store: TCPStore | None = None

    def beats(self) -> dict[str, Beat]:
        """What the run's processes say that they are at."""
        if self._store is None:
            with suppress(FileNotFoundError, json.JSONDecodeError):
                host, port = json.loads((self._run_dir / "launch.json").read_text())["store"].split(":")
                self._store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
        if self._store is None:
            return {}
        try:
            return {n: b for n, b in read_beats(self._store, ("A.rank0", "A.rank1", "B.rank0")).items() if b}
        except RuntimeError:  # the launcher has gone
            return {}

    def end(self) -> int:
        """Wait; returns the launcher's code. All its processes are gone then."""
        code = self.process.wait(timeout=SECONDS)
        deadline = time.monotonic() + 30
        while left := [p for p in psutil.process_iter(["cmdline"]) if self._is_ours(p)]:
            assert time.monotonic() < deadline, f"processes are left: {left}"
            time.sleep(0.1)
        self._output.close()
        return code

    def _is_ours(self, process: psutil.Process) -> bool:
        return str(self._run_dir / "config.yaml") in (process.info["cmdline"] or ())


def kill_at(attempt: Attempt, cell: Cell, agent: str, from_step: int) -> str | None:
    """Kill as the cell says, at the first chance from `from_step` on; where the process was when it died, or
    None if the run ended without a chance."""
    watched = "A.rank1" if cell.kind == "rank" else f"{agent}.rank0"
    deadline = time.monotonic() + SECONDS
    while attempt.process.poll() is None:
        assert time.monotonic() < deadline
        beat = attempt.beats().get(watched)
        if beat is None or beat.step < from_step or beat.phase != cell.phase:
            time.sleep(0.0005)
            continue
        pid = attempt.process.pid if cell.kind == "launcher" else beat.pid
        if cell.kind == "reward worker":
            workers = [p for p in psutil.Process(beat.pid).children(recursive=True) if _is_worker(p)]
            if not workers:
                continue
            pid = random.choice(workers).pid
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        last = attempt.beats().get(watched, beat)
        return f"step {last.step}, {last.phase}"
    return None


def _is_worker(process: psutil.Process) -> bool:
    """A worker is a supervisor's child; both have one command line."""
    with suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return parent is not None and parent.cmdline() == process.cmdline()
    return False


def run_with_kills(
    folder: Path, name: str, planned: Sequence[Cell], settings: Sequence[str] = ()
) -> list[Cell]:
    """A run with these kills, one after the other, to its end; returns the cells that were hit."""
    hit: list[Cell] = []
    rng = random.Random(name)
    resume, step = False, 1
    waiting = list(planned)
    while True:
        attempt = Attempt(folder, name, settings, resume=resume)
        resume = True
        while waiting and waiting[0].kind == "reward worker":  # needs no new attempt
            cell, place = waiting[0], kill_at(attempt, waiting[0], rng.choice("AB"), step)
            if place is None:
                break
            _log(name, cell, place)
            hit.append(waiting.pop(0))
        if waiting and attempt.process.poll() is None:
            cell = waiting.pop(0)
            place = kill_at(attempt, cell, rng.choice("AB"), step)
            if place is not None:
                _log(name, cell, place)
                hit.append(cell)
                step = min(step + 1, STEPS - 1)
                assert attempt.end() != 0
                continue
        code = attempt.end()
        assert code == 0, (folder / f"{name}.txt").read_text()[-3000:]
        return hit


def _log(name: str, cell: Cell, place: str) -> None:
    print(f"{name}: killed {cell.kind} for {cell.phase}: it was in {place}", flush=True)


def results(run_dir: Path) -> dict[str, Any]:
    """All that must not depend on a kill."""
    return {
        agent: {
            **{name: _rows(run_dir / agent / f"{name}.jsonl") for name in ("metrics", "eval", "samples")},
            "weights": load_file(run_dir / agent / "hf/model.safetensors"),
        }
        for agent in "AB"
    }


def differences(got: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Where two results differ."""
    for agent, theirs in expected.items():
        for name in ("metrics", "eval", "samples"):
            if got[agent][name] != theirs[name]:
                yield f"{agent}/{name}.jsonl"
        for key, weight in theirs["weights"].items():
            if not torch.equal(got[agent]["weights"][key], weight):
                yield f"{agent}: {key}"


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def main() -> None:
    """Run all kills and print what was hit and what differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--only", nargs="*", metavar="PHASE/KIND", default=None)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    chosen = [cell for cell in cells() if arguments.only is None or str(cell) in arguments.only]
    rng = random.Random(arguments.seed)
    waiting: list[Cell] = []
    while len(waiting) < arguments.kills:
        waiting += rng.sample(chosen, len(chosen))
    waiting = waiting[: arguments.kills]
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    began, hit, wrong = time.monotonic(), Counter[Cell](), 0
    run_with_kills(folder, "undisturbed", [])
    expected = results(folder / "undisturbed")
    for number in itertools.count(1):
        left = arguments.kills - hit.total()
        if left == 0:
            break
        planned, waiting = waiting[:KILLS_PER_RUN], waiting[KILLS_PER_RUN:]
        done = run_with_kills(folder, f"run{number}", planned)
        hit.update(done)
        waiting += [cell for cell in planned if cell not in done]
        found = list(differences(results(folder / f"run{number}"), expected))
        wrong += bool(found)
        print(f"run{number}: {'as undisturbed' if not found else 'DIFFERS in ' + ', '.join(found[:5])}")
        shutil.rmtree(folder / f"run{number}")
    print(f"{hit.total()} kills in {len(hit)} cells of {len(chosen)}, {time.monotonic() - began:.0f} s")
    print(
        f"runs that differ: {wrong}; not hit: {', '.join(str(c) for c in chosen if c not in hit) or 'none'}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

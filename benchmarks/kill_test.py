"""Kills processes of a run at named places, goes on, and compares with the run that nobody disturbed.

    python benchmarks/kill_test.py [--kills 60] [--only PHASE/KIND ...]
    python benchmarks/kill_test.py --servers .venv-sglang/bin/python [--kills 60] [--only PHASE/KIND ...]

The run: the tiny pair, agent A in two processes, saving in every step. A cell is a phase of a step and a
kind of process; every cell is hit in turn, by SIGKILL, as soon as the process says that it is in the phase.
Each run is killed at most four times, at later and later steps, and gone on with by `hacpo launch --resume`;
in the end its metrics, responses and weights have to be those of the undisturbed run, to the bit. A killed
reward worker is replaced, and the run goes on by itself. The log names each cell with the step and phase in
which the process was when it died.

With --servers, SGLang servers sample for both agents and are killed too; the run starts them again by itself.
They draw without seeds, so no other run has these responses. The undisturbed run is then one that trains on
those of the disturbed run (`debug.replay`), without servers; it has to give the same metrics and weights, to
the bit. Not compared is eval.jsonl: an evaluation samples anew, and nothing follows from it. What a replay
does not show is looked at in the disturbed run: each response is there exactly once, and was drawn from the
weights of its step.
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

import msgspec
import psutil
import torch
from safetensors.torch import load_file
from torch.distributed import TCPStore

from megatron_hacpo.bridge.trajectory import load
from megatron_hacpo.checkpoint.steps import pool_folder
from megatron_hacpo.learner.metrics import GAP_MAX
from megatron_hacpo.learner.own import Sampled
from megatron_hacpo.process.heartbeat import Beat, read_beats

ROOT = Path(__file__).parents[1]
PHASES = ("rollout", "reward", "logprob", "exchange", "update", "save", "marker", "sync")
KINDS = ("rank", "leader", "reward worker", "launcher")
SERVER = "server"
REPLACED = ("reward worker", SERVER)
"""Without them the run goes on by itself."""
STEPS = 6
SERVED_STEPS = 10
"""With servers, each of which has the step after its death to come back in."""
KILLS_PER_RUN = 4
PROMPTS, GROUP = 8, 4
SETTINGS = (
    f"run.steps={STEPS}",
    "agents.A.parallel.data=2",
    f"batch.prompts={PROMPTS}",
    "batch.minibatch_prompts=4",
    f"rollout.responses_per_prompt={GROUP}",
    "evaluation.prompts=8",
    "evaluation.every=3",
    "checkpoint.every=1",
    "report.tensorboard=false",
)
SERVED_SETTINGS = (
    f"run.steps={SERVED_STEPS}",
    f"exchange.keep_steps={SERVED_STEPS}",
    "rollout.engine=sglang",
    "rollout.sglang.cache_tokens=8192",
    "rollout.sglang.max_concurrent=8",  # so that a batch comes in several parts
    f"rollout.sglang.restarts={KILLS_PER_RUN}",
)
LARGEST_GAP = 1e-4
"""Between log-probs of a server and of the trainer, in float32 and by the same weights."""
SAMPLED_ANEW = "eval"
ROWS = ("metrics", SAMPLED_ANEW, "samples")
SECONDS = 900.0
"""Of one attempt, at most."""


@dataclass(frozen=True)
class Cell:
    """Where to kill, and what."""

    phase: str
    kind: str

    def __str__(self) -> str:
        return f"{self.phase}/{self.kind}"


def cells(*, servers: bool = False) -> list[Cell]:
    """All of them."""
    kinds = (*KINDS, SERVER) if servers else KINDS
    return [Cell(phase, kind) for phase, kind in itertools.product(PHASES, kinds) if _exists(phase, kind)]


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
        """By a file of the run's folder, which ranks and servers are started with."""
        return f"{self._run_dir}/" in " ".join(process.info["cmdline"] or ())


def kill_at(attempt: Attempt, cell: Cell, agents: str, from_step: int) -> Beat | None:
    """Kill as the cell says, at the first chance from `from_step` on that one of the agents gives; where the
    process was right afterwards (of a child: its leader), or None if the run ended without a chance."""
    watched = ["A.rank1"] if cell.kind == "rank" else [f"{agent}.rank0" for agent in agents]
    deadline = time.monotonic() + SECONDS
    victims: dict[str, psutil.Process | None] = dict.fromkeys(watched)
    while attempt.process.poll() is None:
        assert time.monotonic() < deadline
        beats = attempt.beats()
        for name in watched:
            beat, victim = beats.get(name), victims[name]
            if beat is None or beat.step < from_step:
                continue
            if victim is None or not _lives(victim):
                # Before the phase, since some phases are over sooner than a search.
                victims[name] = _victim(attempt, cell.kind, beat)
            elif beat.phase == cell.phase:
                if cell == Cell("rollout", SERVER):  # amid a batch: not all of its responses are there
                    time.sleep(random.uniform(0.0, 0.2))
                with suppress(ProcessLookupError):
                    os.kill(victim.pid, signal.SIGKILL)
                    return attempt.beats().get(name, beat)
        time.sleep(0.0005)
    return None


def _victim(attempt: Attempt, kind: str, beat: Beat) -> psutil.Process | None:
    """A process of this kind that belongs to the one that has given the beat; None if there is none, as when
    a run has ended and only its launcher is left."""
    if kind == "launcher":
        return psutil.Process(attempt.process.pid)
    with suppress(psutil.NoSuchProcess):
        given = psutil.Process(beat.pid)
        if kind not in REPLACED:
            return given
        is_one = _is_worker if kind == "reward worker" else _is_server
        if found := [p for p in given.children(recursive=True) if is_one(p)]:
            return random.choice(found)
    return None


def _lives(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _is_worker(process: psutil.Process) -> bool:
    """A worker is a supervisor's child; both have one command line."""
    with suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return parent is not None and parent.cmdline() == process.cmdline()
    return False


def _is_server(process: psutil.Process) -> bool:
    """Its main process, whose own children have other command lines."""
    with suppress(psutil.NoSuchProcess):
        command = " ".join(process.cmdline())
        return "cpu_server.py" in command or "sglang.launch_server" in command
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
        while waiting and waiting[0].kind in REPLACED:  # needs no new attempt
            cell, place = waiting[0], kill_at(attempt, waiting[0], _agents(waiting[0], rng), step)
            if place is None:
                break
            _log(name, cell, place)
            waiting.pop(0)
            if place.phase == cell.phase:  # else it was over by then
                hit.append(cell)
            if cell.kind == SERVER:
                step = place.step + 2
        if waiting and attempt.process.poll() is None:
            cell = waiting.pop(0)
            place = kill_at(attempt, cell, _agents(cell, rng), step)
            if place is not None:
                _log(name, cell, place)
                hit.append(cell)
                step += 1
                assert attempt.end() != 0
                continue
        code = attempt.end()
        assert code == 0, (folder / f"{name}.txt").read_text()[-3000:]
        return hit


def _agents(cell: Cell, rng: random.Random) -> str:
    """Whose processes to watch. The marker is written by the agent that has saved last."""
    return "AB" if cell.phase == "marker" else rng.choice("AB")


def _log(name: str, cell: Cell, place: Beat) -> None:
    where = f"step {place.step}, {place.phase}"
    print(f"{name}: killed {cell.kind} for {cell.phase}: {place.name} was in {where}", flush=True)


def results(run_dir: Path, names: Sequence[str] = ROWS) -> dict[str, Any]:
    """All that must not depend on a kill; names: of the files of rows."""
    return {
        agent: {
            **{name: _rows(run_dir / agent / f"{name}.jsonl") for name in names},
            "weights": load_file(run_dir / agent / "hf/model.safetensors"),
        }
        for agent in "AB"
    }


def differences(got: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    """Where two results differ."""
    for agent, theirs in expected.items():
        for name in (key for key in theirs if key != "weights"):
            if got[agent][name] != theirs[name]:
                yield f"{agent}/{name}.jsonl"
        for key, weight in theirs["weights"].items():
            if not torch.equal(got[agent]["weights"][key], weight):
                yield f"{agent}: {key}"


def _rows(path: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in rows]


def against_undisturbed(folder: Path, name: str) -> list[str]:
    """What is wrong with a disturbed run, by the run `undisturbed` in the same folder."""
    return list(differences(results(folder / name), results(folder / "undisturbed")))


def against_replay(folder: Path, name: str) -> list[str]:
    """The same of a run with servers, by one that trains on its responses."""
    run_dir, replay = folder / name, f"{name}-replay"
    run_with_kills(folder, replay, [], (f"run.steps={SERVED_STEPS}", f"debug.replay={run_dir}"))
    names = [name for name in ROWS if name != SAMPLED_ANEW]
    found = [
        *_wrong_responses(run_dir),
        *differences(results(run_dir, names), results(folder / replay, names)),
    ]
    shutil.rmtree(folder / replay)
    return found


def servers_started_again(run_dir: Path) -> int:
    """In all attempts; the first process at a place writes A.server0.log, the next A.server0.1.log."""
    return len(list(run_dir.glob("logs*/*.server*.*.log")))


def _wrong_responses(run_dir: Path) -> Iterator[str]:
    """Where responses are not there exactly once, or not of the weights of their step."""
    whole = dict.fromkeys(range(PROMPTS), GROUP)
    for agent in "AB":
        for row in _rows(run_dir / agent / "metrics.jsonl"):
            if not row[GAP_MAX] < LARGEST_GAP:
                yield f"{agent}, step {row['step']}: {GAP_MAX} is {row[GAP_MAX]}"
        for step in range(1, SERVED_STEPS + 1):
            pool = pool_folder(run_dir, step)
            sampled = msgspec.msgpack.decode((pool / f"{agent}.sampled").read_bytes(), type=Sampled)
            told = load(pool / agent).trajectories
            if Counter(t.prompt for t in told) != whole:
                yield f"{agent}, step {step}: not {GROUP} responses to each prompt"
            if [t.text for t in told] != [r.text for r in sampled.responses]:
                yield f"{agent}, step {step}: what was told is not what was sampled"


def main() -> None:
    """Run all kills and print what was hit and what differed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--only", nargs="*", metavar="PHASE/KIND", default=None)
    parser.add_argument("--servers", metavar="PYTHON", help="the interpreter that has SGLang")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    served = arguments.servers is not None
    settings: tuple[str, ...] = ()
    if served:
        settings = (*SERVED_SETTINGS, f"rollout.sglang.python={Path(arguments.servers).absolute()}")
    chosen = [c for c in cells(servers=served) if arguments.only is None or str(c) in arguments.only]
    rng = random.Random(arguments.seed)
    waiting: list[Cell] = []
    while len(waiting) < arguments.kills:
        waiting += rng.sample(chosen, len(chosen))
    waiting = waiting[: arguments.kills]
    folder = Path(tempfile.mkdtemp(prefix="kills-"))
    began, hit, wrong = time.monotonic(), Counter[Cell](), 0
    if not served:
        run_with_kills(folder, "undisturbed", [])
    for number in itertools.count(1):
        left = arguments.kills - hit.total()
        if left == 0:
            break
        planned, waiting = waiting[:KILLS_PER_RUN], waiting[KILLS_PER_RUN:]
        name = f"run{number}"
        done = run_with_kills(folder, name, planned, settings)
        hit.update(done)
        waiting += (Counter(planned) - Counter(done)).elements()
        found = (against_replay if served else against_undisturbed)(folder, name)
        wrong += bool(found)
        again = f", {servers_started_again(folder / name)} servers started again" if served else ""
        as_expected = "as undisturbed" if not found else f"DIFFERS in {', '.join(found[:5])}"
        print(f"{name}: {as_expected}{again}", flush=True)
        shutil.rmtree(folder / name)
    print(f"{hit.total()} kills in {len(hit)} cells of {len(chosen)}, {time.monotonic() - began:.0f} s")
    print(
        f"runs that differ: {wrong}; not hit: {', '.join(str(c) for c in chosen if c not in hit) or 'none'}"
    )
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()

"""Does sharing rollouts work? HACPO against its baselines on the tiny agents, through the real trainer.

    python benchmarks/claim.py --seeds 1,2,3,4,5 --methods grpo,gspo,gspo_x2,naive,hacpo --steps 240 --out DIR

A seed changes the last warm-start stage of the agents and the whole RL. Runs that DIR has complete are not
repeated, so an interrupted study goes on where it stopped. Leaves in DIR:

    results.json      a list of {method, seed, agent, step, sampled, greedy}
    costs.json        a list of {method, seed, wall_seconds, cpu_seconds, responses}
    diagnostics.json  a list of {method, seed, agent, source, ...}: what agent made of the responses of source
    table.md          means, standard deviations, paired differences with 95 % intervals, costs, diagnostics
    curves.png        accuracy over steps, mean and range over seeds
    runs/             the runs themselves, with all metrics

docs/claim.md says what the figures show and what they do not.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from claim_report import diagnostics_table, draw, table
from rich.console import Console

from megatron_hacpo.config import load
from megatron_hacpo.report.files import EVALUATION, METRICS, read_rows

ROOT = Path(__file__).parents[1]
TINY = ROOT / "examples" / "tiny"
COSINE_EVERY = 20
"""Steps between measurements of the angle between own and cross gradients."""


@dataclass(frozen=True)
class Method:
    """What a run changes of `config`. digits: of an operand; more of them, longer answers."""

    settings: tuple[str, ...] = ()
    config: str = "pair.yaml"
    digits: int = 5


def hacpo(*settings: str, **kwargs: Any) -> Method:
    return Method(tuple(f"algorithm.{setting}" for setting in ("name=hacpo", *settings)), **kwargs)


BY_LENGTH = ("cross_window=per_sequence", "tau=9.2")

BASELINES = {
    "grpo": Method(("algorithm.name=grpo", "algorithm.clip_low=0.2", "algorithm.clip_high=0.28")),
    "gspo": Method(("algorithm.name=gspo",)),
    "gspo_x2": Method(
        ("algorithm.name=gspo", "rollout.responses_per_prompt=16", "batch.minibatch_prompts=4")
    ),
    "naive": Method(("algorithm.name=naive",)),
    "hacpo": hacpo(),
}
ABLATIONS = {
    "hacpo_no_adv": hacpo("capability_baseline=false"),
    "hacpo_no_omega": hacpo("discrepancy_gradient=false"),
    "hacpo_alpha_0": hacpo("alpha=0.0"),
    "hacpo_alpha_2": hacpo("alpha=2.0"),
    "hacpo_alpha_3": hacpo("alpha=3.0"),
    "hacpo_no_stepwise": hacpo("delta_step=0.0"),
    "hacpo_no_clip": hacpo("cross_clip=none"),
    "hacpo_delta_0.2": hacpo("delta=0.2"),
    "hacpo_delta_0.4": hacpo("delta=0.4"),
}
THIRD_AGENT = {
    "gspo_trio": Method(("algorithm.name=gspo",), config="trio.yaml"),
    "hacpo_trio": hacpo(config="trio.yaml"),
}
LENGTHS = {
    "hacpo_by_length": hacpo(*BY_LENGTH),
    "short_gspo_x2": Method(BASELINES["gspo_x2"].settings, digits=2),
    "short_delta_0.2": hacpo("delta=0.2", digits=2),
    "short_delta_0.6": hacpo(digits=2),
    "short_by_length": hacpo(*BY_LENGTH, digits=2),
}
METHODS = BASELINES | ABLATIONS | THIRD_AGENT | LENGTHS


@dataclass(frozen=True)
class Run:
    """One training run of the study."""

    method: str
    seed: int
    out: Path
    steps: int
    every: int
    models: Path
    """Folder of the agents' folders."""

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.method / f"seed_{self.seed}"

    @property
    def config(self) -> Path:
        return TINY / METHODS[self.method].config

    @property
    def agents(self) -> list[str]:
        return load(self.config, []).names

    @property
    def settings(self) -> list[str]:
        """Overrides of the configuration file."""
        method = METHODS[self.method]
        return [
            *method.settings,
            *(f"agents.{name}.model={self.models / name}" for name in self.agents),
            f"data.digits={method.digits}",
            f"run.dir={self.folder.parent}",
            f"run.name={self.folder.name}",
            f"run.seed={self.seed}",
            f"run.steps={self.steps}",
            f"evaluation.every={self.every}",
            "report.tensorboard=false",
            f"report.gradient_cosine_every={COSINE_EVERY}",
        ]

    def cost(self) -> dict[str, Any] | None:
        """What the run cost; None unless it is complete and was run with these very settings."""
        path = self.folder / "cost.json"
        cost: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return cost if cost.pop("settings", None) == self.settings else None

    def results(self) -> list[dict[str, Any]]:
        """The rows of results.json of this run."""
        return [
            {
                "method": self.method,
                "seed": self.seed,
                "agent": agent,
                **{key: row[key] for key in ("step", "sampled", "greedy")},
            }
            for agent in load(self.folder / "config.yaml", []).names
            for row in read_rows(self.folder / agent / EVALUATION)
        ]

    def diagnostics(self) -> list[dict[str, Any]]:
        """Per edge the means over all steps of the trainer's metrics `edge/SOURCE/NAME`."""
        found = []
        names = load(self.folder / "config.yaml", []).names
        for agent in names:
            rows = read_rows(self.folder / agent / METRICS)
            for source in names:
                prefix = f"edge/{source}/"
                keys = dict.fromkeys(key for row in rows for key in row if key.startswith(prefix))
                means = {}
                for key in keys:
                    values = [row[key] for row in rows if row.get(key) is not None]
                    means[key.removeprefix(prefix)] = statistics.fmean(values) if values else None
                if means:
                    edge = {"method": self.method, "seed": self.seed, "agent": agent, "source": source}
                    found.append(edge | means)
        return found


class Stopped(RuntimeError):  # noqa: N818 - reads as what happened
    """A command was ended because another one failed, or the study was interrupted."""


class Study:
    """Runs commands, so many at a time, and ends them all when it is left early."""

    def __init__(self, jobs: int) -> None:
        self._jobs = jobs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self.peak_memory = 0
        """Largest sum of resident memory of all processes seen, bytes (sampled every second)."""

    def all(self, function: Any, items: list[Any]) -> list[Any]:
        """`function` of every item, in threads. The first failure ends the others."""
        with ThreadPoolExecutor(self._jobs) as pool:
            futures = [pool.submit(function, item) for item in items]
            try:
                while not all(future.done() for future in futures):
                    self._sample_memory()
                    if any(future.done() and future.exception() for future in futures):
                        break
                    time.sleep(1.0)
            finally:
                unfinished = [future for future in futures if not future.done()]
                self._stopped = bool(unfinished)
                for future in unfinished:
                    future.cancel()
                with self._lock:
                    for process in self._processes.values():
                        process.terminate()
        failures = [future.exception() for future in futures if not future.cancelled()]
        for failure in failures:
            if failure is not None and not isinstance(failure, Stopped):
                raise failure
        return [future.result() for future in futures]

    def run(self, command: list[str], log: Path) -> tuple[float, float]:
        """Wall and CPU seconds of a command, its descendants included; RuntimeError if it fails."""
        start = time.monotonic()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file, self._lock:
            if self._stopped:
                raise Stopped
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            self._processes[process.pid] = process
        # wait4, because it alone says what this child and the descendants that it waited for have used.
        _, status, usage = os.wait4(process.pid, 0)
        with self._lock:
            del self._processes[process.pid]
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode and self._stopped:
            raise Stopped
        if process.returncode:
            end = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise RuntimeError(f"{' '.join(command)}: exit code {process.returncode}; {log} ends:\n{end}")
        return time.monotonic() - start, usage.ru_utime + usage.ru_stime

    def _sample_memory(self) -> None:
        total = 0
        for process in psutil.Process().children(recursive=True):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # it ended between the list and the look
                continue
        self.peak_memory = max(self.peak_memory, total)


def make_agent(study: Study, folder: Path, seed: int, digits: int) -> None:
    """One agent of one seed: its last warm-start stage from the committed weights before it.

    For another number of digits than theirs, all stages.
    """
    done = folder.with_suffix(".made")
    if done.is_file():
        return
    command = [sys.executable, str(ROOT / "tools/make_tiny_agents.py"), "--out", str(folder.parent)]
    command += ["--agent", folder.name, "--seed", str(seed), "--digits", str(digits)]
    if digits == Method.digits:
        command += ["--start", str(TINY)]
    study.run(command, folder.with_suffix(".log"))
    done.touch()


def train(study: Study, run: Run) -> dict[str, Any]:
    """One run, unless it is there already; what it cost."""
    if (known := run.cost()) is not None:
        return known
    command = [sys.executable, "-m", "megatron_hacpo", "launch", str(run.config), "--overwrite"]
    for setting in run.settings:
        command += ["--set", setting]
    log = run.folder.with_suffix(".log")
    wall, cpu = study.run(command, log)
    config = load(run.folder / "config.yaml", [])
    cost = {
        "method": run.method,
        "seed": run.seed,
        "wall_seconds": round(wall, 1),
        "cpu_seconds": round(cpu, 1),
        "responses": run.steps * config.batch.prompts * config.rollout.responses_per_prompt,
    }
    (run.folder / "cost.json").write_text(json.dumps({**cost, "settings": run.settings}))
    return cost


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", default="1,2,3,4,5", help="comma-separated")
    parser.add_argument(
        "--methods", default=",".join(BASELINES), help=f"comma-separated, of: {', '.join(METHODS)}"
    )
    parser.add_argument("--ablations", action="store_true", help="also HACPO with single parts changed")
    parser.add_argument("--third-agent", action="store_true", help="also three agents")
    parser.add_argument("--lengths", action="store_true", help="also windows by length, and shorter answers")
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--agents", type=Path, help="take the agents from here instead of making them")
    parser.add_argument("--out", type=Path, default=Path("runs/claim"))
    args = parser.parse_args()
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    args.methods = args.methods.split(",")
    for asked, more in (
        (args.ablations, ABLATIONS),
        (args.third_agent, THIRD_AGENT),
        (args.lengths, LENGTHS),
    ):
        args.methods += [method for method in more if asked and method not in args.methods]
    if unknown := set(args.methods) - set(METHODS):
        parser.error(f"--methods: {', '.join(sorted(unknown))}: not one of {', '.join(METHODS)}")
    return args


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the runs end too
    args = parse()
    out: Path = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    console = Console()
    study = Study(args.jobs)
    started, finished = time.monotonic(), 0

    def models(method: str, seed: int) -> Path:
        digits = METHODS[method].digits
        return args.agents.resolve() if args.agents else out / "agents" / f"digits_{digits}" / f"seed_{seed}"

    runs = [
        Run(method, seed, out, args.steps, args.every, models(method, seed))
        for seed in args.seeds
        for method in args.methods
    ]
    if args.agents is None:
        console.print(f"warm start of the agents, seeds {args.seeds}")
        needed = {
            (run.models / name, run.seed, METHODS[run.method].digits) for run in runs for name in run.agents
        }
        study.all(lambda agent: make_agent(study, *agent), sorted(needed))

    def one(run: Run) -> dict[str, Any]:
        nonlocal finished
        fresh = run.cost() is None
        if fresh:
            console.print(f"{run.method}, seed {run.seed}: started; {run.folder}", soft_wrap=True)
        cost = train(study, run)
        finished += 1
        ends = {row["agent"]: row["sampled"] for row in run.results()}
        line = "  ".join(f"{agent} {value:.3f}" for agent, value in ends.items())
        how = f"{cost['wall_seconds']:.0f} s, {cost['cpu_seconds']:.0f} CPU s" if fresh else "was there"
        console.print(
            f"[{finished}/{len(runs)}, {(time.monotonic() - started) / 60:.1f} min] {run.method}, "
            f"seed {run.seed}: {line}  ({how})",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return cost

    costs = study.all(one, runs)
    results = [row for run in runs for row in run.results()]
    (out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    (out / "costs.json").write_text(json.dumps(costs, indent=1) + "\n")
    diagnostics = [edge for run in runs for edge in run.diagnostics()]
    (out / "diagnostics.json").write_text(json.dumps(diagnostics, indent=1) + "\n")
    text = table(results, costs) + diagnostics_table(diagnostics)
    (out / "table.md").write_text(text)
    draw(results, out / "curves.png")
    console.print(text, highlight=False, markup=False)
    minutes = (time.monotonic() - started) / 60
    console.print(
        f"{minutes:.1f} min; peak memory of all processes {study.peak_memory / 1e9:.1f} GB; all is in {out}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()

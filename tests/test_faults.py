"""Agents that die or hang, a run that is asked to stop, and parts of a run alone, through `hacpo launch`."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from learner_steps import ROOT
from rich.console import Console
from safetensors.torch import load_file
from test_end_to_end import SMALL, start
from test_resume import assert_same, results, rows
from torch.distributed import TCPStore

from megatron_hacpo.checkpoint.resume import find_resume_point
from megatron_hacpo.checkpoint.steps import checkpoint_folder, complete_steps
from megatron_hacpo.config import ConfigError, check, load
from megatron_hacpo.launch.run import check_inputs, describe_stop
from megatron_hacpo.process.heartbeat import Beat, read_beats

pytestmark = pytest.mark.real

SETTINGS = ("evaluation.prompts=0", "report.tensorboard=false", "checkpoint.every=1")
THIRD = "agents.C={model: examples/tiny/C}"
PATIENCE = 120.0
"""Seconds for anything to happen."""


class Run:
    """`hacpo launch` of tiny agents in the background."""

    def __init__(self, folder: Path, name: str, *overrides: str) -> None:
        self.path = folder / name
        command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml"]
        for setting in (*SMALL, *SETTINGS, f"run.dir={folder}", f"run.name={name}", *overrides):
            command += ["--set", setting]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._store: TCPStore | None = None

    def reaches(self, process: str, step: int, phase: str = "update") -> Beat:
        """Wait until a process of the run is in a phase of `step`, or of a later one."""
        deadline = time.monotonic() + PATIENCE
        while True:
            assert time.monotonic() < deadline
            assert self.process.poll() is None, self.process.communicate()
            beat = self._beat(process)
            if beat is not None and beat.step >= step and beat.phase == phase:
                return beat
            time.sleep(0.002)

    def end(self) -> tuple[int, str, str]:
        """Wait; the launcher's code, stdout and stderr. None of its processes, nor of theirs, may be left."""
        ours = [
            *psutil.Process(self.process.pid).children(recursive=True),
            *(p for p in psutil.process_iter(["cmdline"]) if self._is_ours(p)),
        ]
        out, err = self.process.communicate(timeout=PATIENCE)
        psutil.wait_procs(ours, timeout=5)
        left = [p for p in psutil.process_iter(["cmdline"]) if self._is_ours(p)]
        assert [p for p in ours if p.is_running() and p.status() != psutil.STATUS_ZOMBIE] + left == []
        return self.process.returncode, out, err

    def _beat(self, process: str) -> Beat | None:
        file = self.path / "launch.json"
        if self._store is None and file.is_file():
            host, port = json.loads(file.read_text())["store"].split(":")
            self._store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=10))
        return None if self._store is None else read_beats(self._store, [process])[process]

    def _is_ours(self, process: psutil.Process) -> bool:
        return str(self.path / "config.yaml") in (process.info["cmdline"] or ())


def sources(run_dir: Path, agent: str) -> list[str]:
    """Of each step, the agents that `agent` learned from."""
    prefix = "capability/"
    return [
        "".join(sorted(key.removeprefix(prefix) for key in row if key.startswith(prefix)))
        for row in rows(run_dir / agent / "metrics.jsonl")
    ]


def saved(run_dir: Path, step: int) -> list[str]:
    """The agents in a checkpoint."""
    return sorted(path.name for path in checkpoint_folder(run_dir, step).iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> Path:
    """The pair's four steps, with all checkpoints."""
    done = start(folder, "undisturbed", *SETTINGS, "run.steps=4", "checkpoint.keep_last=9")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "undisturbed"


@pytest.fixture(scope="module")
def hung(folder: Path) -> Iterator["Future[tuple[float, int, str]]"]:
    """An agent that hangs: seconds until its run has ended, code and stderr. Others run meanwhile."""
    run = Run(folder, "hung", "run.steps=99", "checks.silent_seconds=15", "agents.B=null")
    beat = run.reaches("A.rank0", 2)
    assert len(psutil.Process(beat.pid).children(recursive=True)) >= 2, "its reward workers"
    os.kill(beat.pid, signal.SIGSTOP)
    stopped = time.monotonic()

    def end() -> tuple[float, int, str]:
        code, _, err = run.end()
        return time.monotonic() - stopped, code, err

    with ThreadPoolExecutor() as threads:
        yield threads.submit(end)


@pytest.fixture(scope="module")
def bereft(folder: Path, hung: object) -> tuple[Path, str]:
    """Three agents: C hangs, then B is killed; what the launcher said of it."""
    settings = ("run.steps=6", "checks.on_agent_loss=continue", "checks.silent_seconds=15")
    run = Run(folder, "bereft", THIRD, *settings)
    os.kill(run.reaches("C.rank0", 2).pid, signal.SIGSTOP)
    os.kill(run.reaches("B.rank0", 4).pid, signal.SIGKILL)
    code, out, err = run.end()
    assert code == 0, out + err
    return run.path, out


def test_the_others_go_on_when_an_agent_hangs_or_dies(bereft: tuple[Path, str]) -> None:
    run_dir, out = bereft
    lost = [line for line in out.splitlines() if line.startswith("error: ")]
    assert len(lost) == 2, out
    assert lost[0].startswith("error: C.rank0 has given no sign of life for 1")
    assert "(last: update of step 2); agent C is lost and A, B go on; " in lost[0]
    assert lost[1].startswith("error: B.rank0 was killed by SIGKILL; agent B is lost and A go on; ")
    assert [row["step"] for row in rows(run_dir / "A/metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    for agent in "AB":
        per_step = sources(run_dir, agent)
        assert per_step == sorted(per_step, key=len, reverse=True), "who is lost does not come back"
        assert per_step[:3] == ["ABC", "ABC", "AB"]
    assert sources(run_dir, "A")[4:] == ["A", "A"]
    assert (run_dir / "A/hf/model.safetensors").is_file()


def test_later_checkpoints_are_of_those_who_are_left(bereft: tuple[Path, str]) -> None:
    run_dir, _ = bereft
    assert complete_steps(run_dir) == [5, 6]
    for step in (5, 6):
        assert saved(run_dir, step) == ["A"]


def test_lost_agents_may_join_anew_when_allowed(folder: Path, bereft: tuple[Path, str]) -> None:
    run_dir, _ = bereft
    config = load(run_dir / "config.yaml", ["run.steps=7"])
    with pytest.raises(ValueError) as caught:
        find_resume_point(run_dir, check_inputs(config, Console(quiet=True)))
    assert str(caught.value).splitlines() == [
        f"agents.{agent}: is in the configuration and not in the checkpoint; "
        f"--allow agents.{agent} if that is meant"
        for agent in "BC"
    ]
    options = ["--resume", "--allow", "agents.B", "--allow", "agents.C"]
    settings = (*SETTINGS, THIRD, "run.steps=7", "checks.on_agent_loss=continue", "checks.silent_seconds=15")
    done = start(folder, "bereft", *settings, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    for agent in "BC":
        joined = f"warning: agent {agent}: joins after step 6 with the weights of examples/tiny/{agent}"
        assert joined in done.stdout
        assert rows(run_dir / agent / "metrics.jsonl")[-1]["step"] == 7
    assert sources(run_dir, "A")[-1] == "ABC"
    assert complete_steps(run_dir) == [6, 7]
    assert saved(run_dir, 7) == ["A", "B", "C"]


def test_an_agent_that_hangs_ends_the_run(hung: "Future[tuple[float, int, str]]") -> None:
    seconds, code, err = hung.result(PATIENCE)
    assert seconds < 25
    assert code == 1
    assert err.startswith("error: A.rank0 has given no sign of life for 1"), err
    assert " s (last: update of step 2); the others were stopped; " in err


def test_an_agent_that_dies_ends_the_run(folder: Path) -> None:
    killed = Run(folder, "killed", "run.steps=99")
    os.kill(killed.reaches("B.rank0", 2, "exchange").pid, signal.SIGKILL)
    code, _, err = killed.end()
    assert code == 1
    assert err.startswith("error: B.rank0 was killed by SIGKILL; the others were stopped; "), err


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_bit(folder: Path, undisturbed: Path) -> None:
    run = Run(folder, "asked", "run.steps=4", "checkpoint.every=9")
    beat = run.reaches("B.rank0", 2, "logprob")
    os.kill(beat.pid, signal.SIGSTOP)
    run.process.send_signal(signal.SIGUSR1)
    time.sleep(1.5)  # until the processes know
    os.kill(beat.pid, signal.SIGCONT)
    code, out, err = run.end()
    assert code == 0, out + err
    assert "asked to stop: the run ends after this step, with a checkpoint" in out
    (step,) = complete_steps(run.path)
    assert beat.step <= step < 4
    assert f"stopped as asked after step {step}; --resume goes on from there" in out
    for agent in "AB":
        assert rows(run.path / agent / "metrics.jsonl")[-1]["step"] == step
    done = start(folder, "asked", *SETTINGS, "run.steps=4", "checkpoint.every=9", options=["--resume"])
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(results(run.path), results(undisturbed))


@pytest.mark.slow
def test_agents_that_share_nothing_stop_at_steps_of_their_own(folder: Path) -> None:
    run = Run(folder, "apart", "run.steps=99", "checkpoint.every=50", "algorithm.name=gspo")
    slow = run.reaches("B.rank0", 2).pid
    os.kill(slow, signal.SIGSTOP)
    run.reaches("A.rank0", 5)
    run.process.send_signal(signal.SIGUSR1)
    time.sleep(1.5)  # until the processes know
    os.kill(slow, signal.SIGCONT)
    code, out, err = run.end()
    assert code == 0, out + err
    assert complete_steps(run.path) == []
    last = {agent: rows(run.path / agent / "metrics.jsonl")[-1]["step"] for agent in "AB"}
    assert last["B"] in (2, 3)
    assert (
        f"stopped as asked: A after step {last['A']}, B after step {last['B']}; agents that share nothing do "
        "not wait for each other; --resume goes on from the start, as there is no checkpoint of all, and "
        "replays the responses that were sampled since"
    ) in out


def test_a_stop_is_told_as_it_was(tmp_path: Path) -> None:
    config = load(ROOT / "examples/tiny/pair.yaml", [f"run.dir={tmp_path}", "run.steps=9"])
    for agent, step in (("A", 7), ("B", 6)):
        (config.path / agent).mkdir(parents=True)
        (config.path / agent / "metrics.jsonl").write_text(json.dumps({"step": step}) + "\n")
    marker = checkpoint_folder(config.path, 5) / "complete.json"
    marker.parent.mkdir(parents=True)
    marker.touch()
    (line,) = describe_stop(config, ["A", "B"])
    assert line.endswith(
        "--resume goes on after step 5, the newest checkpoint of all, and replays the responses that were "
        "sampled since"
    )
    (line,) = describe_stop(config, ["B"])
    assert line == (
        "stopped as asked after step 6; --resume goes on after step 5, the newest checkpoint of all, and "
        "replays the responses that were sampled since"
    )
    nothing = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": 0})})
    assert describe_stop(nothing, ["B"]) == ["stopped as asked after step 6; nothing was saved to go on from"]
    (config.path / "A/metrics.jsonl").write_text(json.dumps({"step": 9}) + "\n")
    assert describe_stop(config, ["A"]) == [], "it came to its end"


@pytest.fixture(scope="module")
def sampled(folder: Path) -> Path:
    """Responses of untrained agents."""
    done = start(folder, "sampled", *SETTINGS, "run.steps=2", "debug.rollout_only=true")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "sampled"


def test_rollouts_alone_train_nothing(sampled: Path) -> None:
    for agent in "AB":
        metrics = rows(sampled / agent / "metrics.jsonl")
        assert [row["step"] for row in metrics] == [1, 2]
        assert all(row["reward/count"] == 32 and "grad_norm" not in row for row in metrics)
        for step in (1, 2):
            assert (sampled / f"step_{step:06}/pool/{agent}.sampled").is_file()
        folders = (sampled / agent / "hf", ROOT / "examples/tiny" / agent)
        after, before = (load_file(folder / "model.safetensors") for folder in folders)
        assert all(torch.equal(after[key], weight) for key, weight in before.items())
    assert complete_steps(sampled) == []


NO_ENGINE = """
import sys

def generate(self, *args, **kwargs):
    raise AssertionError("nothing is to be sampled")

if "train" in sys.orig_argv:
    from megatron_hacpo.rollout.embedded import EmbeddedRollout

    EmbeddedRollout.generate = generate
"""


def test_a_replay_trains_as_the_run_did_and_samples_nothing(
    folder: Path, sampled: Path, undisturbed: Path
) -> None:
    (folder / "sitecustomize.py").write_text(NO_ENGINE)
    replay = (*SETTINGS, f"debug.replay={sampled}", "checkpoint.asynchronous=false")
    done = start(folder, "replayed", *replay, "run.steps=3", path=folder)
    assert done.returncode == 2, "there is no third step to replay"
    error, *more = done.stderr.splitlines()
    assert error.startswith(f"error: debug.replay: {sampled}: has no responses of agent ")
    assert " in step 3: " in error
    assert more == []
    for agent in "AB":
        replayed, expected = (
            rows(d / agent / "metrics.jsonl")[0] for d in (folder / "replayed", undisturbed)
        )
        assert replayed == expected
        weights = [
            (checkpoint_folder(d, 1) / agent / "__0_0.distcp").read_bytes()
            for d in (folder / "replayed", undisturbed)
        ]
        assert weights[0] == weights[1]


def test_a_replay_of_other_agents_is_refused_before_anything_starts(sampled: Path, tmp_path: Path) -> None:
    (tmp_path / "step_000001/pool").mkdir(parents=True)
    for replay, wrong in (
        (sampled / "nowhere", "no such folder; give one such as runs/NAME"),
        (tmp_path, "has no responses of agent A; give the folder of a run in which it samples"),
    ):
        config = load(sampled / "config.yaml", [f"debug.replay={replay}", "agents.B=null"])
        with pytest.raises(ConfigError) as caught:
            check(config)
        assert str(caught.value) == f'debug.replay: "{replay}": {wrong}'


def test_going_on_without_an_agent_needs_the_step_before(sampled: Path) -> None:
    settings = ["checks.on_agent_loss=continue", "exchange.keep_steps=1"]
    with pytest.raises(ConfigError, match=r"exchange\.keep_steps: 1: too few for checks\.on_agent_loss"):
        check(load(sampled / "config.yaml", settings))

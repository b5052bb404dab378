"""The command line: help, exit codes, one `error: ` line a mistake, and nothing started by a mistake."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_hacpo import cli
from megatron_hacpo.config import RunConfig, dump, load
from megatron_hacpo.hf.write import complete_or_absent
from megatron_hacpo.launch.supervise import Interrupted, Process, WorkerFailed
from megatron_hacpo.report import MetricsWriter

ROOT = Path(__file__).parent.parent
PAIR = "examples/tiny/pair.yaml"


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def hacpo(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit code of a command in this process."""
    monkeypatch.setattr(sys, "argv", ["hacpo", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
    monkeypatch.setattr(os, "fork", refuse)


MISTAKES = [
    (["optimizr.lr=1"], "--set optimizr.lr: unknown key; did you mean optimizer?"),
    (["optimizer.lr=fast"], 'optimizer.lr: "fast": not a number; write it plainly, such as 1e-6'),
    (["run.steps=1.5"], "run.steps: 1.5: not a whole number; write it plainly, such as 8"),
    (["agents.A.model=no/where"], 'agents.A.model: "no/where": no such folder in .*; give the path'),
    (
        ["agents.A.model=examples"],
        'agents.A.model: "examples": has no config.json; give a complete Hugging Face',
    ),
    (["agents.A.stop_token=5"], "agents.A.stop_token: 5: not text; put it in quotes"),
    (
        ["agents.A.parallel.tensor=3"],
        "agents.A.parallel.tensor: 3: does not divide num_attention_heads = 4 of",
    ),
    (
        ["agents.A.parallel.pipeline=3"],
        "agents.A.parallel.pipeline: 3: does not divide num_hidden_layers = 2 of",
    ),
    (
        ["batch.minibatch_prompts=5"],
        "batch.minibatch_prompts: 5: does not divide batch.prompts = 16; use a divisor",
    ),
    (["data.task=null", "data.path=none.jsonl"], 'data.path: "none.jsonl": cannot be read'),
    (
        ["data.task=null", "data.path=/dev/null"],
        "data.path: /dev/null is neither a file nor a folder",
    ),
    (["algorithm.delta_step=0.3"], "algorithm.delta_step: 0.3 closes the clipping window"),
]


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize("settings, expected", MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2_and_starts_nothing(
    settings: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    options = [part for setting in [f"run.dir={tmp_path}/runs", *settings] for part in ("--set", setting)]
    assert hacpo(monkeypatch, "launch", PAIR, *options) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert re.match(f"error: {expected if '.*' in expected else re.escape(expected)}", line)
    assert not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("_no_process")
def test_a_taken_run_folder_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = load(PAIR, [f"run.dir={tmp_path}"])
    config.path.mkdir()
    (config.path / "config.yaml").write_text(dump(config))
    assert hacpo(monkeypatch, "launch", PAIR, "--set", f"run.dir={tmp_path}") == 2
    assert "holds a run; choose another name or --overwrite" in capsys.readouterr().err


def test_as_a_command_a_mistake_shows_no_traceback() -> None:
    command = [sys.executable, "-m", "megatron_hacpo", "launch", "none.yaml"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr == "error: config: none.yaml: no such file; give the path of a YAML file\n"


def test_help_is_quick_and_light() -> None:
    code = (
        "import sys; sys.argv = ['hacpo', '--help']\n"
        "from megatron_hacpo import cli\n"
        "try: cli.main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pydantic', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    for word in ("launch", "train", "eval", "report", "hacpo launch examples/tiny/pair.yaml"):
        assert word in result.stdout


def test_launch_gives_the_checked_run_on(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[tuple[RunConfig, dict[str, Any]]] = []
    monkeypatch.setattr(
        "megatron_hacpo.launch.run.launch",
        lambda run, console, machines, **options: seen.append((run, {"host": machines.host, **options})),
    )
    code = hacpo(
        monkeypatch, "launch", PAIR, "--overwrite", "--set", "algorithm.name=grpo", "--set", "run.steps=5"
    )
    assert code == 0
    assert seen == [
        (
            load(PAIR, ["algorithm.name=grpo", "run.steps=5"]),
            {"host": "127.0.0.1", "asked": [], "overwrite": True, "resume": None},
        )
    ]
    assert capsys.readouterr().err.startswith("warning: algorithm.clip_low, clip_high: ")


@pytest.mark.parametrize(
    "error, code, expected",
    [
        (
            lambda worker: WorkerFailed(worker, 1),
            1,
            "error: A.rank0 exited with code 1; the others were stopped",
        ),
        (
            lambda worker: WorkerFailed(worker, -9),
            1,
            "error: A.rank0 was killed by SIGKILL; the others were stopped",
        ),
        (
            lambda worker: WorkerFailed(worker, 2),
            2,
            "error: key: value: wrong; fix (found by A.rank0; more in ",
        ),
        (lambda worker: Interrupted(2), 130, "error: stopped by SIGINT; all processes have ended\n"),
        (lambda worker: Interrupted(15), 143, "error: stopped by SIGTERM; all processes have ended\n"),
    ],
)
def test_how_a_run_ended_is_the_exit_code(
    error: Any, code: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (tmp_path / "log").write_text("error: key: value: wrong; fix\n")

    def fail(*arguments: Any, **options: Any) -> None:
        raise error(Process("A.rank0", tmp_path / "log"))

    monkeypatch.setattr("megatron_hacpo.launch.run.launch", fail)
    assert hacpo(monkeypatch, "launch", PAIR) == code
    assert capsys.readouterr().err.startswith(expected)


def test_train_runs_one_agent(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[tuple[RunConfig, str, int]] = []
    module = SimpleNamespace(train=lambda *given: seen.append(given))
    monkeypatch.setitem(sys.modules, "megatron_hacpo.train", module)
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "B", "--set", "run.steps=2") == 0
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "B", "--from-step", "7") == 0
    assert seen == [(load(PAIR, ["run.steps=2"]), "B", 0), (load(PAIR), "B", 7)]
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "C") == 2
    assert capsys.readouterr().err == "error: --agent: C: no such agent; the agents are A, B\n"


def test_a_users_mistake_met_in_training_is_one_line_unless_more_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def fail(run: RunConfig, agent: str, start: int) -> None:
        raise ValueError("agents.A.model: x: y; z")

    monkeypatch.setitem(sys.modules, "megatron_hacpo.train", SimpleNamespace(train=fail))
    monkeypatch.delenv("HACPO_TRACEBACK", raising=False)
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "A") == 2
    assert capsys.readouterr().err == "error: agents.A.model: x: y; z\n"
    monkeypatch.setenv("HACPO_TRACEBACK", "1")
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "A") == 2
    shown = capsys.readouterr().err
    assert "Traceback" in shown
    assert shown.endswith("\nerror: agents.A.model: x: y; z\n")


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    """With the folder that could not be written: the kernel names none when a file gets too long."""

    def fail(run: RunConfig, agent: str, start: int) -> None:
        with complete_or_absent(tmp_path / "hf", replace=True) as beside:
            (beside / "config.json").touch()
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setitem(sys.modules, "megatron_hacpo.train", SimpleNamespace(train=fail))
    monkeypatch.delenv("HACPO_TRACEBACK", raising=False)
    assert hacpo(monkeypatch, "train", PAIR, "--agent", "A") == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/hf: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (OSError(errno.ENOSPC, "full"), "{target}"),
        (OSError(errno.EACCES, "not allowed", "{target.parent}/.hf.partial/a"), "{target}"),
        (OSError(errno.EACCES, "not allowed", "/somewhere/else"), "/somewhere/else"),
        (OSError("a message alone"), "None"),
    ],
)
def test_errors_of_writing_name_what_was_to_be_written(error: OSError, named: str, tmp_path: Path) -> None:
    target = tmp_path / "hf"
    if error.filename is not None:
        error = OSError(error.errno, error.strerror, error.filename.format(target=target))
    with pytest.raises(OSError) as raised, complete_or_absent(target, replace=True):
        raise error
    assert str(raised.value.filename) == named.format(target=target)
    assert str(raised.value).startswith(str(error)[:10])


@pytest.mark.parametrize("fault", [ZeroDivisionError(), ConnectionResetError(errno.ECONNRESET, "reset")])
def test_a_fault_of_the_programs_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    def fail(run: RunConfig, agent: str, start: int) -> None:
        raise fault

    monkeypatch.setitem(sys.modules, "megatron_hacpo.train", SimpleNamespace(train=fail))
    monkeypatch.setattr(sys, "argv", ["hacpo", "train", PAIR, "--agent", "A"])
    with pytest.raises(type(fault)):
        cli.main()


def test_eval_chooses_agents_and_folders(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    seen: list[Any] = []
    module = SimpleNamespace(main=lambda *given: seen.append(given))
    monkeypatch.setitem(sys.modules, "megatron_hacpo.evaluation.standalone", module)
    run, a, b = load(PAIR), "examples/tiny/A", "examples/tiny/B"
    assert hacpo(monkeypatch, "eval", PAIR) == 0
    assert seen.pop() == (run, ["A", "B"], None, None)
    assert hacpo(monkeypatch, "eval", PAIR, "--agent", "B") == 0
    assert seen.pop() == (run, ["B"], None, None)
    folders = ["--model", b, "--model", a]
    assert hacpo(monkeypatch, "eval", PAIR, "--agent", "B", *folders, "--benchmarks", "greedy,x") == 0
    compared, names, benchmarks, out = seen.pop()
    assert (names, benchmarks, out) == (["B.1", "B.2"], ["greedy", "x"], None)
    assert {name: settings.model for name, settings in compared.agents.items()} == {
        "B.1": b,
        "B.2": a,
        "A": a,
    }
    assert hacpo(monkeypatch, "eval", PAIR, "--model", "examples/tiny/A") == 2
    assert capsys.readouterr().err.startswith(
        "error: --model: examples/tiny/A: which agent is it? add --agent,"
    )
    assert hacpo(monkeypatch, "eval", PAIR, "--out", "examples") == 2
    assert (
        capsys.readouterr().err
        == "error: --out: examples: there is something already; choose another folder\n"
    )
    assert not seen


def test_report_rebuilds_what_a_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    config = load(PAIR, [f"run.dir={tmp_path}", "agents.B=null"])
    writer = MetricsWriter(config.path / "A", tensorboard=False)
    writer.step({"step": 1, "reward/mean": 0.25, "time/step": 2.0})
    writer.close()
    (config.path / "config.yaml").write_text(dump(config))
    assert hacpo(monkeypatch, "report", str(config.path)) == 0
    assert json.loads((config.path / "summary.json").read_text())["steps"] == 1
    assert (config.path / "curves.png").stat().st_size > 0
    assert "0.250 -> 0.250" in capsys.readouterr().out
    assert hacpo(monkeypatch, "report", str(tmp_path)) == 2
    assert "no run there (no config.yaml); give a folder such as runs/NAME" in capsys.readouterr().err

"""All of it, of this machine and of a job, as it is printed."""

import os
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from doctor_inputs import PAIR, ROOT, TWO_NODES, node
from rich.console import Console

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.doctor.examine import examine, examine_job
from megatron_hacpo.doctor.finding import Finding, show


def examined(config: RunConfig | None, file: Path | None = None) -> tuple[bool, list[str]]:
    out = StringIO()
    good = examine(config, Console(file=out, width=60), file=file)
    return good, out.getvalue().splitlines()


def test_the_tiny_pair_is_ready_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    good, lines = examined(load(PAIR), PAIR)
    assert good
    assert {line.split()[0] for line in lines} <= {"ok", "warning"}
    assert lines[0].startswith("ok      torch: ")
    subjects = [line[8:].partition(": ")[0] for line in lines]
    wanted = {"megatron-core", "GPUs", "paths", "disk", "placement", "agents.A step", "agents.B step"}
    assert wanted <= set(subjects)


def test_a_run_that_cannot_start_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    config = load(PAIR, ["agents.B.model=nowhere", "batch.minibatch_prompts=5"])
    good, lines = examined(config)
    assert not good
    errors = [line for line in lines if line.startswith("error")]
    assert len([line for line in errors if "agents.B.model" in line]) == 1
    assert any("batch.minibatch_prompts: 5: does not divide" in line for line in errors)


def test_without_a_configuration_the_machine_is_looked_at() -> None:
    good, lines = examined(None)
    assert good
    assert any(line.startswith("ok      megatron-core: ") for line in lines)


def test_a_missing_megatron_is_told_and_not_met(tmp_path: Path) -> None:
    """The doctor imports nothing that needs what it looks for."""
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text("raise ImportError('no Megatron-core here')\n")
    code = (
        "from rich.console import Console; from megatron_hacpo.config import load; "
        "from megatron_hacpo.doctor.examine import examine; "
        f"print(examine(load({str(PAIR)!r}), Console()))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines()[-1:] == ["True"], done.stderr


def test_a_job_with_an_error_does_not_start(models: Path) -> None:
    out = StringIO()
    config, console = load(TWO_NODES), Console(file=out)
    assert examine_job(config, [node("a"), node("b")], console)
    assert not examine_job(config, [node("a"), node("b", seen={"run.dir": False})], console)
    assert "error   run.dir: " in out.getvalue()


def test_lines_are_plain_but_on_a_terminal() -> None:
    findings = [Finding("ok", "torch", "2.13.0 [x]"), Finding("error", "disk", "word " * 30 + "; free some")]
    plain, terminal = StringIO(), StringIO()
    show(findings, Console(file=plain, width=40))
    assert plain.getvalue() == "".join(f"{finding}\n" for finding in findings)
    show(findings, Console(file=terminal, width=40, force_terminal=True, no_color=True, color_system=None))
    lines = terminal.getvalue().splitlines()
    assert len(lines) > 4
    assert all(line.startswith("        ") for line in lines[2:])
    assert max(map(len, lines)) <= 40

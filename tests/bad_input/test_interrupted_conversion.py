"""What a full disk, a signal or another process leaves when it stops a conversion half-way: nothing."""

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from damage import BOTH_WAYS
from rich.progress import Progress

from megatron_hacpo import cli


def convert_in_child(arguments: list[str], log: Path, mark: Path | None, largest_file: int | None) -> None:
    """A conversion in a process of its own, with `log` as its stderr. With `mark` it makes that file at the
    first tensor and waits until it is gone."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    # A test run in the background inherits that the signal is ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if mark is not None:
        wait_at_first_tensor(mark)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["hacpo", "convert", *arguments]
    cli.main()


def wait_at_first_tensor(mark: Path) -> None:
    def advance(self: Progress, task: int, done: float) -> None:
        Progress.advance = lambda self, task, done: None  # type: ignore[method-assign]
        mark.touch()
        for _ in range(6_000):
            if not mark.exists():
                return
            time.sleep(0.02)

    Progress.advance = advance  # type: ignore[method-assign, assignment]


@pytest.fixture
def in_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., ForkServerProcess]]:
    """Starts `convert_in_child`; its stderr goes to child.log. With `mark`, returns when it waits."""
    here = Path(__file__).parent  # the server imports this module once for all
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here), str(here.parent)]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    children = []

    def start(
        *arguments: object, mark: Path | None = None, largest_file: int | None = None
    ) -> ForkServerProcess:
        words = [str(argument) for argument in arguments]
        child = context.Process(
            target=convert_in_child, args=(words, tmp_path / "child.log", mark, largest_file)
        )
        child.start()
        children.append(child)
        while mark is not None and not mark.exists():
            assert child.is_alive(), (tmp_path / "child.log").read_text()
            time.sleep(0.02)
        return child

    yield start
    for child in children:
        child.kill()
        child.join()


@BOTH_WAYS
def test_a_disk_that_fills_up_leaves_nothing(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, largest_file=20_000)
    child.join(300)
    assert child.exitcode == 2
    (line,) = (tmp_path / "child.log").read_text().splitlines()
    assert line.startswith(f"error: {target}: ")
    assert "File too large" in line
    assert line.endswith("; mend that, nothing was written")
    assert list(target.parent.iterdir()) == []


@BOTH_WAYS
def test_a_killed_conversion_leaves_no_target_and_the_next_one_cleans_up(
    command: str,
    source: str,
    originals: Path,
    target: Path,
    tmp_path: Path,
    in_child: Callable[..., Any],
    convert: Callable[..., list[str]],
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    told = [f"error: {target}: another process is writing it; wait for that one"]
    assert convert(command, originals / source, target, code=2) == told
    child.kill()
    child.join(300)
    assert child.exitcode == -signal.SIGKILL
    assert not target.exists()
    (partial,) = target.parent.iterdir()
    (partial / "left over").touch()
    convert(command, originals / source, target, "--verify")
    assert list(target.parent.iterdir()) == [target]
    assert not (target / "left over").exists()


@BOTH_WAYS
def test_ctrl_c_leaves_nothing_and_no_traceback(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    os.kill(child.pid, signal.SIGINT)
    child.join(300)
    assert child.exitcode == 130
    assert (tmp_path / "child.log").read_text() == ""
    assert list(target.parent.iterdir()) == []


@BOTH_WAYS
def test_a_target_that_appears_half_way_is_left_alone(
    command: str, source: str, originals: Path, target: Path, tmp_path: Path, in_child: Callable[..., Any]
) -> None:
    child = in_child(command, originals / source, target, mark=tmp_path / "mark")
    target.mkdir()
    (target / "mine").touch()
    (tmp_path / "mark").unlink()
    child.join(300)
    assert child.exitcode == 2
    told = f"error: {target}: Directory not empty; mend that, nothing was written\n"
    assert (tmp_path / "child.log").read_text() == told
    assert list(target.parent.iterdir()) == [target]
    assert list(target.iterdir()) == [target / "mine"]

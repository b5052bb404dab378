"""What is converted and refused in these tests: small random folders and a checkpoint."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from random_models import CONFIGS, random_model

from megatron_hacpo import cli
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.runtime import Layout


@pytest.fixture(scope="session")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random folders `qwen3` (tied), `llama` and `moe`, and the checkpoint `megatron` of the first."""
    root = tmp_path_factory.mktemp("originals")
    for name, config in {"qwen3": "qwen3 tied", "llama": "llama", "moe": "qwen3 moe"}.items():
        random_model(CONFIGS[config], root / name)
    hf_to_megatron(root / "qwen3", root / "megatron", layout=Layout())
    return root


@pytest.fixture
def copy(originals: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A copy, to be damaged, of one of the originals."""
    return lambda name: Path(shutil.copytree(originals / name, tmp_path / name))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out" / "target"


@pytest.fixture
def convert(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """`hacpo convert ...` in this process: the lines on stderr, of the expected exit code."""

    def run(*arguments: object, code: int = 0) -> list[str]:
        monkeypatch.setattr(sys, "argv", ["hacpo", "convert", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            cli.main()
        assert left.value.code == code
        return capsys.readouterr().err.splitlines()

    return run


@pytest.fixture
def refusal(convert: Callable[..., list[str]], target: Path) -> Callable[..., str]:
    """What the only line says after `error: `, of a command that leaves nothing behind."""

    def run(command: str, source: Path, *options: object) -> str:
        (line,) = convert(command, source, target, *options, code=2)
        assert not target.parent.exists() or not list(target.parent.iterdir())
        assert line.startswith("error: ")
        return line.removeprefix("error: ")

    return run

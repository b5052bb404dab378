"""The models' folders that the doctor's tests read."""

import json
from pathlib import Path

import pytest
from doctor_inputs import MODELS


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory where models/ has folders with nothing but config.json."""
    for name, config in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path

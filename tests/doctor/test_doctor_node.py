"""What a node reports of itself."""

import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
from doctor_inputs import PAIR, ROOT

from megatron_hacpo.config import load
from megatron_hacpo.doctor.memory import GB
from megatron_hacpo.doctor.node import Gpu, NodeReport, look


def test_a_look_at_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    token = tmp_path / "token"
    config = load(PAIR, [f"run.dir={tmp_path}/not/there/yet", "agents.B.model=examples/tiny/none"])
    report = look(config, {"run.dir": str(token)}, PAIR)
    assert report.seen == {"run.dir": False}
    assert report.missing == ["agents.B.model"]
    assert report.paths["config"] == str(PAIR)
    assert report.models["A"] is not None
    assert report.models["B"] is None
    assert {"torch", "megatron-core"} <= set(report.versions)
    assert report.disk is not None
    assert report.disk > 0
    assert report.host_memory > GB
    token.touch()
    assert look(config, {"run.dir": str(token)}).seen == {"run.dir": True}
    assert look(None).seen == {}
    assert msgspec.json.decode(msgspec.json.encode(report), type=NodeReport) == report


def test_digests_tell_models_apart_and_not_their_layout(tmp_path: Path) -> None:
    digests = []
    for number, text in enumerate(['{"a": 1, "b": 2}', '{"b":2,"a":1}', '{"a": 1, "b": 3}', "{"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "config.json").write_text(text)
        digests.append(look(load(PAIR, [f"agents.A.model={tmp_path}/{number}"])).models["A"])
    assert digests[0] == digests[1] != digests[2]
    assert digests[3] is None


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("""echo '{"sglang": "0.5.23", "torch": "2.14.1"}'""", {"sglang": "0.5.23", "torch": "2.14.1"}),
        ("exit 3", {}),
        (f'exec {sys.executable} "$@"', {"torch": version("torch")}),
        (None, {}),
    ],
)
def test_servers_environments_are_asked(tmp_path: Path, text: str | None, versions: dict[str, str]) -> None:
    python = tmp_path / "python"
    if text is not None:
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
    config = load(PAIR, ["rollout.engine=sglang", f"rollout.sglang.python={python}"])
    report = look(config)
    assert report.servers == {str(python): versions}
    assert ("agents.A.rollout.sglang.python" in report.missing) == (text is None)


FAKE_TORCH = """
class cuda:
    device_count = staticmethod(lambda: 2)
    mem_get_info = staticmethod(lambda i: (70 - i, 80))
    get_device_name = staticmethod(lambda i: "NVIDIA H100 80GB HBM3")
    get_device_capability = staticmethod(lambda i: (9, 0))
"""


def test_gpus_are_looked_at_by_another_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "torch.py").write_text(FAKE_TORCH)
    gpu = Gpu("NVIDIA H100 80GB HBM3", 80, 70, (9, 0))
    report = look(None)
    assert report.gpus == [gpu, msgspec.structs.replace(gpu, free=69)]
    (tmp_path / "torch.py").write_text("raise OSError('no driver')")
    report = look(None)
    assert report.gpus == []
    assert "no driver" in report.gpu_problem

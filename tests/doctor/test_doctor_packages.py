"""Packages: what is supported, what is lost without one, and nodes that differ."""

from typing import Any

import pytest
from doctor_inputs import A100, H100, LLAMA, QWEN, SERVER, TWO_NODES, VERSIONS, node

from megatron_hacpo.config import load
from megatron_hacpo.doctor.node import Gpu
from megatron_hacpo.doctor.packages import findings

SGLANG = f"sglang ({SERVER})"
IN_FLOAT32 = [f"agents.{name}.dtype=float32" for name in (QWEN, LLAMA)]


def without(package: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name != package}


@pytest.mark.parametrize(
    ("changes", "subject", "words"),
    [
        ({"versions": VERSIONS | {"torch": "2.13.0"}}, "torch", "2.13.0, CUDA"),
        ({"versions": VERSIONS | {"cuda": "12.8"}}, "torch", "CUDA 12.8"),
        ({"versions": without("transformer-engine")}, "transformer-engine", "not installed on b"),
        ({"servers": {SERVER: {"sglang": "0.5.22"}}}, SGLANG, "0.5.22 on b"),
    ],
)
def test_nodes_that_differ_are_an_error(changes: dict[str, Any], subject: str, words: str) -> None:
    wrong = [f for f in findings(load(TWO_NODES), [node("a"), node("b", **changes)]) if f.level != "ok"]
    assert [(finding.level, finding.subject) for finding in wrong] == [("error", subject)]
    assert words in wrong[0].text
    assert "; " in wrong[0].text


VERDICTS: dict[str, tuple[dict[str, str], list[Gpu], list[str], str, str]] = {
    "old megatron": (VERSIONS | {"megatron-core": "0.15.0"}, [H100], [], "megatron-core", "error"),
    "new megatron": (VERSIONS | {"megatron-core": "0.20.0"}, [H100], [], "megatron-core", "error"),
    "no megatron": (without("megatron-core"), [H100], [], "megatron-core", "error"),
    "old torch": (VERSIONS | {"torch": "2.5.1"}, [H100], [], "torch", "error"),
    "torch of a container": (VERSIONS | {"torch": "2.9.0a0+nv25.9"}, [H100], [], "torch", "ok"),
    "no engine": (without("transformer-engine"), [H100], [], "transformer-engine", "warning"),
    "no engine, no gpus": (without("transformer-engine"), [], [], "transformer-engine", "ok"),
    "no engine, float32": (
        without("transformer-engine"),
        [H100],
        IN_FLOAT32,
        "transformer-engine",
        "ok",
    ),
    "no engine, offloading": (
        without("transformer-engine"),
        [H100],
        ["optimizer.cpu_offload=true"],
        "transformer-engine",
        "error",
    ),
    "no engine, no apex": (without("transformer-engine"), [H100], [], "apex", "warning"),
    "no flash-attn, older gpus": (VERSIONS, [A100], [], "flash-attn", "error"),
    "flash-attn": (VERSIONS | {"flash-attn": "2.8.0"}, [A100], [], "flash-attn", "ok"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_trainers_environment(case: str) -> None:
    versions, gpus, settings, subject, level = VERDICTS[case]
    found = findings(load(TWO_NODES, settings), [node(versions=versions, gpus=gpus)])
    assert [finding.level for finding in found if finding.subject == subject] == [level]


@pytest.mark.parametrize(
    ("server", "transport", "level", "words"),
    [
        ({"sglang": "0.5.23", "torch": "2.14.1"}, "tensor", "ok", "torch 2.14.1"),
        ({"sglang": "0.5.20", "torch": "2.14.1"}, "tensor", "error", "0.5.20"),
        ({}, "tensor", "error", "no SGLang"),
        ({"sglang": "0.5.23", "torch": "2.9.0"}, "tensor", "warning", "transport tensor may not work"),
        ({"sglang": "0.5.23", "torch": "2.9.0"}, "auto", "ok", "; weights go through files"),
        ({"sglang": "0.5.23", "torch": "2.9.0"}, "disk", "ok", "torch 2.9.0"),
    ],
)
def test_servers_environments(server: dict[str, str], transport: str, level: str, words: str) -> None:
    config = load(TWO_NODES, [f"rollout.sglang.transport={transport}"])
    (found,) = (f for f in findings(config, [node(servers={SERVER: server})]) if f.subject == SGLANG)
    assert found.level == level
    assert words in found.text

"""What is made of the nodes' reports: devices, files, disk, the network, and whether the run fits."""

from pathlib import Path
from typing import Any

import pytest
from doctor_inputs import A100, FOUR_NODES, H100, LLAMA, QWEN, TWO_NODES, node

from megatron_hacpo.config import load
from megatron_hacpo.doctor.finding import Finding, has_error
from megatron_hacpo.doctor.judge import judge, nodes_of
from megatron_hacpo.doctor.memory import GB
from megatron_hacpo.doctor.node import Gpu, shared_folders
from megatron_hacpo.launch.placement import Node

pytestmark = pytest.mark.usefixtures("models")


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def levels(findings: list[Finding], subject: str) -> list[str]:
    return [finding.level for finding in findings if finding.subject == subject]


@pytest.mark.parametrize(("file", "nodes"), [(TWO_NODES, 2), (FOUR_NODES, 4)])
def test_nodes_that_fit_have_nothing_to_mend(file: Path, nodes: int) -> None:
    """Of the cache of the larger model alone there is something to say."""
    found = judge(load(file), [node(f"node{i}") for i in range(nodes)])
    assert not has_error(found)
    assert {finding.subject for finding in bad(found)} <= {f"agents.{LLAMA} memory, generation"}
    for agent in (QWEN, LLAMA):
        training = next(f for f in found if f.subject == f"agents.{agent} memory, training")
        assert " of 80.0 GB (weights " in training.text
    packages = {"torch", "megatron-core", "transformers", "transformer-engine", "flash-attn", "apex"}
    assumed = {"assumed for memory", "assumed for steps"}
    assert {finding.subject for finding in found} >= packages | assumed


ONE_OF_TWO: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no gpus": ({"gpus": []}, "error", "GPUs", "b: none"),
    "gpus fail": ({"gpus": [], "gpu_problem": "no driver"}, "error", "GPUs", "no driver"),
    "busy gpu": (
        {"gpus": [H100] * 7 + [Gpu(H100.name, 80 * GB, 20 * GB, (9, 0))]},
        "warning",
        "GPUs",
        "GPU 7 has 20.0 GB of 80.0 GB free",
    ),
    "mixed gpus": ({"gpus": [H100] * 4 + [A100] * 4}, "warning", f"agents.{LLAMA}", "different GPUs"),
    "small shm": ({"shared_memory": 64 * 10**6}, "warning", "shared memory", "64 MB free"),
    "no shm": ({"shared_memory": None}, "warning", "shared memory", "--shm-size"),
    "little memory": ({"host_memory": 300 * GB}, "warning", "host memory", "b: 300 GB"),
    "path": ({"missing": ["data.path"]}, "error", "data.path", "not there on b; use a file system"),
    "model": ({"models": {QWEN: "1", LLAMA: "3"}}, "error", f"agents.{LLAMA}.model", "3 on b"),
    "unseen": ({"seen": {"run.dir": False}}, "error", "run.dir", "b does not see"),
    "little disk": ({"disk": 300 * GB}, "error", "disk", "300 GB free"),
    "some disk": ({"disk": 600 * GB}, "warning", "disk", "lower checkpoint.keep_last"),
}


@pytest.mark.parametrize("case", ONE_OF_TWO)
def test_one_node_of_two_is_wrong(case: str) -> None:
    changes, level, subject, words = ONE_OF_TWO[case]
    found = bad(judge(load(TWO_NODES), [node("a"), node("b", **changes)]))
    matching = [f for f in found if f.subject == subject and words in f.text]
    assert [finding.level for finding in matching] == [level]
    assert "; " in matching[0].text


@pytest.mark.parametrize(("transport", "level"), [("auto", "error"), ("disk", "error"), ("tensor", None)])
def test_weights_travel_through_folders_that_all_nodes_see(transport: str, level: str | None) -> None:
    key = f"agents.{QWEN}.rollout.sglang.weights_dir"
    settings = [f"{key}=/scratch", f"agents.{QWEN}.rollout.sglang.transport={transport}"]
    config = load(TWO_NODES, settings)
    assert shared_folders(config).keys() == {"run.dir", *([key] if level else [])}
    seen = dict.fromkeys(shared_folders(config), True)
    blind = {**seen, key: False} if level else seen
    found = judge(config, [node("a", seen=seen), node("b", seen=blind)])
    texts = [finding.text for finding in found if finding.subject == key]
    assert levels(found, key) == ([level] if level else [])
    assert all(text.startswith("/scratch: b does not see what is written there; set") for text in texts)


@pytest.mark.parametrize(
    ("changes", "level", "subject"),
    [
        ({"missing": ["data.path"]}, "error", "data.path"),
        ({"gpus": [H100] * 4}, "error", f"agents.{LLAMA}.parallel"),
        ({"gpus": []}, "ok", "GPUs"),
    ],
)
def test_both_nodes_are_alike(changes: dict[str, Any], level: str, subject: str) -> None:
    found = judge(load(TWO_NODES), [node(host, **changes) for host in "ab"])
    assert levels(found, subject) == [level]


def test_nodes_that_do_not_reach_each_other_are_named() -> None:
    reports, config = [node("a"), node("b")], load(TWO_NODES)
    found = judge(config, reports, met={"a": {"b": "timed out"}, "b": {"a": ""}})
    network = next(str(f) for f in found if f.subject == "network")
    assert network.startswith("error   network: a does not reach b: timed out; ")
    found = judge(config, reports, met={"a": {"b": ""}, "b": {"a": ""}})
    assert levels(found, "network") == ["ok"]


def test_a_model_that_cannot_be_read_is_an_error_once(models: Path) -> None:
    (models / "models" / "Qwen2.5-7B-Instruct" / "config.json").write_text('{"model_type": "gpt2"}')
    found = judge(load(TWO_NODES), [node("a"), node("b")])
    assert levels(found, f"agents.{QWEN}.model") == ["error"]


def test_more_colocated_servers_than_gpus_are_an_error() -> None:
    found = judge(load(TWO_NODES, ["rollout.sglang.servers=9"]), [node("a"), node("b")])
    assert levels(found, f"agents.{QWEN}.rollout.sglang.servers") == ["error"]


def test_nodes_of_reports() -> None:
    assert nodes_of([node("a"), node("b", gpus=[H100])]) == [Node("a", 8), Node("b", 1)]
    assert nodes_of([node("a", gpus=[])])[0].devices > 10**6

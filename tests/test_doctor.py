"""The doctor: what a node reports, what is made of it, and the two estimates, with real models' numbers."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from rich.console import Console

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.doctor import balance, memory
from megatron_hacpo.doctor.balance import DEVICES, UNKNOWN, Machine, better_split, device_of, predict
from megatron_hacpo.doctor.examine import examine, examine_job
from megatron_hacpo.doctor.finding import Finding, has_error, show
from megatron_hacpo.doctor.judge import judge, nodes_of
from megatron_hacpo.doctor.memory import GB, MemoryEstimate, estimate
from megatron_hacpo.doctor.node import Gpu, NodeReport, look, shared_folders
from megatron_hacpo.doctor.reach import meet
from megatron_hacpo.doctor.shape import Shape, read_shape, read_shapes
from megatron_hacpo.hf.families import head_size, tensor_shapes
from megatron_hacpo.hf.read import read_config
from megatron_hacpo.launch.placement import Node, place

ROOT = Path(__file__).parent.parent
PAIR = ROOT / "examples" / "tiny" / "pair.yaml"
TWO_NODES = ROOT / "examples" / "paper" / "qwen7b_llama8b_2nodes.yaml"
FOUR_NODES = ROOT / "examples" / "paper" / "qwen7b_llama8b_4nodes.yaml"
QWEN, LLAMA = "qwen-7b", "llama-8b"

QWEN_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18_944,
    "num_hidden_layers": 28,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
}
LLAMA_1B = {
    **LLAMA_8B,
    "hidden_size": 2048,
    "head_dim": 64,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "tie_word_embeddings": True,
}
EXPERTS = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
}
"""Of the models' public config.json: Qwen2.5-7B, Llama-3.1-8B, Llama-3.2-1B, Qwen3-30B-A3B."""

MODELS = {
    "Qwen2.5-7B-Instruct": QWEN_7B,
    "Llama-3.1-8B-Instruct": LLAMA_8B,
    "Llama-3.2-1B-Instruct": LLAMA_1B,
    "Qwen3-30B-A3B": EXPERTS,
}
PARAMETERS = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""As published."""

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GB, 79 * GB, (9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * GB, 79 * GB, (8, 0))
ON_H100 = Machine(device_of(H100.name), H100.total)
SERVER = "/opt/sglang/bin/python"
VERSIONS = {
    "torch": "2.14.1+cu130",
    "cuda": "13.0",
    "nccl": "2.29.2",
    "megatron-core": "0.19.2",
    "transformers": "5.24.0",
    "transformer-engine": "2.11.0",
}


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A working directory where models/ has folders with nothing but config.json."""
    for name, config in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def node(host: str = "a", **changes: Any) -> NodeReport:
    """A node that fits the examples of several nodes."""
    usual: dict[str, Any] = {
        "host": host,
        "python": "3.12.3",
        "versions": VERSIONS,
        "servers": {SERVER: {"sglang": "0.5.23", "torch": "2.14.1"}},
        "gpus": [H100] * 8,
        "host_memory": 2000 * GB,
        "shared_memory": 500 * GB,
        "disk": 10_000 * GB,
        "paths": {"data.path": "data/math_train.jsonl"},
        "models": {QWEN: "1", LLAMA: "2"},
        "seen": {"run.dir": True},
    }
    return NodeReport(**{**usual, **changes})


def without(*packages: str) -> dict[str, str]:
    return {name: version for name, version in VERSIONS.items() if name not in packages}


def bad(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level != "ok"]


def shape_of(agent: str, config: RunConfig) -> Shape:
    return read_shape(config.agents[agent])


def estimated(config: RunConfig, agent: str = QWEN, gpu: int | None = 80 * GB) -> MemoryEstimate:
    return estimate(config, agent, shape_of(agent, config), gpu)


def judged(config: RunConfig, agent: str = QWEN) -> list[Finding]:
    return list(memory.findings(config, agent, estimated(config, agent)))


def shapes(config: RunConfig) -> dict[str, Shape]:
    return {name: shape for name, shape in read_shapes(config).items() if isinstance(shape, Shape)}


# Shapes


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_the_published_ones_and_those_of_the_tables(model: str) -> None:
    hf = SimpleNamespace(**MODELS[model])
    assert Shape(hf).parameters == PARAMETERS[model]
    assert Shape(hf).parameters == sum(math.prod(shape) for shape in tensor_shapes(hf).values())


@pytest.mark.parametrize("name", ["A", "B"])
def test_parameters_of_a_real_folder_are_those_of_its_files(name: str) -> None:
    from megatron_hacpo.hf.read import HFWeights

    folder = ROOT / "examples" / "tiny" / name
    stored = HFWeights(folder).stored.values()
    assert Shape(read_config(folder)).parameters == sum(math.prod(s.shape) for s in stored)


@pytest.mark.parametrize("model", MODELS)
def test_work_is_counted_as_micro_batches_count_it(model: str) -> None:
    from megatron_hacpo.megatron.batching import Cost

    hf = SimpleNamespace(**MODELS[model])
    experts = hf.model_type == "qwen3_moe"
    cost = Cost.of_model(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_size(hf),
        ffn_hidden_size=8 * hf.moe_intermediate_size if experts else hf.intermediate_size,
        vocab_size=hf.vocab_size,
    )
    assert Shape(hf).forward(3000) == pytest.approx(cost(3000), rel=1e-12)


def test_constants_of_other_modules_are_theirs() -> None:
    """They are not imported, since Megatron-core would be too."""
    source = ROOT / "megatron_hacpo"
    chunked = (source / "megatron" / "chunked_logprob.py").read_text()
    assert f"CHUNK_TOKENS = {memory.CHUNK_TOKENS}\n" in chunked
    local = (source / "rollout" / "local.py").read_text()
    assert f"max_batch_responses: int = {memory.LOCAL_BATCH}," in local


def parallel(**sizes: int) -> Any:
    return load(PAIR, [f"agents.A.parallel.{k}={v}" for k, v in sizes.items()]).agents["A"].parallel


def test_stages_hold_the_model_once() -> None:
    shape = Shape(SimpleNamespace(**LLAMA_8B))
    stages = [shape.held(parallel(pipeline=4), stage).all for stage in range(4)]
    assert sum(stages) == shape.parameters
    assert stages[0] > stages[1] == stages[2]


def test_a_tied_embedding_is_in_both_end_stages() -> None:
    shape = Shape(SimpleNamespace(**LLAMA_1B))
    stages = [shape.held(parallel(pipeline=2), stage).all for stage in range(2)]
    assert sum(stages) == shape.parameters + 128_256 * 2048


def test_tensor_parallel_ranks_share_all_but_the_norms() -> None:
    shape = Shape(SimpleNamespace(**LLAMA_8B))
    norms = (2 * 32 + 1) * 4096
    assert 4 * shape.held(parallel(tensor=4), 0).all == shape.parameters + 3 * norms


def test_experts_are_divided_over_expert_ranks_alone() -> None:
    shape = Shape(SimpleNamespace(**EXPERTS))
    whole = 48 * 128 * 3 * 2048 * 768
    held = shape.held(parallel(expert=8, tensor=2, data=4), 0)
    assert held.expert == whole // 8
    assert shape.held(parallel(), 0).all == shape.parameters
    assert held.dense < shape.parameters - whole


# Memory


def test_training_of_two_nodes_in_numbers(models: Path) -> None:
    config = load(TWO_NODES)
    training = estimated(config).training
    held = shape_of(QWEN, config).held(config.agents[QWEN].parallel, 0).all
    assert held == pytest.approx(7.6156e9 / 2, rel=1e-3)
    assert training.weights == 2 * held
    assert training.gradients == 4 * held
    assert training.optimizer == pytest.approx(12 * held / 4, abs=2)
    # A layer's input for each of 28 layers, one layer computed again, its gradients, two gathered inputs.
    # A layer: 4 h / 2 of norms; (2 h + 2 x 512 + 4 x 18,944) / 2 of attention and feed-forward.
    layer = (4 * 3584 + 2 * 3584 + 2 * 512 + 4 * 18_944) / 2
    assert training.activations == 2 * 16_384 * (28 * 3584 / 2 + 2 * layer + 2 * 3584)
    assert 1 * GB < training.log_probs < 4 * GB
    assert training.host > 2 * training.weights  # the reference of the KL penalty


@pytest.mark.parametrize(("file", "nodes"), [(TWO_NODES, 2), (FOUR_NODES, 4)])
def test_the_examples_of_several_nodes_fit_80_gb(models: Path, file: Path, nodes: int) -> None:
    reports = [node(f"node{i}") for i in range(nodes)]
    findings = judge(load(file), reports)
    assert not has_error(findings)
    for agent in (QWEN, LLAMA):
        training = next(f for f in findings if f.subject == f"agents.{agent} memory, training")
        assert training.level == "ok"
        assert " of 80.0 GB (weights " in training.text
    assert {f.subject for f in findings} >= {"assumed for memory", "assumed for steps"}


@pytest.mark.parametrize(
    ("setting", "fix"),
    [
        ("optimizer.distributed=false", "set optimizer.distributed: true"),
        ("agents.qwen-7b.recompute=none", "set agents.qwen-7b.recompute: full"),
        ("agents.qwen-7b.recompute=selective", "set agents.qwen-7b.recompute: full"),
    ],
)
def test_two_nodes_without_what_saves_memory_do_not_fit(models: Path, setting: str, fix: str) -> None:
    assert judged(load(TWO_NODES))[0].level == "ok"
    first = judged(load(TWO_NODES, [setting]))[0]
    assert (first.level, first.subject) == ("warning", f"agents.{QWEN} memory, training")
    assert "too much; " in first.text
    assert fix in first.text


def test_fewer_tokens_need_less(models: Path) -> None:
    settings = ["agents.qwen-7b.recompute=none", "batch.microbatch_tokens=5120"]
    assert judged(load(TWO_NODES, settings))[0].level == "ok"


def test_offloading_moves_the_optimizer_to_the_host(models: Path) -> None:
    kept = estimated(load(TWO_NODES, [f"agents.{QWEN}.placement.offload=none"])).training
    moved = estimated(
        load(TWO_NODES, ["optimizer.cpu_offload=true", f"agents.{QWEN}.placement.offload=none"])
    ).training
    assert moved.optimizer == 0
    assert moved.host - kept.host == pytest.approx(kept.optimizer, rel=1e-6)


def test_without_a_kl_penalty_no_reference_is_in_host_memory(models: Path) -> None:
    kept = estimated(load(TWO_NODES)).training
    without_kl = estimated(load(TWO_NODES, ["algorithm.kl_coef=0"])).training
    assert kept.host - without_kl.host == 2 * kept.weights
    assert kept.total == without_kl.total


def test_a_share_for_the_checkpoint_is_in_host_memory(models: Path) -> None:
    """Copies of what trains on meanwhile; divided states are copied in any case."""
    config = load(TWO_NODES)
    processes = config.agents[QWEN].parallel.data
    kept = estimated(config).training
    at_once = estimated(load(TWO_NODES, ["checkpoint.asynchronous=false"])).training
    never = estimated(load(TWO_NODES, ["checkpoint.every=0"])).training
    assert processes > 1
    assert kept.host - at_once.host == pytest.approx(kept.weights / processes, abs=1)
    assert at_once.host - never.host == kept.optimizer


def test_states_of_experts_are_divided_over_those_who_hold_the_same(models: Path) -> None:
    model = f"agents.{QWEN}.model=models/Qwen3-30B-A3B"
    config = load(TWO_NODES, [model, f"agents.{QWEN}.parallel={{tensor: 2, data: 4, expert: 2}}"])
    held = shape_of(QWEN, config).held(config.agents[QWEN].parallel, 0)
    training = estimated(config).training
    assert training.optimizer == pytest.approx(12 * (held.dense / 4 + held.expert / 4), abs=2)
    config = load(TWO_NODES, [model, f"agents.{QWEN}.parallel={{tensor: 2, data: 4, expert: 8}}"])
    held = shape_of(QWEN, config).held(config.agents[QWEN].parallel, 0)
    training = estimated(config).training
    assert training.optimizer == pytest.approx(12 * (held.dense / 4 + held.expert), abs=2)


def test_sequence_parallelism_divides_what_is_between_matrices(models: Path) -> None:
    parts = estimated(load(TWO_NODES)).training.activations
    whole = estimated(load(TWO_NODES, [f"agents.{QWEN}.parallel.sequence=false"])).training.activations
    assert whole - parts == 2 * 16_384 * (28 * 3584 / 2 + 2 * 4 * 3584 / 2)


def test_float32_has_no_second_copy_of_the_weights(models: Path) -> None:
    training = estimated(load(TWO_NODES, [f"agents.{QWEN}.dtype=float32"])).training
    assert training.optimizer == pytest.approx(8 / 4 * training.weights / 4, rel=1e-6)


def test_the_first_stage_keeps_more_micro_batches(models: Path) -> None:
    config = load(FOUR_NODES, ["agents.qwen-7b.recompute=none"])
    pipelined = estimated(config).training.activations
    flat = estimated(load(TWO_NODES, ["agents.qwen-7b.recompute=none"])).training.activations
    assert pipelined == pytest.approx(flat, rel=0.01)  # two micro-batches of half the layers


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
def test_what_a_colocated_trainer_leaves(models: Path, offload: str) -> None:
    found = estimated(load(TWO_NODES, [f"agents.{QWEN}.placement.offload={offload}"]))
    assert found.generation is not None
    states = {"none": found.training.states, "optimizer": found.training.weights, "all": 0}[offload]
    left = found.generation.trainer - found.training.other
    assert left == states + (
        found.training.activations + found.training.log_probs if offload == "none" else 0
    )


def test_a_trainer_that_stays_leaves_no_room_for_a_large_cache(models: Path) -> None:
    settings = [f"agents.{QWEN}.placement.offload=none", "rollout.sglang.memory_fraction=0.9"]
    last = judged(load(TWO_NODES, settings))[-1]
    assert last.level == "warning"
    assert "too much; " in last.text
    assert f"set agents.{QWEN}.placement.offload: all" in last.text


def test_only_what_no_uncertainty_excuses_is_an_error(models: Path) -> None:
    found = estimated(load(TWO_NODES))
    levels = {}
    for percent in (90, 97, 105, 115, 130):
        room = round(found.training.total * 100 / percent)
        estimate = MemoryEstimate(room, found.training, None, None)
        levels[percent] = next(iter(memory.findings(load(TWO_NODES), QWEN, estimate))).level
    assert list(levels.values()) == ["ok", "warning", "warning", "warning", "error"]


def test_the_cache_of_servers_apart_in_numbers(models: Path) -> None:
    config = load(TWO_NODES, [f"agents.{QWEN}.placement={{}}", "rollout.sglang.memory_fraction=0.5"])
    found = estimated(config)
    assert found.sending is None
    assert found.generation is not None
    assert found.generation.trainer == 0
    assert found.generation.weights == 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    assert found.generation.cache == 40 * GB - found.generation.weights
    per_token = 2 * 28 * 4 * 128 * 2  # keys and values, layers, heads, channels, bytes
    assert found.generation.tokens == int(found.generation.cache / per_token)
    assert found.generation.wanted == 128 * (512 + 1024)  # of 1,024 responses on eight servers


@pytest.mark.parametrize("offload", ["none", "all"])
def test_the_cache_of_colocated_servers_is_of_what_the_trainer_leaves_at_the_start(
    offload: str, models: Path
) -> None:
    settings = [f"agents.{QWEN}.placement.offload={offload}", "rollout.sglang.memory_fraction=0.5"]
    found = estimated(load(TWO_NODES, settings))
    assert found.generation is not None
    training = found.training
    states = training.gradients + training.optimizer / 3 if offload == "none" else 0
    at_start = training.weights + states + 4 * GB
    cache = (80 * GB - at_start) / 2 - 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    assert found.generation.cache == pytest.approx(cache, abs=2)


@pytest.mark.parametrize(
    ("tokens", "level", "words"),
    [(4096, "error", "not one fits"), (20_000, "warning", "wait for each other"), (150_000, "ok", "")],
)
def test_a_cache_that_is_small(models: Path, tokens: int, level: str, words: str) -> None:
    last = judged(load(TWO_NODES, [f"rollout.sglang.cache_tokens={tokens}"]))[-1]
    assert (last.level, last.subject) == (level, f"agents.{QWEN} memory, generation")
    assert words in last.text
    assert f"holds {tokens:,} tokens" in last.text
    assert level == "ok" or f"raise agents.{QWEN}.rollout.sglang.cache_tokens" in last.text


def test_weights_that_are_sent_lie_beside_the_trainer(models: Path) -> None:
    kept = estimated(load(TWO_NODES))
    assert kept.generation is not None
    weights = kept.training.weights + kept.generation.weights
    assert kept.sending == weights + kept.training.other + kept.generation.other
    config = load(TWO_NODES, [f"agents.{QWEN}.placement.offload=none"])
    found = estimated(config)
    assert found.generation is not None
    assert found.sending == found.training.total + found.generation.weights
    room = round(1.1 * found.training.total)
    small = MemoryEstimate(room, found.training, found.generation, found.sending)
    subjects = {f.subject: f for f in memory.findings(config, QWEN, small)}
    sending = subjects[f"agents.{QWEN} memory, sending weights"]
    assert sending.level == "warning"
    assert "too much; " in sending.text
    assert f"raise agents.{QWEN}.rollout.sglang.tensor" in sending.text


def test_a_local_engine_is_a_second_model_beside_the_trainer(models: Path) -> None:
    config = load(TWO_NODES, ["rollout.engine=local", f"agents.{QWEN}.placement={{}}"])
    found = estimated(config)
    assert found.training.rollout == 2 * PARAMETERS["Qwen2.5-7B-Instruct"]
    last = judged(config)[-1]
    assert last.level == "error"
    assert f"set agents.{QWEN}.rollout.engine: sglang" in last.text


def test_unknown_gpus_give_sums_without_a_judgement(models: Path) -> None:
    config = load(TWO_NODES, ["optimizer.distributed=false"])
    findings = list(memory.findings(config, QWEN, estimated(config, gpu=None)))
    assert {finding.level for finding in findings} == {"ok"}
    assert "of a GPU" in findings[0].text


# Steps


def test_gpus_by_name() -> None:
    assert [device_of(f"NVIDIA {d.name} 80GB").name for d in DEVICES] == ["A100", "H100", "H200", "B200"]
    assert device_of("Quadro") is UNKNOWN


def test_training_is_the_stated_number_of_passes(models: Path) -> None:
    def step(*settings: str) -> balance.Step:
        config = load(TWO_NODES, settings)
        return predict(config, QWEN, shape_of(QWEN, config), ON_H100)

    usual = step()
    # 2 N FLOPs a token and pass: old and reference log-probs of own responses, then everybody's, forward,
    # backward twice that, and once more by recomputation.
    tokens = 128 * 8 * (512 + 2048)
    one = 2 * 7.07e9 * tokens / (0.35 * 989e12 * 8)  # without the embedding, whose rows are looked up
    assert usual.log_probs == pytest.approx(2 * one, rel=0.05)
    assert usual.training == pytest.approx(2 * 4 * one, rel=0.05)
    assert step("agents.qwen-7b.recompute=none").training == pytest.approx(usual.training * 3 / 4)
    assert step("algorithm.kl_coef=0").log_probs == pytest.approx(usual.log_probs / 2)
    assert step("algorithm.name=gspo").training == pytest.approx(usual.training / 2)
    assert step("agents.qwen-7b.parallel.data=8").training == pytest.approx(usual.training / 2)
    assert step("agents.qwen-7b.parallel={tensor: 2, data: 4, pipeline: 2}").training > usual.training / 2


def test_generation_is_bound_by_bandwidth_and_by_the_cache(models: Path) -> None:
    def seconds(*settings: str, bandwidth: float = 3.35e12) -> float:
        config = load(TWO_NODES, [f"agents.{QWEN}.placement={{}}", *settings])
        device = balance.Device("X", ON_H100.device.flops, bandwidth)
        return predict(config, QWEN, shape_of(QWEN, config), Machine(device, 80 * GB)).generation

    usual = seconds()
    # 128 responses at once: weights for 4,096 tokens of the longest, caches for 2,048 tokens of each.
    read = 4096 * 2 * 7.6156e9 + 128 * 2048 * 1536 * 57_344
    assert usual == pytest.approx(read / (0.7 * 3.35e12), rel=0.02)
    assert seconds(bandwidth=2 * 3.35e12) == pytest.approx(usual / 2, rel=0.02)
    assert seconds("rollout.sglang.cache_tokens=20000") > 2 * usual
    assert seconds("rollout.sglang.cache_tokens=60000") > usual  # less at once takes never less time
    assert seconds("rollout.sglang.servers=2") > usual


def unequal(*settings: str) -> RunConfig:
    """A small and a large agent with as many GPUs each."""
    small = [f"agents.{QWEN}.model=models/Llama-3.2-1B-Instruct", f"agents.{QWEN}.parallel={{data: 8}}"]
    return load(TWO_NODES, [*small, *settings])


def crowded_together() -> RunConfig:
    """The same, on half of the devices for the large one."""
    sizes = f"agents.{LLAMA}.parallel={{tensor: 1, pipeline: 2, data: 2}}"
    return unequal(sizes, f"agents.{LLAMA}.rollout.sglang.servers=4")


def apply(config: RunConfig, settings: list[str]) -> RunConfig:
    from megatron_hacpo.config import dump, resolve
    from megatron_hacpo.config.yaml12 import parse

    return resolve(parse(dump(config)), settings)


def longest(config: RunConfig, machine: Machine = ON_H100) -> float:
    return max(predict(config, name, shape, machine).total for name, shape in shapes(config).items())


NODES = [Node("a", 8), Node("b", 8)]
BOTH = {QWEN: ON_H100, LLAMA: ON_H100}


def test_a_better_split_is_better_and_fits(models: Path) -> None:
    config = crowded_together()
    split = better_split(config, shapes(config), BOTH, NODES)
    assert split is not None
    changed = apply(config, split.settings)
    assert changed == split.config
    place(changed, NODES)
    assert longest(changed) == pytest.approx(split.seconds)
    assert longest(changed) < 0.95 * longest(config)
    for name in (QWEN, LLAMA):
        assert estimated(changed, name).highest <= 80 * GB


def test_servers_move_between_agents(models: Path) -> None:
    apart = [f"agents.{name}.placement={{}}" for name in (QWEN, LLAMA)]
    sizes = [f"agents.{QWEN}.parallel={{data: 2}}", f"agents.{LLAMA}.parallel={{tensor: 4, data: 1}}"]
    servers = [f"agents.{QWEN}.rollout.sglang.servers=6", f"agents.{LLAMA}.rollout.sglang.servers=1"]
    config = unequal(*apart, *sizes, *servers)
    split = better_split(config, shapes(config), BOTH, NODES)
    assert split is not None
    assert split.config.agents[LLAMA].rollout.sglang.servers > 1
    used = sum(
        agent.parallel.world_size + agent.rollout.sglang.servers for agent in split.config.agents.values()
    )
    assert used <= 16
    assert longest(apply(config, split.settings)) == pytest.approx(split.seconds)


def test_no_split_is_offered_that_memory_does_not_hold(models: Path) -> None:
    """Fewer copies divide the optimizer's states less."""
    config, nodes = unequal(), [Node("a", 16)]
    free = better_split(config, shapes(config), BOTH, nodes)
    assert free is not None
    assert free.config.agents[QWEN].parallel.data < 8
    full = Machine(ON_H100.device, estimated(config).sending)
    assert better_split(config, shapes(config), {**BOTH, QWEN: full}, nodes) is None


def test_experts_stay_divisible(models: Path) -> None:
    model = f"agents.{LLAMA}.model=models/Qwen3-30B-A3B"
    config = unequal(model, f"agents.{LLAMA}.parallel={{tensor: 1, data: 4, expert: 4}}")
    config = apply(config, [f"agents.{LLAMA}.rollout.sglang.servers=4"])
    unlimited = dict.fromkeys(BOTH, Machine(ON_H100.device))
    split = better_split(config, shapes(config), unlimited, [Node("a", 16)])
    assert split is not None
    assert split.config.agents[LLAMA].parallel.data in (8, 12)


def test_equal_agents_have_no_better_split(models: Path) -> None:
    config = load(TWO_NODES, [f"agents.{QWEN}.model=models/Llama-3.1-8B-Instruct"])
    assert better_split(config, shapes(config), BOTH, NODES) is None


def steps(config: RunConfig, nodes: list[Node] | None = NODES) -> list[Finding]:
    return list(balance.findings(config, shapes(config), BOTH, nodes))


def test_one_who_waits_is_warned_with_a_split(models: Path) -> None:
    config = crowded_together()
    small, large = steps(config)
    assert (small.level, large.level) == ("warning", "ok")
    assert f"of the step for {LLAMA}; a step of " in small.text
    given = small.text.partition(" by --set ")[2].split(" --set ")
    assert longest(apply(config, given)) < longest(config)


def test_without_a_better_split_more_devices_are_asked_for(models: Path) -> None:
    config = unequal()
    small, _ = steps(config, [Node("a", 8, component=0), Node("b", 8, component=1)])
    assert small.level == "warning"
    assert f"give {LLAMA} more devices" in small.text


@pytest.mark.parametrize("setting", ["algorithm.name=gspo", f"agents.{LLAMA}=null"])
def test_nobody_waits_where_nothing_is_shared(models: Path, setting: str) -> None:
    config = unequal(setting)
    assert [finding.level for finding in steps(config)] == ["ok"] * len(config.agents)


def test_nobody_is_told_to_move_processes_between_cores(models: Path) -> None:
    assert [finding.level for finding in steps(unequal(), None)] == ["ok", "ok"]


def test_unknown_gpus_give_shares_in_place_of_seconds(models: Path) -> None:
    config = unequal()
    _, large = balance.findings(config, shapes(config), dict.fromkeys(BOTH, Machine()), None)
    assert large.text.startswith("1.00 of the longest agent's (")


# Judgement


def test_nodes_that_fit_have_nothing_to_mend(models: Path) -> None:
    """Of the cache of the larger model alone there is something to say."""
    found = bad(judge(load(TWO_NODES), [node("a"), node("b")]))
    assert {finding.subject for finding in found} <= {f"agents.{LLAMA} memory, generation"}


CASES = {
    "torch differs": ({"versions": VERSIONS | {"torch": "2.13.0"}}, "error", "torch", "2.13.0, CUDA"),
    "cuda differs": ({"versions": VERSIONS | {"cuda": "12.8"}}, "error", "torch", "CUDA 12.8"),
    "engine differs": (
        {"versions": without("transformer-engine")},
        "error",
        "transformer-engine",
        "not installed on b",
    ),
    "sglang differs": (
        {"servers": {SERVER: {"sglang": "0.5.22"}}},
        "error",
        f"sglang ({SERVER})",
        "0.5.22 on b",
    ),
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


@pytest.mark.parametrize("case", CASES)
def test_one_node_of_two_is_wrong(models: Path, case: str) -> None:
    changes, level, subject, words = CASES[case]
    found = bad(judge(load(TWO_NODES), [node("a"), node("b", **changes)]))
    matching = [f for f in found if f.subject == subject and words in f.text]
    assert [finding.level for finding in matching] == [level]
    assert "; " in matching[0].text


ALL = {
    "old megatron": ({"versions": VERSIONS | {"megatron-core": "0.15.0"}}, "error", "megatron-core"),
    "new megatron": ({"versions": VERSIONS | {"megatron-core": "0.20.0"}}, "error", "megatron-core"),
    "no megatron": ({"versions": without("megatron-core")}, "error", "megatron-core"),
    "old torch": ({"versions": VERSIONS | {"torch": "2.5.1"}}, "error", "torch"),
    "no engine": ({"versions": without("transformer-engine")}, "warning", "transformer-engine"),
    "no engine, apex": ({"versions": without("transformer-engine")}, "warning", "apex"),
    "no flash-attn": ({"gpus": [A100] * 8}, "error", "flash-attn"),
    "old sglang": ({"servers": {SERVER: {"sglang": "0.5.20"}}}, "error", f"sglang ({SERVER})"),
    "no sglang": ({"servers": {SERVER: {}}}, "error", f"sglang ({SERVER})"),
    "path": ({"missing": ["data.path"]}, "error", "data.path"),
    "few gpus": ({"gpus": [H100] * 4}, "error", f"agents.{LLAMA}.parallel"),
}


@pytest.mark.parametrize("case", ALL)
def test_all_nodes_are_wrong(models: Path, case: str) -> None:
    changes, level, subject = ALL[case]
    found = bad(judge(load(TWO_NODES), [node(host, **changes) for host in "ab"]))
    assert [finding.level for finding in found if finding.subject == subject] == [level]


@pytest.mark.parametrize(("transport", "level"), [("auto", "error"), ("disk", "error"), ("tensor", None)])
def test_weights_travel_through_folders_that_all_nodes_see(
    models: Path, transport: str, level: str | None
) -> None:
    key = f"agents.{QWEN}.rollout.sglang.weights_dir"
    settings = [f"{key}=/scratch", f"agents.{QWEN}.rollout.sglang.transport={transport}"]
    config = load(TWO_NODES, settings)
    assert shared_folders(config).keys() == {"run.dir", *([key] if level else [])}
    seen = dict.fromkeys(shared_folders(config), True)
    blind = {**seen, key: False} if level else seen
    found = [f for f in judge(config, [node("a", seen=seen), node("b", seen=blind)]) if f.subject == key]
    assert [f.level for f in found] == ([level] if level else [])
    assert all(f.text.startswith("/scratch: b does not see what is written there; set") for f in found)


@pytest.mark.parametrize(
    ("transport", "level", "words"),
    [
        ("auto", "ok", "; weights go through files, as the trainer has 2.14.1+cu130"),
        ("tensor", "warning", "transport tensor may not work"),
        ("disk", "ok", "torch 2.9.0"),
    ],
)
def test_servers_with_another_torch(models: Path, transport: str, level: str, words: str) -> None:
    servers = {SERVER: {"sglang": "0.5.23", "torch": "2.9.0"}}
    config = load(TWO_NODES, [f"rollout.sglang.transport={transport}"])
    (found,) = (
        f
        for f in judge(config, [node(host, servers=servers) for host in "ab"])
        if f.subject == f"sglang ({SERVER})"
    )
    assert found.level == level
    assert words in found.text


@pytest.mark.parametrize(
    ("versions", "gpus", "settings", "subject"),
    [
        (VERSIONS | {"torch": "2.9.0a0+nv25.9"}, [H100] * 8, [], "torch"),
        (VERSIONS, [H100] * 8, [], "flash-attn"),
        (VERSIONS | {"flash-attn": "2.8.0"}, [A100] * 8, [], "flash-attn"),
        (VERSIONS, [H100] * 8, [], "apex"),
        (without("transformer-engine"), [], [], "transformer-engine"),
        (
            without("transformer-engine"),
            [H100] * 8,
            [f"agents.{name}.dtype=float32" for name in (QWEN, LLAMA)],
            "transformer-engine",
        ),
        (VERSIONS, [], [], "GPUs"),
    ],
)
def test_what_is_no_mistake(
    models: Path, versions: dict[str, str], gpus: list[Gpu], settings: list[str], subject: str
) -> None:
    reports = [node(host, versions=versions, gpus=gpus) for host in "ab"]
    found = [f for f in judge(load(TWO_NODES, settings), reports) if f.subject == subject]
    assert {finding.level for finding in found} == {"ok"}


def test_offloading_without_its_package_is_an_error(models: Path) -> None:
    config = load(TWO_NODES, ["optimizer.cpu_offload=true"])
    found = judge(config, [node(host, versions=without("transformer-engine")) for host in "ab"])
    assert [f.level for f in found if f.subject == "transformer-engine"] == ["error"]


def test_another_torch_is_no_matter_on_the_way_over_the_disk(models: Path) -> None:
    servers = {SERVER: {"sglang": "0.5.23", "torch": "2.9.0"}}
    found = judge(load(FOUR_NODES), [node(host, servers=servers) for host in "abcd"])
    assert [f.level for f in found if f.subject.startswith("sglang")] == ["ok"]


def test_nodes_that_do_not_reach_each_other_are_named(models: Path) -> None:
    reports, config = [node("a"), node("b")], load(TWO_NODES)
    found = judge(config, reports, met={"a": {"b": "timed out"}, "b": {"a": ""}})
    network = next(str(f) for f in found if f.subject == "network")
    assert network.startswith("error   network: a does not reach b: timed out; ")
    found = judge(config, reports, met={"a": {"b": ""}, "b": {"a": ""}})
    assert [f.level for f in found if f.subject == "network"] == ["ok"]


def test_a_model_that_cannot_be_read_is_an_error_once(models: Path) -> None:
    (models / "models" / "Qwen2.5-7B-Instruct" / "config.json").write_text('{"model_type": "gpt2"}')
    found = bad(judge(load(TWO_NODES), [node("a"), node("b")]))
    assert [f.level for f in found if f.subject == f"agents.{QWEN}.model"] == ["error"]


def test_more_colocated_servers_than_gpus_are_an_error(models: Path) -> None:
    found = judge(load(TWO_NODES, ["rollout.sglang.servers=9"]), [node("a"), node("b")])
    assert [f.level for f in found if f.subject == f"agents.{QWEN}.rollout.sglang.servers"] == ["error"]


def test_nodes_of_reports() -> None:
    assert nodes_of([node("a"), node("b", gpus=[H100])]) == [Node("a", 8), Node("b", 1)]
    assert nodes_of([node("a", gpus=[])])[0].devices > 10**6


# Reports


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


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "versions"),
    [
        ("""echo '{"sglang": "0.5.23", "torch": "2.14.1"}'""", {"sglang": "0.5.23", "torch": "2.14.1"}),
        ("exit 3", {}),
        (f'exec {sys.executable} "$@"', {"torch": "here"}),
        (None, {}),
    ],
)
def test_servers_environments_are_asked(tmp_path: Path, text: str | None, versions: dict[str, str]) -> None:
    python = tmp_path / "python"
    if text is not None:
        script(python, text)
    config = load(PAIR, ["rollout.engine=sglang", f"rollout.sglang.python={python}"])
    report = look(config)
    found = report.servers[str(python)]
    assert (set(found) if "here" in versions.values() else found) == (
        set(versions) if "here" in versions.values() else versions
    )
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


# Reaching each other


def met(addresses: dict[str, str], silent: tuple[str, ...] = ()) -> dict[str, dict[str, str]]:
    """What each node finds; silent ones are waited for and never come."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found: dict[str, dict[str, str]] = {}

    def run(name: str) -> None:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False)
        found[name] = meet(own, name, list(addresses), addresses[name], 1.0)

    threads = [threading.Thread(target=run, args=(name,)) for name in addresses if name not in silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_nodes_meet_over_both_kinds_of_addresses() -> None:
    found = met({"a": "127.0.0.1", "b": "::1", "c": "127.0.0.1", "d": "localhost"})
    assert found == {name: {other: "" for other in "abcd" if other != name} for name in "abcd"}


def test_a_node_alone_has_nobody_to_meet() -> None:
    assert met({"a": "127.0.0.1"}) == {"a": {}}


def test_a_node_that_says_nothing_is_named_by_the_others() -> None:
    found = met({"a": "127.0.0.1", "b": "127.0.0.1", "c": "::1"}, silent=("c",))
    assert found["a"] == {"b": "", "c": "does not say within 1 s where it listens"}
    assert found["b"]["a"] == ""


def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    found = met({"a": "127.0.0.1", "b": "192.0.2.1"})
    assert found["a"]["b"].startswith("cannot listen on 192.0.2.1 (")
    assert found["b"] == {"a": ""}


@pytest.mark.parametrize("answer", [b"somebody else\n", b""])
def test_who_answers_must_be_the_node(answer: bytes) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answering() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(answer)

        threading.Thread(target=answering, daemon=True).start()
        store.set("doctor/reach/listens/b", f"127.0.0.1:{listener.getsockname()[1]}")
        store.set("doctor/reach/done/b", "")
        found = meet(store, "a", ["a", "b"], "127.0.0.1", 2.0)
    assert f"is answered by {answer.decode().strip() or 'nobody'}" in found["b"]


def test_a_closed_port_is_told() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("doctor/reach/listens/b", "127.0.0.1:1")
    store.set("doctor/reach/done/b", "")
    assert "127.0.0.1:1 cannot be reached (" in meet(store, "a", ["a", "b"], "127.0.0.1", 1.0)["b"]


# All of it


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

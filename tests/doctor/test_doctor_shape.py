"""What a model is in numbers: the published ones, and divided over ranks."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_inputs import EXPERTS, LLAMA_1B, LLAMA_8B, MODELS, PAIR, PARAMETERS, ROOT

from megatron_hacpo.config import load
from megatron_hacpo.doctor.shape import Shape
from megatron_hacpo.hf.families import head_size, tensor_shapes
from megatron_hacpo.hf.read import HFWeights, read_config
from megatron_hacpo.megatron.batching import Cost


@pytest.mark.parametrize("model", MODELS)
def test_parameters_are_the_published_ones_and_those_of_the_tables(model: str) -> None:
    hf = SimpleNamespace(**MODELS[model])
    assert Shape(hf).parameters == PARAMETERS[model]
    assert Shape(hf).parameters == sum(math.prod(shape) for shape in tensor_shapes(hf).values())


@pytest.mark.parametrize("name", ["A", "B"])
def test_parameters_of_a_real_folder_are_those_of_its_files(name: str) -> None:
    folder = ROOT / "examples" / "tiny" / name
    stored = HFWeights(folder).stored.values()
    assert Shape(read_config(folder)).parameters == sum(math.prod(s.shape) for s in stored)


@pytest.mark.parametrize("model", MODELS)
def test_work_is_counted_as_micro_batches_count_it(model: str) -> None:
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

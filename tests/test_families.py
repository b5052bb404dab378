"""The tables of families: against Megatron's own parameters, transformers' configs, and what is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from random_models import CONFIGS, random_model

from megatron_hacpo.hf.families import Weight, family_of, rope_parameters, sizes, tensor_shapes
from megatron_hacpo.hf.read import HFWeights, read_config
from megatron_hacpo.megatron.model import build_without_weights
from megatron_hacpo.megatron.runtime import Layout, World

# Parameters of one layer with the sizes of `random_models`, as Megatron-core names them: recorded from the
# local spec, and from the TransformerEngine one, which keeps norms in the linear that follows them and a
# rank's experts in one module. Two of the four experts are shown.
ATTENTION = {"self_attention.linear_qkv.weight": [80, 48], "self_attention.linear_proj.weight": [48, 48]}
QK_NORM = {"self_attention.q_layernorm.weight": [8], "self_attention.k_layernorm.weight": [8]}
MLP = {"mlp.linear_fc1.weight": [192, 48], "mlp.linear_fc2.weight": [48, 96]}
LOCAL_NORMS = {"input_layernorm.weight": [48], "pre_mlp_layernorm.weight": [48]}
TE_NORMS = {"self_attention.linear_qkv.layer_norm_weight": [48], "mlp.linear_fc1.layer_norm_weight": [48]}
ROUTER = {"mlp.router.weight": [4, 48]}
LOCAL_EXPERTS = {
    "mlp.experts.local_experts.0.linear_fc1.weight": [48, 48],
    "mlp.experts.local_experts.0.linear_fc2.weight": [48, 24],
    "mlp.experts.local_experts.3.linear_fc1.weight": [48, 48],
    "mlp.experts.local_experts.3.linear_fc2.weight": [48, 24],
}
TE_EXPERTS = {
    "mlp.experts.linear_fc1.weight0": [48, 48],
    "mlp.experts.linear_fc2.weight0": [48, 24],
    "mlp.experts.linear_fc1.weight3": [48, 48],
    "mlp.experts.linear_fc2.weight3": [48, 24],
}
TE_EXPERT_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": [48],
    "pre_mlp_layernorm.weight": [48],
}
DENSE = {
    "llama": {},
    "mistral": {},
    "qwen2": {"self_attention.linear_qkv.bias": [80]},
    "qwen3 untied": QK_NORM,
}
RECORDED = {
    **{(name, "local"): ATTENTION | MLP | LOCAL_NORMS | extra for name, extra in DENSE.items()},
    **{(name, "te"): ATTENTION | MLP | TE_NORMS | extra for name, extra in DENSE.items()},
    ("qwen3 moe", "local"): ATTENTION | QK_NORM | ROUTER | LOCAL_NORMS | LOCAL_EXPERTS,
    ("qwen3 moe", "te"): ATTENTION | QK_NORM | ROUTER | TE_EXPERT_NORMS | TE_EXPERTS,
}


def shape_of(weight: Weight, config: Any) -> list[int]:
    """The Megatron parameter's shape by the table: its tensors one below the other."""
    known = sizes(config)
    shapes = [[known[size] for size in shape] for shape in weight.tensors.values()]
    return [sum(shape[0] for shape in shapes), *shapes[0][1:]]


@pytest.mark.parametrize("name, spec", RECORDED)
def test_every_recorded_parameter_has_one_row_and_every_row_a_parameter(name: str, spec: str) -> None:
    config = CONFIGS[name]
    used = set()
    for parameter, shape in RECORDED[name, spec].items():
        rows = [weight for weight in family_of(config).layer if weight.match(parameter) is not None]
        assert len(rows) == 1, parameter
        assert shape_of(rows[0], config) == shape, parameter
        used.add(rows[0].megatron)
    assert used == {weight.megatron for weight in family_of(config).layer}


@pytest.mark.parametrize("name", sorted({name for name, _ in RECORDED}))
def test_recorded_names_are_those_of_this_megatron(name: str, world: World) -> None:
    model = build_without_weights(CONFIGS[name], dtype=torch.float32, layout=Layout())
    prefix = "decoder.layers.1."
    built = {n.removeprefix(prefix): list(p.shape) for n, p in model.named_parameters() if prefix in n}
    recorded = RECORDED[name, "local"]
    assert {n: shape for n, shape in built.items() if "local_experts" not in n or n in recorded} == recorded


@pytest.mark.parametrize("name", CONFIGS)
def test_tensor_shapes_are_those_that_transformers_saves(name: str, tmp_path: Any) -> None:
    random_model(CONFIGS[name], tmp_path)
    stored = HFWeights(tmp_path).stored
    assert tensor_shapes(read_config(tmp_path)) == {key: tensor.shape for key, tensor in stored.items()}
    assert tensor_shapes(CONFIGS[name]) == tensor_shapes(read_config(tmp_path))


OLD = {"model_type": "llama", "rope_theta": 5e5}
NEW = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
SCALED = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    "fields, expected",
    [
        (OLD, {"rope_theta": 5e5, "rope_type": "default"}),
        (OLD | {"rope_scaling": None}, {"rope_theta": 5e5, "rope_type": "default"}),
        (NEW, {"rope_theta": 5e5, "rope_type": "default"}),
        (
            OLD | {"rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0, "type": "linear"},
        ),
        (
            OLD | {"rope_scaling": {"rope_type": "llama3", **SCALED}},
            {"rope_theta": 5e5, "rope_type": "llama3", **SCALED},
        ),
        ({"model_type": "llama"}, {"rope_theta": 10000.0, "rope_type": "default"}),
    ],
)
def test_rope_of_transformers_4_and_5(fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = SimpleNamespace(**fields)
    family_of(config)
    assert rope_parameters(config) == expected


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"model_type": "gpt2"}, r"model_type: 'gpt2' is not supported; supported are llama, mistral, qwen2"),
        ({"model_type": None}, "model_type: None"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias: True is not supported for llama"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias: True"),
        ({"model_type": "llama", "hidden_act": "gelu"}, "hidden_act: 'gelu'"),
        ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window: 4096"),
        ({"model_type": "mistral"}, "sliding_window: 4096"),  # transformers' default
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window: True"),
        (
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            r"layer_types: \['sliding_attention'\]",
        ),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias: True"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step: 2"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, r"mlp_only_layers: \[0\]"),
        ({"model_type": "llama", "partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "yarn"}}, "rope_type: 'yarn'"),
        ({"model_type": "llama", "rope_scaling": {"type": "dynamic"}}, "rope_type: 'dynamic'"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "longrope"}}, "rope_type: 'longrope'"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}},
            "quantization_config: .*fp8",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name_and_value(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        family_of(SimpleNamespace(**fields))


def test_what_the_layers_of_a_family_have_follows_from_its_table() -> None:
    assert family_of(CONFIGS["qwen3 untied"]).qk_norm
    assert family_of(CONFIGS["qwen2"]).qkv_bias
    assert family_of(CONFIGS["qwen3 moe"]).has_experts
    llama = family_of(CONFIGS["llama"])
    assert [llama.qk_norm, llama.qkv_bias, llama.has_experts] == [False] * 3

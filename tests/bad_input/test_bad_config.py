"""A config.json that is none, or describes what is not supported: one line, from the converter and before a
launch."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from damage import BELONGS, EMBEDDING, HEAD, check_both_say, edit_json

from megatron_hacpo.hf.read import SINGLE, HFWeights, read_config


def rope(kind: str, **fields: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


NOT_A_SIZE = "; it must be a whole number above 0"
NOT_POSITIVE = "; it must be a number above 0"
BAD_CONFIGS = [
    ("qwen3", {"num_hidden_layers": "2"}, "config.json: num_hidden_layers is '2'" + NOT_A_SIZE),
    ("qwen3", {"num_hidden_layers": -1}, "num_hidden_layers is -1" + NOT_A_SIZE),
    ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers is 0" + NOT_A_SIZE),
    ("qwen3", {"hidden_size": 48.0}, "hidden_size is 48.0" + NOT_A_SIZE),
    ("qwen3", {"hidden_size": True}, "hidden_size is True" + NOT_A_SIZE),
    ("qwen3", {"vocab_size": None}, "vocab_size is None" + NOT_A_SIZE),
    ("qwen3", {"vocab_size": ...}, "vocab_size is None" + NOT_A_SIZE),
    ("qwen3", {"head_dim": "8"}, "head_dim is '8'" + NOT_A_SIZE),
    ("qwen3", {"head_dim": 0}, "head_dim is 0" + NOT_A_SIZE),
    ("qwen3", {"num_key_value_heads": "2"}, "num_key_value_heads is '2'" + NOT_A_SIZE),
    ("qwen3", {"num_key_value_heads": 4}, "num_key_value_heads is 4; it must divide num_attention_heads = 6"),
    ("qwen3", {"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'" + NOT_POSITIVE),
    ("qwen3", {"rms_norm_eps": -1.0}, "rms_norm_eps is -1.0" + NOT_POSITIVE),
    ("qwen3", {"tie_word_embeddings": "false"}, "tie_word_embeddings is 'false'; it must be true or false"),
    ("qwen3", {"layer_types": 5}, "layer_types is 5; it must be a list"),
    ("qwen3", {"layer_types": ["sliding_attention"] * 4}, "layer_types: ['sliding_attention'] is not supp"),
    ("qwen3", {"rope_parameters": "yarn"}, "rope_parameters is 'yarn'; it must be an object"),
    ("qwen3", {"rope_parameters": {"full_attention": {}}}, "is not supported; needs the same in every layer"),
    ("qwen3", rope("yarn", factor=4.0), "rope_type: 'yarn' is not supported for qwen3; needs 'default' or"),
    ("qwen3", rope("dynamic", factor=4.0), "rope_type: 'dynamic' is not supported"),
    ("qwen3", rope("longrope"), "rope_type: 'longrope' is not supported"),
    ("qwen3", rope("default", rope_theta=0), "rope_theta of the rope parameters is 0" + NOT_POSITIVE),
    ("qwen3", rope("linear"), "factor of the rope parameters is None" + NOT_POSITIVE),
    ("qwen3", rope("llama3", factor=8.0), "low_freq_factor of the rope parameters is None" + NOT_POSITIVE),
    (
        "qwen3",
        {"use_sliding_window": True},
        "use_sliding_window: True is not supported for qwen3; needs False",
    ),
    ("qwen3", {"attention_bias": True}, "attention_bias: True is not supported for qwen3; needs False"),
    (
        "qwen3",
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config: {'quant_method': 'fp8'}",
    ),
    ("qwen3", {"model_type": "gpt2"}, "model_type: 'gpt2' is not supported; supported are llama, mistral"),
    ("qwen3", {"model_type": ...}, "model_type: None is not supported"),
    ("qwen3", {"model_type": ["qwen3"]}, "model_type: ['qwen3'] is not supported"),
    ("qwen3", {"num_hidden_layers": 3}, "model.layers.3.input_layernorm.weight is [48] in model.safetensors"),
    ("qwen3", {"num_hidden_layers": 5}, "model.layers.4.input_layernorm.weight is absent in the safetensors"),
    (
        "qwen3",
        {"vocab_size": 38},
        f"{EMBEDDING} is [37, 48] in {SINGLE} and [38, 48] by config.json{BELONGS}",
    ),
    (
        "qwen3",
        {"head_dim": ...},
        "model.layers.0.self_attn.q_proj.weight is [48, 48] in model.safetensors and",
    ),
    (
        "qwen3",
        {"tie_word_embeddings": False},
        f"{HEAD} is absent and config.json does not say tie_word_embed",
    ),
    (
        "llama",
        {"tie_word_embeddings": True},
        f"tie_word_embeddings: true, but {HEAD} in {SINGLE} is not model",
    ),
    ("llama", {"mlp_bias": True}, "mlp_bias: True is not supported for llama; needs False"),
    ("llama", {"attention_bias": True}, "attention_bias: True is not supported for llama"),
    (
        "llama",
        {"model_type": "mistral", "sliding_window": 32},
        "sliding_window: 32 is not supported for mistral",
    ),
    ("moe", {"num_experts": "4"}, "num_experts is '4'" + NOT_A_SIZE),
    ("moe", {"num_experts": 1}, "num_experts is 1; it must be at least num_experts_per_tok = 2"),
    (
        "moe",
        {"mlp_only_layers": [0]},
        "mlp_only_layers: [0] is not supported for qwen3_moe; needs [] or None",
    ),
]


@pytest.mark.parametrize("name, changes, expected", BAD_CONFIGS)
def test_a_bad_config_is_one_line(
    name: str, changes: dict, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy(name)
    edit_json(folder / "config.json", **changes)
    check_both_say(refusal, folder, expected)


@pytest.mark.parametrize(
    "text, expected",
    [
        (None, "has no config.json; give a complete Hugging Face folder"),
        ("", "config.json is not JSON ("),
        ('{"model_type": "qwen3",', "config.json is not JSON ("),
        ("[]", "config.json is not a JSON object; fetch the folder again"),
        ('"qwen3"', "config.json is not a JSON object"),
        ("\xff", "config.json is not JSON ('utf-8' codec can't decode"),
    ],
)
def test_a_config_that_is_none_is_one_line(
    text: str | None, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy("qwen3")
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_bytes(text.encode("latin-1"))
    check_both_say(refusal, folder, expected)


@pytest.mark.parametrize(
    "changes, expected",
    [
        ({"use_cache": "yes"}, "Field 'use_cache' expected bool, got str (value: 'yes')"),
        ({"layer_types": ["full_attention"]}, "must be equal to the number of `layer_types` (1)"),
        ({"dtype": "float7"}, "module 'torch' has no attribute 'float7'"),
    ],
)
def test_what_transformers_refuses_is_one_line(
    changes: dict, expected: str, copy: Callable[[str], Path], refusal: Callable[..., str]
) -> None:
    folder = copy("qwen3")
    edit_json(folder / "config.json", **changes)
    line = refusal("to-megatron", folder)
    assert line.startswith(f"{folder}: config.json: refused by transformers (")
    assert line.endswith(f"{expected}); correct it")


def test_any_number_of_layers_is_refused_at_once(originals: Path) -> None:
    config = read_config(originals / "qwen3")
    config.num_hidden_layers = 10**6
    began = time.process_time()
    with pytest.raises(ValueError, match=r"model\.layers\.4\.input_layernorm\.weight is absent"):
        HFWeights(originals / "qwen3").check(config)
    assert time.process_time() - began < 1.0


def test_code_in_a_folder_is_not_run(
    copy: Callable[[str], Path], convert: Callable[..., list[str]], target: Path, tmp_path: Path
) -> None:
    folder = copy("qwen3")
    names = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_json(folder / "config.json", auto_map=names)
    code = f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Config: pass\nclass Model: pass\n"
    (folder / "modeling_evil.py").write_text(code)
    convert("to-megatron", folder, target, "--verify", "--verify-logits")
    convert("to-hf", target, target.with_name("hf"), "--verify")
    assert not (tmp_path / "ran").exists()

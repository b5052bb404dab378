"""Models whose updates must not depend on the layout: both tiny architectures and experts, of four layers."""

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, Qwen3MoeConfig

TINY = Path(__file__).parents[1] / "examples/tiny"
TOKENIZER_OF = {"dense-a": "A", "dense-b": "B", "experts": "A"}
"""Model -> the tiny agent that it is made of, and whose place in the pair it takes."""

_KEPT = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
_NOISE = 0.02
SEED = 3
"""With it no router and no ratio is near a bound (asserted where the reference is computed)."""


def write_models(root: Path) -> None:
    """A folder per model in `root`: a tiny agent's two layers, and two more that change little of what comes
    out, so that responses are as likely as to the agent and importance ratios lie inside and outside of the
    windows. Experts are the agent's MLP, each with some noise of its own.
    """
    for name, agent in TOKENIZER_OF.items():
        torch.manual_seed(SEED)
        tiny = AutoModelForCausalLM.from_pretrained(TINY / agent)
        model = AutoModelForCausalLM.from_config(_config(name, tiny.config))
        known = tiny.state_dict()
        with torch.no_grad():
            for key, tensor in model.state_dict().items():
                tensor.copy_(_value(key, tensor, known))
        model.save_pretrained(root / name)
        for file in _KEPT:
            shutil.copy2(TINY / agent / file, root / name / file)


def _config(name: str, tiny: PretrainedConfig) -> PretrainedConfig:
    if name != "experts":
        return AutoConfig.for_model(**{**tiny.to_dict(), "num_hidden_layers": 4, "layer_types": None})
    kept = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "tie_word_embeddings",
        "eos_token_id",
        "pad_token_id",
    )
    return Qwen3MoeConfig(
        **{key: getattr(tiny, key) for key in kept},
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=tiny.intermediate_size,
        norm_topk_prob=True,
    )


def _value(key: str, tensor: torch.Tensor, known: dict[str, torch.Tensor]) -> torch.Tensor:
    noise = _NOISE * torch.randn(tensor.shape)
    if key.endswith("mlp.gate.weight"):
        return torch.randn(
            tensor.shape
        )  # routers decide clearly, so that rounding turns none of their choices
    layer = key.replace("layers.2.", "layers.0.").replace("layers.3.", "layers.1.")
    extra = layer != key
    if layer.endswith("experts.gate_up_proj"):
        mlp = layer.removesuffix("experts.gate_up_proj")
        return torch.cat([known[f"{mlp}gate_proj.weight"], known[f"{mlp}up_proj.weight"]]) + noise
    if layer.endswith("experts.down_proj"):
        down = known[layer.replace("experts.down_proj", "down_proj.weight")]
        return (0.0 if extra else 1.0) * down + noise
    if extra and layer.endswith(("o_proj.weight", "down_proj.weight")):
        return noise
    return known[layer]

"""Models, nodes and runs with real numbers, for the doctor's tests."""

from pathlib import Path
from typing import Any

from megatron_hacpo.config import RunConfig
from megatron_hacpo.doctor.memory import GB, MemoryEstimate, estimate
from megatron_hacpo.doctor.node import Gpu, NodeReport
from megatron_hacpo.doctor.shape import Shape, read_shape

ROOT = Path(__file__).parents[2]
PAIR = ROOT / "examples" / "tiny" / "pair.yaml"
TWO_NODES = ROOT / "examples" / "paper" / "qwen7b_llama8b_2nodes.yaml"
FOUR_NODES = ROOT / "examples" / "paper" / "qwen7b_llama8b_4nodes.yaml"
QWEN, LLAMA = "qwen-7b", "llama-8b"

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
LLAMA_3B = {
    **LLAMA_8B,
    "hidden_size": 3072,
    "num_attention_heads": 24,
    "head_dim": 128,
    "intermediate_size": 8192,
    "num_hidden_layers": 28,
    "tie_word_embeddings": True,
}
QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
}
QWEN3_4B = {**QWEN3_8B, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True}
QWEN3_1_7B = {
    **QWEN3_4B,
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
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
MODELS = {
    "Qwen2.5-7B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "intermediate_size": 18_944,
        "num_hidden_layers": 28,
        "vocab_size": 152_064,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-6,
    },
    "Llama-3.1-8B-Instruct": LLAMA_8B,
    "Llama-3.2-1B-Instruct": LLAMA_1B,
    "Llama-3.2-3B-Instruct": LLAMA_3B,
    "Qwen3-1.7B-Base": QWEN3_1_7B,
    "Qwen3-4B-Base": QWEN3_4B,
    "Qwen3-4B": QWEN3_4B,
    "Qwen3-4B-Instruct-2507": QWEN3_4B,
    "Qwen3-8B-Base": QWEN3_8B,
    "Qwen3-30B-A3B": EXPERTS,
    "Mistral-7B-Instruct-v0.3": {
        **LLAMA_8B,
        "model_type": "mistral",
        "vocab_size": 32_768,
        "max_position_embeddings": 32_768,
        "sliding_window": None,
    },
}
"""What their public config.json say, by folder in models/."""

PARAMETERS = {
    "Qwen2.5-7B-Instruct": 7_615_616_512,
    "Llama-3.1-8B-Instruct": 8_030_261_248,
    "Llama-3.2-1B-Instruct": 1_235_814_400,
    "Llama-3.2-3B-Instruct": 3_212_749_824,
    "Qwen3-1.7B-Base": 1_720_574_976,
    "Qwen3-4B-Base": 4_022_468_096,
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen3-8B-Base": 8_190_735_360,
    "Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "Qwen3-30B-A3B": 30_532_122_624,
}
"""As published."""

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GB, 79 * GB, (9, 0))
A100 = Gpu("NVIDIA A100-SXM4-80GB", 80 * GB, 79 * GB, (8, 0))
SERVER = "/opt/sglang/bin/python"
VERSIONS = {
    "torch": "2.14.1+cu130",
    "cuda": "13.0",
    "nccl": "2.29.2",
    "megatron-core": "0.19.2",
    "transformers": "5.24.0",
    "transformer-engine": "2.11.0",
}


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


def shape_of(config: RunConfig, agent: str = QWEN) -> Shape:
    return read_shape(config.agents[agent])


def estimated(config: RunConfig, agent: str = QWEN, gpu: int | None = 80 * GB) -> MemoryEstimate:
    return estimate(config, agent, shape_of(config, agent), gpu)

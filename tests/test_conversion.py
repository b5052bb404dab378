"""Hugging Face to Megatron and back, to the bit: every family, every layout, and what the models compute."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conversion_worker import LAYOUTS, differences
from random_models import CONFIGS, LLAMA3_ROPE, SIZES, random_model
from ranks import run_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PretrainedConfig

from megatron_hacpo.hf.read import INDEX, SINGLE, HFWeights, read_json
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.convert import checkpoint_tensors, hf_to_megatron, megatron_to_hf
from megatron_hacpo.megatron.model import build, hf_config, transformer_config
from megatron_hacpo.megatron.packing import TokenSequence, pack
from megatron_hacpo.megatron.runtime import Layout
from megatron_hacpo.megatron.verify import verify_log_probs, verify_tensors
from megatron_hacpo.rollout.base import Sampling
from megatron_hacpo.rollout.local import LocalEngine

TINY = Path(__file__).parents[1] / "examples" / "tiny"
TP2 = Layout(tensor=2)
DTYPES = FP32, BF16 = torch.float32, torch.bfloat16


def folder_name(name: str, dtype: torch.dtype) -> str:
    return f"{name} {'bf16' if dtype is torch.bfloat16 else 'fp32'}"


def make_folders(root: Path, dtypes: dict[str, tuple[torch.dtype, ...]]) -> None:
    """Random folders, and their checkpoints beside them."""
    for name in dtypes:
        for dtype in dtypes[name]:
            folder = root / folder_name(name, dtype)
            random_model(CONFIGS[name], folder, dtype)
            hf_to_megatron(folder, folder.with_name(f"{folder.name}.megatron"), layout=TP2)


def in_every_layout(root: Path) -> dict[str, list[str]]:
    """The report of four ranks on the folders in `root`."""
    run_ranks("conversion_worker.py", 4, root)
    return json.loads((root / "report.json").read_text())


def check_report(report: dict[str, list[str]], folders: int) -> None:
    dense = [layout for layout, sizes in LAYOUTS.items() if "expert" not in sizes]
    assert len(report) >= 2 * folders * len(dense)
    assert any("ep2" in case for case in report)
    assert {case: wrong for case, wrong in report.items() if wrong} == {}


def test_every_layout_loads_both_formats_and_streams_the_same_bits(tmp_path: Path) -> None:
    """One model per kind of layer; `test_every_family_in_every_layout_and_precision` has all."""
    kinds = {"llama": FP32, "qwen2": BF16, "qwen3 untied": FP32, "qwen3 moe": BF16}
    make_folders(tmp_path, {name: (dtype,) for name, dtype in kinds.items()})
    check_report(in_every_layout(tmp_path), len(kinds))


@pytest.mark.slow
def test_every_family_in_every_layout_and_precision(tmp_path: Path) -> None:
    make_folders(tmp_path, dict.fromkeys(CONFIGS, DTYPES))
    check_report(in_every_layout(tmp_path), 2 * len(CONFIGS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_the_same_folder(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    random_model(CONFIGS[name], tmp_path / "hf", dtype)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", layout=TP2)
    assert verify_tensors(tmp_path / "hf", tmp_path / "megatron", lambda size: None)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back")
    before, after = HFWeights(tmp_path / "hf"), HFWeights(tmp_path / "back")
    assert differences({key: after.slice(key)[:] for key in after.stored}, before) == []
    assert read_json(tmp_path / "back/config.json") == read_json(tmp_path / "hf/config.json")


def test_verification_finds_one_changed_bit(tmp_path: Path) -> None:
    model = random_model(CONFIGS["llama"], tmp_path / "hf", torch.bfloat16)
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", layout=TP2)
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.view(torch.int16)[15, 47] ^= 1
    model.save_pretrained(tmp_path / "hf")
    with pytest.raises(
        ValueError, match=r"model\.layers\.2\.self_attn\.k_proj\.weight is up to .* from the one of"
    ):
        verify_tensors(tmp_path / "hf", tmp_path / "megatron", lambda size: None)


def logits_of(checkpoint: Path, ids: np.ndarray) -> torch.Tensor:
    """Megatron's logits [tokens, vocabulary] of one sequence, from a checkpoint, in float32."""
    config = hf_config(checkpoint)
    with runtime.alone() as world, torch.no_grad():
        (model,) = build(
            config, transformer_config(config, layout=world.layout, dtype=torch.float32), world.layout
        )
        load_checkpoint([model], checkpoint)
        micro = pack(0, [0], [TokenSequence(ids[:1], ids[1:])], world.device)
        hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.attention)
        return hidden[:, 0] @ model.output_weight.T


def largest_difference(config: PretrainedConfig, folder: Path, tokens: int) -> float:
    """max |Megatron - transformers| logit, after a conversion; the logits are far from 0."""
    model = random_model(config, folder / "hf", scale=0.06)
    hf_to_megatron(folder / "hf", folder / "megatron", layout=TP2)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, tokens, dtype=np.int32)
    with torch.no_grad():
        expected = model(torch.from_numpy(ids).long()[None]).logits[0]
    assert 0.1 < float(expected.std()) < 3.0
    return float((logits_of(folder / "megatron", ids)[:, : config.vocab_size] - expected).abs().max())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert largest_difference(CONFIGS[name], tmp_path, 200) <= 1e-5


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, {**LLAMA3_ROPE, "rope_type": "linear"}])
def test_logits_with_scaled_rope_beyond_the_original_context(rope: dict, tmp_path: Path) -> None:
    long = {**SIZES, "max_position_embeddings": 8192, "num_hidden_layers": 2}
    scaled = {**rope, "original_max_position_embeddings": 2048, "factor": 4.0}
    assert largest_difference(LlamaConfig(**long, rope_parameters=scaled), tmp_path, 8192) <= 1e-5


def test_a_converted_folder_is_complete_and_usable(tmp_path: Path) -> None:
    source = tmp_path / "source"
    random_model(CONFIGS["qwen3 tied"], source)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        (source / file).write_bytes((TINY / "A" / file).read_bytes())
    (source / "notes of the authors.txt").write_text("kept")
    (source / "pytorch_model.bin").write_text("weights of an older model")
    hf_to_megatron(source, tmp_path / "megatron", layout=TP2)
    megatron_to_hf(tmp_path / "megatron", tmp_path / "hf", dtype=torch.bfloat16, shard_bytes=30_000)
    files = {path.name for path in (tmp_path / "hf").iterdir()}
    kept = {path.name for path in source.iterdir()} - {SINGLE, "pytorch_model.bin"}
    shards = {name for name in files if name.endswith(".safetensors")}
    assert files == kept | shards | {INDEX}
    assert len(shards) > 2
    assert all((tmp_path / "hf" / name).stat().st_size < 31_000 + 4_000 for name in shards)
    assert read_json(tmp_path / "hf/config.json")["dtype"] == "bfloat16"
    index = read_json(tmp_path / "hf" / INDEX)
    assert set(index["weight_map"].values()) == shards
    assert index["metadata"]["total_size"] == HFWeights(tmp_path / "hf").bytes
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert loaded.dtype == torch.bfloat16
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert len(AutoTokenizer.from_pretrained(tmp_path / "hf")) == len(
        AutoTokenizer.from_pretrained(TINY / "A")
    )


@pytest.mark.parametrize("name", ["qwen3 moe", "llama"])
def test_the_engine_takes_its_weights_from_the_stream_of_a_checkpoint(name: str, tmp_path: Path) -> None:
    random_model(CONFIGS[name], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", layout=TP2)
    settings = {"dtype": FP32, "device": "cpu", "stop_ids": [3]}
    engine = LocalEngine(tmp_path / "megatron", **settings)
    sampling = Sampling(responses_per_prompt=4, max_tokens=12, seed=5)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate([[1, 2]], sampling)
    with runtime.alone():
        engine.update_weights(checkpoint_tensors(tmp_path / "megatron", tmp_path / "megatron")[0], 1)
    expected = LocalEngine(tmp_path / "hf", **settings).generate([[1, 2]], sampling)
    for response, wanted in zip(engine.generate([[1, 2]], sampling), expected, strict=True):
        assert response.token_ids.tolist() == wanted.token_ids.tolist()
        assert response.log_probs.tolist() == wanted.log_probs.tolist()


def test_log_probs_of_a_converted_agent_are_those_of_its_folder(tmp_path: Path) -> None:
    hf_to_megatron(TINY / "B", tmp_path / "megatron", layout=TP2)
    assert verify_log_probs(TINY / "B", tmp_path / "megatron") < 1e-5


def test_the_commands_convert_verify_and_say_so(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    there = [sys.executable, str(root / "tools/convert_hf_to_megatron.py"), str(TINY / "A")]
    options = ["--tp", "2", "--pp", "2", "--dtype", "bfloat16", "--verify"]
    done = subprocess.run(
        [*there, str(tmp_path / "megatron"), *options], capture_output=True, text=True, check=True
    )
    assert "24 tensors are equal" in done.stdout
    back = [sys.executable, "-m", "megatron_hacpo", "convert", "to-hf", str(tmp_path / "megatron")]
    done = subprocess.run(
        [*back, str(tmp_path / "hf"), "--verify"], capture_output=True, text=True, check=True
    )
    assert "24 tensors are equal" in done.stdout
    stored = HFWeights(tmp_path / "hf").stored
    assert {tensor.dtype for tensor in stored.values()} == {"bfloat16"}

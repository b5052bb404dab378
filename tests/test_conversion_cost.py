"""What keeps conversions small and fast: our own weight files, checkpoints read in parts, peak memory."""

import json
import shutil
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from random_models import CONFIGS, random_model
from safetensors.torch import load_file

from megatron_hacpo.hf.write import SHARD_BYTES, write_weights
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import read_checkpoint
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.model import build_without_weights, hf_config
from megatron_hacpo.megatron.runtime import Layout

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from conversion_speed import compare, convert, model_bytes, write_random_folder  # noqa: E402


def test_weight_files_are_what_safetensors_reads(tmp_path: Path) -> None:
    """Odd sizes and several dtypes, tensors of more than one piece, views, in one file and in more."""
    big = torch.arange(700_001, dtype=torch.float32)
    tensors = {
        "half": torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16),
        "big": big,
        "column": big[:9].view(3, 3)[:, 1],
        "float16": torch.ones(5, 1, dtype=torch.float16),
    }
    for name, limit in (("one", 10**9), ("more", 30)):
        folder = tmp_path / name
        folder.mkdir()
        write_weights(iter(tensors.items()), folder, shard_bytes=limit)
        files = list(folder.glob("*.safetensors"))
        assert len(files) == (1 if name == "one" else 3)
        read = {key: tensor for file in files for key, tensor in load_file(file).items()}
        for file in files:
            length = int.from_bytes(file.read_bytes()[:8], "little")
            header = json.loads(file.read_bytes()[8 : 8 + length])
            begins = {key: entry["data_offsets"][0] for key, entry in header.items() if key in tensors}
            assert all((8 + length + begins[key]) % tensors[key].itemsize == 0 for key in begins)
        assert read.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert read[key].dtype == tensor.dtype
            assert torch.equal(read[key], tensor)


@pytest.mark.parametrize("name", ["qwen2", "qwen3 moe"])
def test_a_checkpoint_can_be_read_in_small_parts(name: str, tmp_path: Path) -> None:
    random_model(CONFIGS[name], tmp_path / "hf")
    hf_to_megatron(tmp_path / "hf", tmp_path / "megatron", layout=Layout())
    with runtime.alone(torch.device("cpu")):
        config = hf_config(tmp_path / "megatron")
        model = build_without_weights(config, dtype=torch.float32, layout=Layout())
        whole = dict(read_checkpoint(model, tmp_path / "megatron"))
        parts = dict(read_checkpoint(model, tmp_path / "megatron", bucket_bytes=1))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "shard_bytes"), [("llama-3.2-1b", 6 * 10**8), ("qwen2.5-7b", SHARD_BYTES)])
def test_memory_is_at_most_two_files_and_a_gigabyte(model: str, shard_bytes: int, tmp_path: Path) -> None:
    """Both ways, and to the bit; needs twice the model's bytes of disk, which it gives back."""
    needed, free = 2 * model_bytes(model) + 10**9, shutil.disk_usage(tmp_path).free
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of disk under {tmp_path}, which has {free / 1e9:.0f} free")
    with tempfile.TemporaryDirectory(dir=tmp_path) as name:
        original, checkpoint, back = (Path(name) / folder for folder in ("hf", "megatron", "back"))
        write_random_folder(model, original, shard_bytes)
        files = [file.stat().st_size for file in original.glob("*.safetensors")]
        limit = 2 * max(files) + 10**9
        assert limit < sum(files)  # else a converter that holds everything would pass
        costs = [convert("to-megatron", original, checkpoint)]
        compare(original, checkpoint)
        shutil.rmtree(original)
        costs.append(convert("to-hf", checkpoint, back, shard_bytes))
        compare(back, checkpoint)
    for cost in costs:
        print(f"{cost['seconds']:.0f} s, {cost['peak'] / 1e9:.2f} GB of at most {limit / 1e9:.2f}")
    assert max(cost["peak"] for cost in costs) <= limit

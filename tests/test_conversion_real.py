"""A real pretrained model, SmolLM2-135M-Instruct, converted: same bits, same logits, same text."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_hacpo.hf.read import HFWeights
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.convert import hf_to_megatron, megatron_to_hf
from megatron_hacpo.megatron.model import build, hf_config, transformer_config
from megatron_hacpo.megatron.packing import TokenSequence, pack
from megatron_hacpo.megatron.runtime import Layout, World

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
DTYPES = ("float32", "bfloat16")
TOKENS = 200
QUESTION = "Why do we see a rainbow after rain?"

Logits = Callable[[torch.Tensor], torch.Tensor]
"""int64 [t] token ids -> float32 [t, vocabulary]."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The model by dtype."""
    root = tmp_path_factory.mktemp("smollm2")
    full, half = root / "float32", root / "bfloat16"
    fetch = [sys.executable, str(ROOT / "tools" / "fetch_smollm2.py"), str(full), "--dtype", "float32"]
    subprocess.run(fetch, check=True)
    AutoModelForCausalLM.from_pretrained(full, dtype=torch.bfloat16).save_pretrained(half)
    AutoTokenizer.from_pretrained(full).save_pretrained(half)
    return {"float32": full, "bfloat16": half}


def transformers_logits(folder: Path) -> Logits:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda ids: model(ids[None]).logits[0]


def megatron_logits(checkpoint: Path, world: World) -> Logits:
    config = hf_config(checkpoint)
    settings = transformer_config(config, layout=world.layout, dtype=torch.float32)
    (model,) = build(config, settings, world.layout)
    load_checkpoint([model], checkpoint)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        row = ids.numpy().astype(np.int32)
        micro = pack(0, [0], [TokenSequence(row[:1], row[1:])], world.device)
        hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.attention)
        return hidden[:, 0] @ model.output_weight.T

    return logits


def greedy(logits: Logits, prompt: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` most likely tokens after a prompt, one after the other."""
    ids = prompt
    for _ in range(count):
        ids = torch.cat([ids, logits(ids)[-1].argmax()[None]])
    return ids[len(prompt) :]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pretrained_model_comes_back_to_the_bit(
    dtype: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    hf_to_megatron(folders[dtype], tmp_path / "megatron", layout=Layout(tensor=3))
    megatron_to_hf(tmp_path / "megatron", tmp_path / "back", shard_bytes=2 * 10**8)
    before, after = HFWeights(folders[dtype]), HFWeights(tmp_path / "back")
    assert before.stored.keys() == after.stored.keys()
    assert len({stored.file for stored in after.stored.values()}) > 1
    for name, stored in before.stored.items():
        assert stored.dtype == after.stored[name].dtype == dtype
        bits = [weights.slice(name)[:].view(torch.uint8) for weights in (before, after)]
        assert torch.equal(*bits), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pretrained_model_answers_alike(dtype: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """In float32, whatever the weights are stored in."""
    hf_to_megatron(folders[dtype], tmp_path / "megatron", layout=Layout())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "megatron")
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer(text)["input_ids"][:TOKENS])
    assert len(ids) == TOKENS
    chat = [{"role": "user", "content": QUESTION}]
    prompt = torch.tensor(
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    )
    with runtime.alone() as world, torch.no_grad():
        theirs, ours = transformers_logits(folders[dtype]), megatron_logits(tmp_path / "megatron", world)
        expected, got = theirs(ids), ours(ids)
        answers = [tokenizer.decode(greedy(logits, prompt, 32)) for logits in (theirs, ours)]
    difference = float((got[:, : expected.shape[1]] - expected).abs().max())
    print(f"{dtype}: logits differ by at most {difference:.1e}; {answers[0]!r}")
    assert difference <= 1e-4
    assert answers[0] == answers[1]
    assert "natural phenomenon" in answers[0]  # a model whose weights are where they belong

"""benchmarks/gpu_check.py as far as a CPU goes: what is right passes, and what is not does not."""

import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_hacpo.megatron import packing, policy
from megatron_hacpo.megatron.chunked_logprob import chunked_log_probs
from megatron_hacpo.megatron.runtime import World

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402

TINY = LlamaConfig(
    vocab_size=640,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)
NAMES = ["B: log-probs", "B: log-probs, packed or alone", "B: gradient", "B: first |s - 1|"]


def rows_of_b(world: World) -> list[gpu_check.Row]:
    folder = ROOT / "examples/tiny/B"
    few = partial(gpu_check.rule_sequences, count=32)
    return list(gpu_check.model_rows("B", folder, few, world, tokens=256))


def test_a_right_model_passes(world: World) -> None:
    rows = rows_of_b(world)
    assert [row.check for row in rows] == [*NAMES, "B, recomputed: first |s - 1|"]
    assert all(row.ok for row in rows)


def test_sequences_that_see_their_neighbours_fail(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_together(*args: Any) -> packing.PackedMicroBatch:
        micro = packing.pack(*args)
        end = micro.tokens.shape[1]
        ends = torch.tensor([0, end], dtype=torch.int32)
        whole = dataclasses.replace(
            micro.attention,
            cu_seqlens_q=ends,
            cu_seqlens_kv=ends,
            max_seqlen_q=end,
            max_seqlen_kv=end,
            slots=torch.arange(end),
        )
        return dataclasses.replace(micro, attention=whole)

    monkeypatch.setattr(policy, "pack", run_together)
    failed = [row.check for row in rows_of_b(world) if not row.ok]
    assert failed == NAMES[:3]


def test_log_probs_in_chunks_are_those_of_all_logits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = gpu_check.LogProbProblem(world.device, torch.float32, tokens=1200, vocabulary=300, hidden=32)
    assert gpu_check.difference_row(problem).ok

    def without_a_column(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return chunked_log_probs(hidden, weight, targets, temperature=1.0, vocab_size=len(weight) - 1)[0]

    monkeypatch.setattr(gpu_check, "in_chunks", without_a_column)
    assert not gpu_check.difference_row(problem).ok


def test_flops_are_six_per_weight_and_token() -> None:
    """But for attention's pairs, which short sequences hardly have, and the logits of prompts."""
    weights = sum(p.numel() for p in LlamaForCausalLM(TINY).parameters())
    embedding = TINY.vocab_size * TINY.hidden_size
    sequences = gpu_check.cut(np.zeros(20, np.int32), [5, 5, 10])
    prompts = sum(len(s.prompt_ids) for s in sequences)
    expected = 6 * (weights * 20 - embedding * prompts)
    assert prompts == 4
    assert gpu_check.update_flops(TINY, sequences) == pytest.approx(expected, rel=0.02)


def test_speed_of_a_small_model(world: World) -> None:
    rows = list(gpu_check.speed_rows(world, "NVIDIA H100 PCIe", TINY, count=2, updates=1))
    assert [row.check for row in rows] == ["1B: first |s - 1|", "1B: updates", "1B: MFU"]
    assert rows[0].ok
    assert rows[1].figure.endswith(" tokens/s")
    assert rows[2].figure == "0.00 of 756 TFLOPS"


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA A10", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_by_name(name: str, tflops: int | None) -> None:
    assert gpu_check.peak_tflops(name) == tflops


def test_an_error_is_a_failed_row(capsys: pytest.CaptureFixture[str]) -> None:
    def rows() -> Any:
        yield gpu_check.at_most("first", 1.0, 1.0)
        yield gpu_check.at_most("second", float("nan"), 1.0)
        raise RuntimeError("out of memory\nand more")

    first, second, third = gpu_check.attempt("model", rows)
    assert (first.ok, second.ok, third.ok) == (True, False, False)
    assert (third.check, third.figure) == ("model: RuntimeError", "out of memory")
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check.py"])
    assert gpu_check.main() == 2
    assert capsys.readouterr().err == "gpu_check: a CUDA device is missing; nothing was checked\n"

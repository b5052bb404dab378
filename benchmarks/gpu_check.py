"""Whether a GPU computes what it should: log-probs, packing, gradients, memory; and how fast it is.

    python benchmarks/gpu_check.py [--smollm2 DIR]

Needs CUDA and TransformerEngine and no network; made to take less than 8 minutes. DIR is what
tools/fetch_smollm2.py writes. One row per check; exit status 1 if one FAILED, 2 where nothing can be checked.
Models run in bfloat16 through the trainer's own policy, in a world of one rank.

Log-probs are compared with transformers' in float32 from the same bfloat16 weights: mean absolute difference
in nats per response token. What rounding makes of it depends on the model, so transformers in bfloat16 is
measured too. 1.5 times its difference is allowed, and once its difference between sequences packed and alone,
which are rounded at the same places; 0.02 always. The gradient is that of the mean log-prob: relative
difference of its norm. Memory is the peak of forward and backward over hidden states, weight, their gradients
(the weight's is summed in float32) and one chunk of float32 logits.

Speed is that of updates, of a random model in the shape of Llama-3.2-1B. MFU counts nothing that is computed
again, and logits of response tokens alone.
"""

import argparse
import gc
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from packing import response_lengths
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.algorithm.minibatch import MiniBatch
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import AlgorithmConfig, OptimizerConfig
from megatron_hacpo.data import rule_task
from megatron_hacpo.learner.batch import LearnerMiniBatch
from megatron_hacpo.learner.own import OwnBlock
from megatron_hacpo.learner.update import update
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.batching import Cost, MicroBatchPlan
from megatron_hacpo.megatron.chunked_logprob import CHUNK_TOKENS, chunked_log_probs
from megatron_hacpo.megatron.layers import HAVE_TE
from megatron_hacpo.megatron.model import Recompute
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World

ROOT = Path(__file__).parents[1]
LLAMA_1B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
)
PEAK_TFLOPS = {"H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "H200": 989, "A100": 312, "L40S": 362}
"""Dense bfloat16, by a part of the device's name; the first that fits."""

Sequences = list[TokenSequence]
LogProbs = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden states [r, h], weight [v, h], targets int64 [r]) -> log-probs, float32 [r]."""


@dataclass(frozen=True)
class Row:
    """ok: None where there is nothing to pass."""

    check: str
    figure: str
    limit: str = ""
    ok: bool | None = None

    def __str__(self) -> str:
        result = {None: "-", True: "ok", False: "FAILED"}[self.ok]
        return f"{self.check:42} {self.figure:>20} {self.limit:>8}  {result}"


def at_most(check: str, value: float, limit: float) -> Row:
    return Row(check, f"{value:.3g}", f"{limit:.3g}", value <= limit)


def make_policy(folder: Path, world: World, tokens: int, recompute: Recompute = "none") -> Policy:
    gc.collect()  # of an earlier policy: it has reference cycles
    return Policy(
        folder,
        world=world,
        dtype=torch.bfloat16,
        optimizer=OptimizerConfig(),
        steps=1,
        temperature=1.0,
        microbatch_tokens=tokens,
        keep_reference=False,
        recompute=recompute,
    )


def rule_sequences(folder: Path, count: int = 128) -> Sequences:
    """Prompts of the demo with right answers, in the agent's tokens."""
    tokenizer = AgentTokenizer.load(folder)
    return [
        TokenSequence(
            np.array(tokenizer.render_prompt(prompt.messages), np.int32),
            np.append(tokenizer.encode_response(prompt.answer), np.int32(tokenizer.stop_id)),
        )
        for prompt in rule_task.batch(1, 1, count)
    ]


def text_sequences(folder: Path) -> Sequences:
    """The project's documentation in pieces of 70 to 1,200 tokens."""
    files = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    lengths = np.random.default_rng(1).integers(70, 1201, 16).tolist()
    return cut(AgentTokenizer.load(folder).encode_response(text), lengths)


def random_sequences(vocabulary: int, count: int) -> Sequences:
    """Lengths as of reasoning responses, 100 to 4,096 tokens."""
    lengths = response_lengths(seed=1, count=count)
    return cut(np.random.default_rng(1).integers(0, vocabulary, sum(lengths)).astype(np.int32), lengths)


def cut(ids: np.ndarray, lengths: list[int]) -> Sequences:
    """One sequence behind the other, of each the first fifth as the prompt."""
    ends = np.cumsum(lengths)
    assert ends[-1] <= len(ids), f"{len(ids)} tokens are too few"
    pieces = [ids[end - n : end] for end, n in zip(ends, lengths, strict=True)]
    return [TokenSequence(piece[: len(piece) // 5], piece[len(piece) // 5 :]) for piece in pieces]


def token_log_probs(policy: Policy, sequences: Sequences, plan: MicroBatchPlan) -> torch.Tensor:
    """Of the response tokens, sequence after sequence whatever the plan, float32 [r]."""
    by_row: dict[int, torch.Tensor] = {}
    for rows, tokens in zip(plan[0], policy.log_probs(sequences, plan).tokens, strict=True):
        lengths = [len(sequences[row].response_ids) for row in rows]
        by_row.update(zip(rows, tokens.split(lengths), strict=True))
    return torch.cat([by_row[row] for row in range(len(sequences))])


def transformers_log_probs(model: Any, sequences: Sequences) -> Iterator[torch.Tensor]:
    """The same of a transformers model, one sequence at a time."""
    for s in sequences:
        ids = torch.from_numpy(np.concatenate([s.prompt_ids, s.response_ids])).long().to(model.device)
        log_probs = model(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1].float().log_softmax(-1)
        yield log_probs.gather(1, ids[len(s.prompt_ids) :, None])[:, 0]


def gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().mean())


def model_rows(
    name: str, folder: Path, make_sequences: Callable[[Path], Sequences], world: World, tokens: int
) -> Iterator[Row]:
    """tokens: of a micro-batch."""
    sequences = make_sequences(folder)
    policy = make_policy(folder, world, tokens)
    plan = policy.plan(sequences)
    packed = token_log_probs(policy, sequences, plan)
    alone = token_log_probs(policy, sequences, [[[row] for row in range(len(sequences))]])
    count = len(packed)
    norm = policy.update(sequences, plan, lambda _, log_probs: (log_probs.sum() / count, None)).grad_norm

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(world.device)
    with torch.no_grad():
        rounded = torch.cat(list(transformers_log_probs(model, sequences)))
    exact = []
    for log_probs in transformers_log_probs(model.float(), sequences):
        (log_probs.sum() / count).backward()
        exact.append(log_probs.detach())
    theirs = float(torch.stack([p.grad.norm() for p in model.parameters()]).norm())
    rounding = gap(rounded, torch.cat(exact))
    del model
    yield at_most(f"{name}: log-probs", gap(packed, torch.cat(exact)), max(0.02, 1.5 * rounding))
    yield at_most(f"{name}: log-probs, packed or alone", gap(packed, alone), max(0.02, rounding))
    yield at_most(f"{name}: gradient", abs(norm / theirs - 1.0), 0.05)
    yield own_ratio_row(name, policy, sequences)
    del policy
    policy = make_policy(folder, world, tokens, recompute="full")
    yield own_ratio_row(f"{name}, recomputed", policy, sequences)


def own_ratio_row(name: str, policy: Policy, sequences: Sequences) -> Row:
    record = update(policy, own_minibatch(policy, sequences), AlgorithmConfig())
    assert record.ratios is not None
    assert record.applied, f"the gradient norm is {record.grad_norm}"
    return at_most(f"{name}: first |s - 1|", float((record.ratios - 1.0).abs().max()), 0.0)


def own_minibatch(policy: Policy, sequences: Sequences) -> LearnerMiniBatch:
    """With log-probs of the policy as it is, and made-up advantages."""
    plan, count = policy.plan(sequences), len(sequences)
    counts = torch.tensor([len(s.response_ids) for s in sequences])
    old = policy.log_probs(sequences, plan)
    block = OwnBlock(list(range(count)), sequences, plan, counts, old, reference=None, dropped=Counter())
    return LearnerMiniBatch(
        place=MiniBatch(source=0, prompt_start=0, prompt_stop=count, m=0),
        rows=block.rows,
        sequences=sequences,
        counts=block.counts,
        advantages=torch.linspace(-1.0, 1.0, count, dtype=torch.float64),
        old_means=block.mean_log_probs,
        omega=1.0,
        nominal=count,
        own=block,
    )


def in_chunks(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return chunked_log_probs(hidden, weight, targets, temperature=1.0, vocab_size=len(weight))[0]


def all_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return -F.cross_entropy((hidden @ weight.t()).float(), targets, reduction="none")


@dataclass(frozen=True)
class LogProbProblem:
    """Log-probs of random hidden states, forward and backward."""

    device: torch.device
    dtype: torch.dtype
    tokens: int = 4096
    vocabulary: int = 151_936
    hidden: int = 896

    def solve(self, path: LogProbs) -> list[Any]:
        """Log-probs and the gradients of hidden states and weight."""
        generator = torch.Generator(self.device).manual_seed(1)
        place: dict[str, Any] = {"device": self.device, "dtype": self.dtype}
        hidden = torch.empty(self.tokens, self.hidden, **place).normal_(generator=generator)
        weight = torch.empty(self.vocabulary, self.hidden, **place).normal_(0.0, 0.05, generator=generator)
        targets = torch.randint(self.vocabulary, (self.tokens,), device=self.device, generator=generator)
        log_probs = path(hidden.requires_grad_(), weight.requires_grad_(), targets)
        log_probs.backward(torch.linspace(-1.0, 1.0, self.tokens, device=self.device))
        return [log_probs.detach(), hidden.grad, weight.grad]

    def needed_bytes(self) -> int:
        item = self.dtype.itemsize
        states, weight = 2 * item * self.tokens * self.hidden, (item + 4) * self.vocabulary * self.hidden
        return states + weight + 4 * CHUNK_TOKENS * self.vocabulary

    def peak_bytes(self, path: LogProbs) -> int:
        """On the GPU, beyond what was there and what a process's first call leaves there."""
        self.solve(path)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.solve(path)
        return torch.cuda.max_memory_allocated() - before


def chunk_rows(device: torch.device) -> Iterator[Row]:
    yield difference_row(LogProbProblem(device, torch.float32))
    for dtype in (torch.float32, torch.bfloat16):
        problem = LogProbProblem(device, dtype)
        chunked, full = problem.peak_bytes(in_chunks), problem.peak_bytes(all_logits)
        name = f"memory, {str(dtype).removeprefix('torch.')} ({chunked / full:.2f} of all logits')"
        yield at_most(name, chunked / problem.needed_bytes(), 1.3)


def difference_row(problem: LogProbProblem) -> Row:
    """Of log-probs and gradients, relative to a tensor's largest element."""
    pairs = zip(problem.solve(in_chunks), problem.solve(all_logits), strict=True)
    difference = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return at_most("chunks against all logits, float32", difference, 1e-5)


def update_flops(config: LlamaConfig, sequences: Sequences) -> float:
    """Forward and backward, which is twice as much."""
    cost = Cost.of_model(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size,
        vocab_size=config.vocab_size,
    )
    logits = 2 * config.hidden_size * config.vocab_size
    return 3 * sum(cost(len(s)) - logits * len(s.prompt_ids) for s in sequences)


def peak_tflops(device: str) -> int | None:
    """None for a device that is not in the table, or a MIG part of one."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device and "MIG" not in device), None)


def speed_rows(
    world: World, device: str, config: LlamaConfig = LLAMA_1B, count: int = 64, updates: int = 3
) -> Iterator[Row]:
    """device: its name. count: of sequences."""
    sequences = random_sequences(config.vocab_size, count)
    with tempfile.TemporaryDirectory() as folder:
        with world.device:
            AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
        policy = make_policy(Path(folder), world, tokens=8192)
    yield own_ratio_row("1B", policy, sequences)  # a first update, which is not timed
    minibatch = own_minibatch(policy, sequences)
    start = time.perf_counter()
    for _ in range(updates):
        update(policy, minibatch, AlgorithmConfig())  # brings its record to the host, so waits for the GPU
    seconds = (time.perf_counter() - start) / updates
    yield Row("1B: updates", f"{sum(map(len, sequences)) / seconds:,.0f} tokens/s")
    tflops, peak = update_flops(config, sequences) / seconds / 1e12, peak_tflops(device)
    yield Row("1B: MFU", "unknown" if peak is None else f"{tflops / peak:.2f} of {peak} TFLOPS")


def attempt(name: str, rows: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """The rows; after an error one that FAILED, and the other checks still run."""
    try:
        yield from rows()
    except Exception as error:
        traceback.print_exc()
        yield Row(f"{name}: {type(error).__name__}", str(error).partition("\n")[0], ok=False)


def checks(world: World, smollm2: Path | None) -> Iterator[Row]:
    yield from attempt("chunks", partial(chunk_rows, world.device))
    models: dict[str, tuple[Path | None, Callable[[Path], Sequences], int]] = {
        name: (ROOT / "examples/tiny" / name, rule_sequences, 512) for name in "ABC"
    }
    models["SmolLM2"] = (smollm2, text_sequences, 4096)
    for name, (folder, sequences, tokens) in models.items():
        if folder is None:
            yield Row(name, "skipped: no folder")
        else:
            yield from attempt(name, partial(model_rows, name, folder, sequences, world, tokens))
    yield from attempt("1B", partial(speed_rows, world, torch.cuda.get_device_name()))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--smollm2", type=Path, metavar="DIR", help="as tools/fetch_smollm2.py writes it")
    smollm2 = parser.parse_args().smollm2
    if not HAVE_TE:
        missing = "TransformerEngine" if torch.cuda.is_available() else "a CUDA device"
        print(f"gpu_check: {missing} is missing; nothing was checked", file=sys.stderr)
        return 2
    disable_progress_bar()
    torch.set_float32_matmul_precision("highest")
    packages = ("torch", "transformer-engine", "megatron-core", "transformers")
    print(torch.cuda.get_device_name(), *(f"{name} {version(name)}" for name in packages), sep=", ")
    print(f"{'check':42} {'figure':>20} {'limit':>8}  result")
    failed = False
    with runtime.alone() as world:
        for row in checks(world, smollm2):
            print(row, flush=True)
            failed |= row.ok is False
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

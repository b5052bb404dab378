"""What an update costs beyond training on the next token.

    python benchmarks/objective_cost.py [--repeats 7] [--sequences 12]

Forward and backward of one HACPO mini-batch (old and reference log-probs given; own responses with a KL
penalty, and another agent's), and of a next-token loss over the same tokens in the same micro-batches through
the same chunked log-probs: both through Megatron's schedule, without the optimizer's step. A random model in
the shape of a small part of SmolLM2-135M, float32, one CPU thread. Turn by turn in one process; prints the
median CPU seconds of each and their ratio.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_hacpo.algorithm.minibatch import MiniBatch
from megatron_hacpo.config import AlgorithmConfig, OptimizerConfig
from megatron_hacpo.learner.batch import LearnerMiniBatch
from megatron_hacpo.learner.loss import minibatch_loss
from megatron_hacpo.learner.own import OwnBlock
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.batching import MicroBatchPlan
from megatron_hacpo.megatron.packing import PackedMicroBatch, TokenSequence
from megatron_hacpo.megatron.policy import Loss, Policy

SHAPE = LlamaConfig(
    vocab_size=16_384,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def random_sequences(count: int) -> list[TokenSequence]:
    """Prompts of 64 tokens and responses of 64 to 512."""
    rng = np.random.default_rng(1)

    def ids(length: int) -> np.ndarray:
        return rng.integers(0, SHAPE.vocab_size, length).astype(np.int32)

    return [TokenSequence(ids(64), ids(int(rng.integers(64, 513)))) for _ in range(count)]


def own_minibatch(policy: Policy, sequences: list[TokenSequence], plan: MicroBatchPlan) -> LearnerMiniBatch:
    old = policy.log_probs(sequences, plan)
    with policy.reference_weights():
        reference = policy.log_probs(sequences, plan)
    counts = torch.tensor([len(s.response_ids) for s in sequences])
    rows = list(range(len(sequences)))
    block = OwnBlock(rows, sequences, plan, counts, old, reference, Counter())
    return minibatch(sequences, block.mean_log_probs, omega=1.0, own=block)


def minibatch(
    sequences: list[TokenSequence], old_means: torch.Tensor, *, omega: float, own: OwnBlock | None
) -> LearnerMiniBatch:
    """With advantages of both signs."""
    n = len(sequences)
    return LearnerMiniBatch(
        place=MiniBatch(source=0 if own else 1, prompt_start=0, prompt_stop=n, m=0),
        rows=list(range(n)),
        sequences=sequences,
        counts=torch.tensor([len(s.response_ids) for s in sequences]),
        advantages=torch.linspace(-1.0, 1.0, n, dtype=torch.float64),
        old_means=old_means,
        omega=omega,
        nominal=n,
        own=own,
    )


def next_token_loss(tokens: int) -> Loss:
    def loss(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -log_probs.sum() / tokens, None

    return loss


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=12)
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.manual_seed(1)
    with tempfile.TemporaryDirectory() as folder, runtime.alone(torch.device("cpu")) as world:
        LlamaForCausalLM(SHAPE).save_pretrained(folder)
        policy = Policy(
            Path(folder),
            world=world,
            dtype=torch.float32,
            optimizer=OptimizerConfig(),
            steps=1,
            temperature=1.0,
            microbatch_tokens=2048,
            keep_reference=True,
        )
        sequences = random_sequences(options.sequences)
        plan = policy.plan(sequences)
        algorithm = AlgorithmConfig(delta=1.0)
        own = own_minibatch(policy, sequences, plan)
        cross = minibatch(sequences, own.old_means, omega=0.9, own=None)
        losses = {
            "next token": next_token_loss(int(own.counts.sum())),
            "own": minibatch_loss(own, algorithm),
            "cross": minibatch_loss(cross, algorithm),
        }
        print(f"{sum(map(len, sequences))} tokens in {len(plan[0])} micro-batches", flush=True)
        seconds = measure(policy, sequences, plan, losses, options.repeats)
    reference = statistics.median(seconds["next token"])
    for name, values in seconds.items():
        median = statistics.median(values)
        print(
            f"{name:10}  {median:6.2f} s  {median / reference:.3f}  ({min(values):.2f} to {max(values):.2f})"
        )


def measure(
    policy: Policy,
    sequences: list[TokenSequence],
    plan: MicroBatchPlan,
    losses: dict[str, Loss],
    repeats: int,
) -> dict[str, list[float]]:
    """CPU seconds of forward and backward by loss, after one turn that does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    for turn in range(repeats + 1):
        for name, loss in losses.items():
            start = time.process_time()
            policy.forward_backward(sequences, plan, loss)
            if turn:
                seconds[name].append(time.process_time() - start)
    return seconds


if __name__ == "__main__":
    main()

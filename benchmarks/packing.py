"""How well `batching.plan` packs a mini-batch of reasoning responses, and how long it takes.

    python benchmarks/packing.py [--seeds 20]

512 sequences, log-normal (median 900 tokens, sigma 0.8) within 100 to 4,096 tokens, over 8 data-parallel
ranks in micro-batches of 16,384 tokens. One line per cost that work is balanced by, with the share of L^2 in
the work of 4,096 tokens. Over all seeds: micro-batches per rank; lowest packing efficiency; largest spread of
work between ranks, (max - min) / mean, and the same under a plan that balances tokens alone; median time of a
plan.
"""

import argparse
import statistics
import time

import numpy as np

from megatron_hacpo.megatron.batching import TOKENS, Cost, MicroBatchPlan, plan

RANKS, BUDGET = 8, 16_384
COSTS = {
    "tokens": TOKENS,
    "Qwen3-30B-A3B": Cost.of_model(
        num_layers=48,
        hidden_size=2048,
        num_attention_heads=32,
        num_query_groups=4,
        kv_channels=128,
        ffn_hidden_size=8 * 768,
        vocab_size=151_936,
    ),
    "Qwen3-0.6B": Cost.of_model(
        num_layers=28,
        hidden_size=1024,
        num_attention_heads=16,
        num_query_groups=8,
        kv_channels=128,
        ffn_hidden_size=3072,
        vocab_size=151_936,
    ),
    "attention alone": Cost(per_token=1e-9, per_token_pair=1.0),
}


def response_lengths(seed: int, count: int = 512) -> list[int]:
    """Token counts as LLM reasoning responses have them: most below a thousand, and a long tail."""
    drawn = np.random.default_rng(seed).lognormal(np.log(900.0), 0.8, count)
    return np.clip(drawn, 100, 4096).astype(int).tolist()


def efficiency(lengths: list[int], got: MicroBatchPlan) -> float:
    """Real tokens over ranks times the sum, over micro-batches, of the largest rank's tokens."""
    tokens = [[sum(lengths[row] for row in rows) for rows in micro_batches] for micro_batches in got]
    return sum(lengths) / (len(got) * sum(max(together) for together in zip(*tokens, strict=True)))


def spread(lengths: list[int], got: MicroBatchPlan, cost: Cost) -> float:
    """(max - min) / mean of the ranks' work."""
    work = [sum(cost(lengths[row]) for rows in micro_batches for row in rows) for micro_batches in got]
    return (max(work) - min(work)) / statistics.mean(work)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seeds", type=int, default=20)
    mini_batches = [response_lengths(seed) for seed in range(parser.parse_args().seeds)]
    print(f"{'work':22} micro-batches  efficiency  spread  spread by tokens  ms")
    for name, cost in COSTS.items():
        plans, seconds = [], []
        for lengths in mini_batches:
            start = time.perf_counter()
            plans.append(plan(lengths, budget=BUDGET, ranks=RANKS, cost=cost))
            seconds.append(time.perf_counter() - start)
        counts = sorted({len(got[0]) for got in plans})
        lowest = min(efficiency(*pair) for pair in zip(mini_batches, plans, strict=True))
        largest = max(spread(*pair, cost) for pair in zip(mini_batches, plans, strict=True))
        unaware = max(spread(n, plan(n, budget=BUDGET, ranks=RANKS), cost) for n in mini_batches)
        share = 1 - cost.per_token * 4096 / cost(4096)
        print(
            f"{name + f' ({share:.0%})':22} {' to '.join(map(str, counts)):>13} {lowest:11.3f} {largest:7.2%}"
            f" {unaware:17.2%} {1e3 * statistics.median(seconds):3.0f}"
        )


if __name__ == "__main__":
    main()

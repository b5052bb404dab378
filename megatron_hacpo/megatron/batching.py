"""Which sequences share a micro-batch, and on which data-parallel rank. No torch, no Megatron.

Invariants of `plan`:
1. Every sequence is in exactly one micro-batch of one rank.
2. Every rank has the same number of micro-batches (a pipeline needs it), at least one.
3. A micro-batch holds at most `budget` tokens, unless it holds a single sequence longer than that.
4. The number of micro-batches per rank is the smallest multiple of `multiple_of` with room for what best-fit
   decreasing finds.
5. A micro-batch is empty only if there are fewer sequences than micro-batches on all ranks.
6. A rank's micro-batches descend in size: the m-th ones of all ranks, which run at the same time, are alike,
   and empty ones come last.
7. The result depends only on the arguments; within a micro-batch, sequences stand in their given order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MicroBatchPlan = list[list[list[int]]]
"""plan[rank][micro_batch] = indices of the sequences."""


@dataclass(frozen=True)
class Cost:
    """Work of a sequence of L tokens: per_token L + per_token_pair L^2. Only their ratio matters to a plan.

    per_token > 0, per_token_pair >= 0, both in the same unit.
    """

    per_token: float
    per_token_pair: float = 0.0

    def __call__(self, length: int) -> float:
        return (self.per_token + self.per_token_pair * length) * length

    @classmethod
    def of_model(
        cls,
        *,
        num_layers: int,
        hidden_size: int,
        num_attention_heads: int,
        num_query_groups: int,
        kv_channels: int,
        ffn_hidden_size: int,
        vocab_size: int,
        gated_linear_unit: bool = True,
    ) -> "Cost":
        """Forward FLOPs of a causal transformer, sizes named as in Megatron's TransformerConfig.

        A matrix of n weights costs 2 n per token: a multiplication and an addition each. Per layer and token,
        queries and output cost 4 hidden heads channels, keys and values 4 hidden groups channels, the MLP
        6 hidden ffn (4 without a gate); the vocabulary projection adds 2 hidden vocab. Scores and weighted
        values cost 2 heads channels each per layer and pair of a query and a key that it sees; causal
        attention has L^2 / 2 such pairs. Backward costs twice as much in both terms. Norms, biases, rotary
        embedding, softmax and router are left out.

        ffn_hidden_size: what one token passes through; with experts, moe_router_topk moe_ffn_hidden_size and
        the shared experts.
        """
        projections = 4 * hidden_size * kv_channels * (num_attention_heads + num_query_groups)
        mlp = (6 if gated_linear_unit else 4) * hidden_size * ffn_hidden_size
        return cls(
            per_token=num_layers * (projections + mlp) + 2 * hidden_size * vocab_size,
            per_token_pair=num_layers * 2 * num_attention_heads * kv_channels,
        )


TOKENS = Cost(per_token=1.0)
"""Work is the number of tokens."""


def plan(
    lengths: Sequence[int], *, budget: int, ranks: int, cost: Cost = TOKENS, multiple_of: int = 1
) -> MicroBatchPlan:
    """Pack the sequences of one mini-batch into micro-batches, work balanced over data-parallel ranks.

    lengths: tokens that each sequence occupies, at least 1, with the padding that parallelism asks for.
    Zig-zag context parallelism wants each a multiple of 2 cp, sequence parallelism the sum of a micro-batch
    on each context-parallel rank a multiple of tp. Sequences padded to multiples of 2 cp tp give both.
    budget: tokens of a micro-batch, over all of its context-parallel ranks.
    multiple_of: of the number of micro-batches; an interleaved pipeline wants a multiple of its size.
    """
    assert min(budget, ranks, multiple_of, *lengths) >= 1
    work = [cost(length) for length in lengths]
    # Best-fit decreasing: the fullest bin has the least of minus its tokens. What it uses are the first bins.
    tightest = _place(lengths, [-length for length in lengths], budget, bins=len(lengths))
    assert tightest is not None, "there is a bin for every sequence"
    used = sum(1 for content in tightest if content)
    bins = ranks * multiple_of * max(1, math.ceil(used / (ranks * multiple_of)))
    placed = _place(lengths, work, budget, bins) or _place(lengths, lengths, budget, bins)
    if placed is None:  # then there are more sequences than bins
        placed = tightest[:bins]
        for empty in placed[used:]:
            empty.append(max(placed, key=len).pop())
    return _deal(placed, lengths, work, ranks)


def _place(lengths: Sequence[int], work: Sequence[float], budget: int, bins: int) -> list[list[int]] | None:
    """Longest first, each into the bin with least work that has room (an empty one always has)."""
    content: list[list[int]] = [[] for _ in range(bins)]
    load = np.zeros(bins)
    free = np.full(bins, np.inf)
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = int(np.where(free >= lengths[index], load, np.inf).argmin())
        if free[best] < lengths[index]:
            return None
        content[best].append(index)
        load[best] += work[index]
        free[best] = min(free[best], budget) - lengths[index]
    return content


def _deal(
    placed: list[list[int]], lengths: Sequence[int], work: Sequence[float], ranks: int
) -> MicroBatchPlan:
    """Of the micro-batches next in size one to each rank, the most work to the rank with least so far."""
    tokens = [sum(lengths[i] for i in content) for content in placed]
    load = [sum(work[i] for i in content) for content in placed]
    # Share of the tokens plus share of the work: where micro-batches are equal in one, the other decides.
    all_tokens, all_work = sum(tokens), sum(load)
    size = [t * all_work + w * all_tokens for t, w in zip(tokens, load, strict=True)]
    by_size = sorted(range(len(placed)), key=lambda b: -size[b])
    dealt: MicroBatchPlan = [[] for _ in range(ranks)]
    done = [0.0] * ranks
    for start in range(0, len(placed), ranks):
        group = sorted(by_size[start : start + ranks], key=lambda b: -load[b])
        for rank, b in zip(sorted(range(ranks), key=done.__getitem__), group, strict=True):
            dealt[rank].append(sorted(placed[b]))
            done[rank] += load[b]
    return dealt

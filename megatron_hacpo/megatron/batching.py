"""Which sequences share a micro-batch, and on which data-parallel rank. Pure Python.

Invariants of `plan`:
1. Every sequence is in exactly one micro-batch of one rank.
2. Every rank has the same number of micro-batches (a pipeline needs it); some may be empty.
3. A micro-batch holds at most `budget` tokens, unless it holds a single sequence longer than that.
4. The number of micro-batches per rank is the smallest for which the greedy placement fits.
5. The result depends only on the arguments; within a micro-batch, sequences stand in their given order.
"""

from collections.abc import Sequence

MicroBatchPlan = list[list[list[int]]]
"""plan[rank][micro_batch] = indices of the sequences."""


def plan(lengths: Sequence[int], *, budget: int, ranks: int) -> MicroBatchPlan:
    """Pack sequences of the given token counts into equally many micro-batches on each of `ranks` ranks."""
    assert budget >= 1
    assert ranks >= 1
    count = max(1, -(-sum(lengths) // (budget * ranks)))
    while True:
        placed = _place(lengths, budget, ranks * count)
        if placed is not None:
            return [placed[rank * count : (rank + 1) * count] for rank in range(ranks)]
        count += 1


def _place(lengths: Sequence[int], budget: int, bins: int) -> list[list[int]] | None:
    """Longest first, each into the emptiest bin that has room (an empty bin always has)."""
    content: list[list[int]] = [[] for _ in range(bins)]
    load = [0] * bins
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        best = min(range(bins), key=lambda b: (load[b], b))
        if load[best] and load[best] + lengths[index] > budget:
            return None
        content[best].append(index)
        load[best] += lengths[index]
    return [sorted(c) for c in content]

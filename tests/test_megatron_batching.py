"""Micro-batch plans and packing."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_hacpo.megatron.batching import plan
from megatron_hacpo.megatron.packing import TokenSequence, pack


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    budget=st.integers(1, 120),
    ranks=st.integers(1, 5),
)
def test_plan_keeps_its_invariants(lengths: list[int], budget: int, ranks: int) -> None:
    got = plan(lengths, budget=budget, ranks=ranks)
    assert got == plan(lengths, budget=budget, ranks=ranks)
    assert len(got) == ranks
    assert len({len(micro_batches) for micro_batches in got}) == 1
    assert len(got[0]) >= 1
    flat = [row for micro_batches in got for rows in micro_batches for row in rows]
    assert sorted(flat) == list(range(len(lengths)))
    for micro_batches in got:
        for rows in micro_batches:
            assert rows == sorted(rows)
            assert len(rows) <= 1 or sum(lengths[row] for row in rows) <= budget


def test_plan_spreads_equal_work_over_ranks() -> None:
    assert plan([10] * 8, budget=40, ranks=2) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    assert plan([5, 30, 5], budget=20, ranks=1) == [[[1], [0, 2]]]
    assert plan([7], budget=20, ranks=3) == [[[0]], [[]], [[]]]


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_pack_lays_sequences_end_to_end() -> None:
    sequences = [
        TokenSequence(ids(1, 2, 3), ids(4, 5)),
        TokenSequence(ids(9), ids(9)),
        TokenSequence(ids(6), ids(7, 8)),
    ]
    micro = pack(1, [0, 2], sequences, torch.device("cpu"))
    assert micro.index == 1
    assert micro.rows == (0, 2)
    assert micro.tokens.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8]]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert micro.attention.cu_seqlens_q.tolist() == [0, 5, 8]
    assert micro.attention.max_seqlen_q == 5
    assert micro.attention.slots.tolist() == [0, 1, 2, 3, 4, 5, 6, 7]
    # Token p is predicted by the logits at p - 1: the last prompt token predicts the first response token.
    assert micro.predictors.tolist() == [2, 3, 5, 6]
    assert micro.targets.tolist() == [4, 5, 7, 8]
    assert micro.segments.tolist() == [0, 0, 1, 1]


def test_pack_of_nothing_is_a_sequence_without_a_response() -> None:
    micro = pack(0, [], [], torch.device("cpu"))
    assert micro.rows == ()
    assert micro.tokens.shape == (1, 2)
    assert micro.targets.shape == micro.predictors.shape == micro.segments.shape == (0,)

"""Packed per-sequence sums: layout, gradients, unassigned tokens, parts of a sequence, determinism."""

import pytest
import torch

from megatron_hacpo.algorithm.segments import pad_segments, segment_mean, segment_sum

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def test_padding_lays_out_rows() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    padded, lengths = pad_segments(values, torch.tensor([0, 0, 1, 3, 3, 3]), 4)
    assert padded.tolist() == [[1, 2, 0], [3, 0, 0], [0, 0, 0], [4, 5, 6]]
    assert lengths.tolist() == [2, 1, 0, 3]


def test_unassigned_tokens_may_hold_anything() -> None:
    values = torch.tensor([torch.inf, 1.0, 2.0, torch.nan, torch.nan, 4.0, -torch.inf])
    segments = torch.tensor([-1, 0, 0, -1, -1, 1, -1])
    assert segment_sum(values, segments, 2).tolist() == [3.0, 4.0]
    assert segment_mean(values, segments, 2).tolist() == [1.5, 4.0]


def test_sequence_without_tokens_gives_zero() -> None:
    assert segment_mean(torch.tensor([2.0]), torch.tensor([1]), 3).tolist() == [0.0, 2.0, 0.0]
    assert segment_mean(torch.empty(0), torch.empty(0, dtype=torch.int64), 2).tolist() == [0.0, 0.0]


def test_gradient_reaches_every_token_once() -> None:
    values = torch.tensor([1.0, 2.0, 3.0, 9.0], requires_grad=True)
    means = segment_mean(values, torch.tensor([0, 0, 1, -1]), 2)
    (means * torch.tensor([10.0, 100.0])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [5.0, 5.0, 100.0, 0.0]  # 10 / 2, 10 / 2, 100 / 1, none


def test_parts_of_a_sequence_add_up_to_its_mean() -> None:
    values, segments = torch.tensor([1.0, 2.0, 6.0, 5.0]), torch.tensor([0, 0, 0, 1])
    whole, lengths = segment_mean(values, segments, 2), torch.tensor([3, 1])
    left = segment_mean(values[:2], segments[:2], 2, lengths=lengths)
    right = segment_mean(values[2:], segments[2:], 2, lengths=lengths)
    assert left.tolist() == [1.0, 0.0]
    assert (left + right).tolist() == whole.tolist() == [3.0, 5.0]


@pytest.mark.parametrize("device", DEVICES)
def test_sums_match_a_loop_and_repeat_to_the_bit(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 400, (64,), generator=generator)
    segments = torch.repeat_interleave(torch.arange(64), lengths).to(device)
    values = torch.randn(len(segments), generator=generator).to(device)
    sums = segment_sum(values, segments, 64)
    expected = torch.stack([part.double().sum() for part in values.split(lengths.tolist())])
    torch.testing.assert_close(sums.double(), expected, rtol=0.0, atol=1e-4)
    assert all(torch.equal(segment_sum(values, segments, 64), sums) for _ in range(10))


@pytest.mark.parametrize("segments", [[1, 0], [0, 2]])
def test_wrong_layout_is_caught(segments: list[int]) -> None:
    with pytest.raises(AssertionError):
        pad_segments(torch.ones(2), torch.tensor(segments), 2)


def test_sums_are_float32_or_wider() -> None:
    with pytest.raises(AssertionError):
        segment_sum(torch.ones(2, dtype=torch.bfloat16), torch.tensor([0, 0]), 1)


def test_no_sequences_at_all_sum_to_nothing_and_keep_the_graph() -> None:
    values = torch.zeros(0, requires_grad=True)
    total = segment_sum(values, torch.zeros(0, dtype=torch.int64), 0)
    assert total.shape == (0,)
    total.sum().backward()

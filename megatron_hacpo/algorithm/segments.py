"""Per-sequence sums and means over packed micro-batches, deterministic on every device.

A packed micro-batch is a flat run of T tokens; `segments` says which sequence each token belongs to,
non-decreasing, with -1 anywhere for tokens of none (prompt, padding), whose values may be anything. Sums go
through a padded [n, Lmax] matrix rather than index_add, whose order of addition on CUDA changes between runs.
"""

import torch
from torch import Tensor


def drop_unassigned(segments: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    """`segments` and every `values` [T] without the tokens of no sequence: ([T'], [T'], ...)."""
    kept = segments >= 0
    return segments[kept], *(value[kept] for value in values)


def pad_segments(values: Tensor, segments: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Lay packed tokens out as one zero-padded row per sequence.

    values: [T]. segments: int64 [T], see the module. count: number of sequences n, some perhaps without a
        token; 0 on a rank that has nothing to say.
    Returns padded [n, Lmax] in the dtype of `values`, and lengths int64 [n]. Differentiable in `values`.
    """
    assert values.shape == segments.shape
    assert values.ndim == 1
    segments, values = drop_unassigned(segments, values)
    assert (segments[1:] >= segments[:-1]).all()
    assert (segments < count).all()
    rows = torch.arange(count, device=segments.device)
    starts = torch.searchsorted(segments, rows)
    lengths = torch.searchsorted(segments, rows, right=True) - starts
    columns = torch.arange(len(segments), device=segments.device) - starts[segments]
    longest = int(lengths.max()) if count else 0
    padded = values.new_zeros(count, longest)
    return padded.index_put((segments, columns), values), lengths


def segment_sum(values: Tensor, segments: Tensor, count: int) -> Tensor:
    """Sum of each sequence's tokens: [T] to [n], float32 or wider; a sequence without tokens gives 0."""
    assert values.dtype in (torch.float32, torch.float64)
    padded, _ = pad_segments(values, segments, count)
    return padded.sum(dim=1)


def segment_mean(values: Tensor, segments: Tensor, count: int, *, lengths: Tensor | None = None) -> Tensor:
    """Mean of each sequence's tokens: [T] to [n], float32 or wider; a sequence without tokens gives 0.

    lengths: int64 [n], to divide by when this rank holds only a part of each sequence (context parallelism):
        the parts then add up to the mean. Default: the number of tokens present.
    """
    assert values.dtype in (torch.float32, torch.float64)
    padded, present = pad_segments(values, segments, count)
    return padded.sum(dim=1) / (present if lengths is None else lengths).clamp(min=1)

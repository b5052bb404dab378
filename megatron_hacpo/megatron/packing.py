"""A micro-batch as the model sees it: sequences end to end in one row, and where their responses lie."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_hacpo.megatron.layers import PackedSequences


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and a response in the learner's tokens, int32 [p] and int32 [l], both non-empty."""

    prompt_ids: np.ndarray
    response_ids: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


@dataclass(frozen=True)
class PackedMicroBatch:
    """index: its place among this data-parallel rank's micro-batches.
    rows: the sequences' indices in their mini-batch, [n].
    tokens: int64 [1, t]. positions: int64 [1, t]. attention: their boundaries, for Megatron.
    predictors: int64 [r], the positions whose logits predict the response tokens `targets`, int64 [r].
    segments: int64 [r], the sequence (0 .. n-1) of each response token, non-decreasing.
    """

    index: int
    rows: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PackedSequences
    predictors: torch.Tensor
    targets: torch.Tensor
    segments: torch.Tensor


# What a rank with nothing to say computes so that it joins every collective: two tokens, no response.
_EMPTY = TokenSequence(np.zeros(2, np.int32), np.zeros(0, np.int32))


def pack(
    index: int, rows: Sequence[int], sequences: Sequence[TokenSequence], device: torch.device
) -> PackedMicroBatch:
    """Lay the sequences `rows` end to end. No rows: one placeholder sequence without a response."""
    chosen = [sequences[row] for row in rows] or [_EMPTY]
    lengths = np.array([len(s) for s in chosen])
    starts = np.concatenate([[0], np.cumsum(lengths)])
    positions = np.concatenate([np.arange(n) for n in lengths])
    predictors = np.concatenate(
        [
            start + len(s.prompt_ids) - 1 + np.arange(len(s.response_ids))
            for start, s in zip(starts, chosen, strict=False)
        ]
    )
    longest = int(lengths.max())
    slots = np.repeat(np.arange(len(chosen)) * longest, lengths) + positions

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    boundaries = tensor(starts, torch.int32)
    return PackedMicroBatch(
        index=index,
        rows=tuple(rows),
        tokens=tensor(np.concatenate([np.concatenate([s.prompt_ids, s.response_ids]) for s in chosen]))[None],
        positions=tensor(positions)[None],
        attention=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            slots=tensor(slots),
        ),
        predictors=tensor(predictors),
        targets=tensor(np.concatenate([s.response_ids for s in chosen])),
        segments=tensor(np.repeat(np.arange(len(chosen)), [len(s.response_ids) for s in chosen])),
    )

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
class Division:
    """How the tokens of a micro-batch are divided over ranks.

    context: ranks that each hold a 2 context-th of every sequence's beginning and the one as far from its end
    (of causal attention both together are as much work on every rank), and this rank among them.
    sequence: into how many parts a rank's tokens are divided by sequence parallelism.
    """

    context: int = 1
    context_rank: int = 0
    sequence: int = 1

    def padded(self, length: int) -> int:
        """Tokens that a sequence occupies."""
        multiple = 2 * self.context if self.context > 1 else 1
        return -(-length // multiple) * multiple


@dataclass(frozen=True)
class PackedMicroBatch:
    """index: its place among this data-parallel rank's micro-batches.
    rows: the sequences' indices in their mini-batch, [n].
    tokens: int64 [1, t], those that this context-parallel rank holds. positions: int64 [1, t].
    attention: the boundaries of all tokens, for Megatron.
    segments: int64 [r], the sequence (0 .. n-1) of each response token, non-decreasing.
    predictors: int64 [o], the positions among `tokens` whose hidden states predict the response tokens
    `targets`, int64 [o]; owned: int64 [o], which of the r they are (all, without context parallelism).
    """

    index: int
    rows: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    attention: PackedSequences
    segments: torch.Tensor
    predictors: torch.Tensor
    targets: torch.Tensor
    owned: torch.Tensor


# What a rank with nothing to say computes so that it joins every collective: two tokens, no response.
_EMPTY = TokenSequence(np.zeros(2, np.int32), np.zeros(0, np.int32))
_PADDING = 0


def pack(
    index: int,
    rows: Sequence[int],
    sequences: Sequence[TokenSequence],
    device: torch.device,
    division: Division = Division(),
) -> PackedMicroBatch:
    """Lay the sequences `rows` end to end. No rows: one placeholder sequence without a response.

    A sequence is padded at its end, where causal attention keeps the padding from every real token.
    """
    chosen = [sequences[row] for row in rows] or [_EMPTY]
    lengths = np.array([division.padded(len(s)) for s in chosen])
    while lengths.sum() // division.context % division.sequence:
        lengths[-1] += division.padded(1)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total, longest = int(starts[-1]), int(lengths.max())
    tokens = np.full(total, _PADDING, np.int64)
    for start, s in zip(starts, chosen, strict=False):
        tokens[start : start + len(s)] = np.concatenate([s.prompt_ids, s.response_ids])
    positions = np.concatenate([np.arange(n) for n in lengths])
    predictors = np.concatenate(
        [
            start + len(s.prompt_ids) - 1 + np.arange(len(s.response_ids))
            for start, s in zip(starts, chosen, strict=False)
        ]
    )
    targets = np.concatenate([s.response_ids for s in chosen])

    order = _rank_by_rank(starts, lengths, division.context)  # the tokens as the ranks hold them
    held = total // division.context
    own = slice(division.context_rank * held, (division.context_rank + 1) * held)
    place = np.empty(total, np.int64)
    place[order] = np.arange(total)
    owned = np.flatnonzero(place[predictors] // held == division.context_rank)
    slots = np.repeat(np.arange(len(chosen)) * longest, lengths) + positions

    def tensor(values: np.ndarray, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device=device, dtype=dtype)

    boundaries = tensor(starts, torch.int32)
    return PackedMicroBatch(
        index=index,
        rows=tuple(rows),
        tokens=tensor(tokens[order[own]])[None],
        positions=tensor(positions[order[own]])[None],
        attention=PackedSequences(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            slots=tensor(slots[order]),
        ),
        segments=tensor(np.repeat(np.arange(len(chosen)), [len(s.response_ids) for s in chosen])),
        predictors=tensor(place[predictors[owned]] - own.start),
        targets=tensor(targets[owned]),
        owned=tensor(owned),
    )


def _rank_by_rank(starts: np.ndarray, lengths: np.ndarray, context: int) -> np.ndarray:
    """The tokens in the order of the context-parallel ranks that hold them, int64 [t].

    Rank c of C holds, of every sequence cut into 2 C chunks, chunk c and chunk 2 C - 1 - c, as Megatron's
    rotary embedding and TransformerEngine expect.
    """
    if context == 1:
        return np.arange(starts[-1])
    pieces = []
    for rank in range(context):
        for start, length in zip(starts, lengths, strict=False):
            chunk = length // (2 * context)
            for number in (rank, 2 * context - 1 - rank):
                pieces.append(start + number * chunk + np.arange(chunk))
    return np.concatenate(pieces)

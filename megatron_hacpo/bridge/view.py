"""A response in a learner's own tokens, or the reason why the learner cannot use it."""

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from megatron_hacpo.bridge.text import UnrepresentableTextError
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Trajectory, unpack_ids

DropReason = Literal["empty", "broken_text", "unrepresentable", "too_long"]
DROP_REASONS: tuple[DropReason, ...] = get_args(DropReason)


@dataclass(frozen=True)
class TrainingView:
    """A response in one learner's tokens: int32 [L], L >= 1, a stop token included where it stopped."""

    response_ids: np.ndarray

    def __post_init__(self) -> None:
        assert self.response_ids.dtype == np.int32
        assert self.response_ids.ndim == 1
        assert len(self.response_ids) >= 1


@dataclass(frozen=True)
class Dropped:
    """A response that the learner does not train on; its reward still counts.

    empty: no tokens. broken_text: bytes cut inside a character. unrepresentable: the learner's vocabulary
    cannot spell the text. too_long: more than the learner's limit.
    """

    reason: DropReason


def own_view(
    token_ids: np.ndarray, *, finish_reason: Literal["stop", "length"], keep_stop: bool = True
) -> TrainingView | Dropped:
    """The learner's own response int32 [L] as sampled, never re-encoded."""
    stopped = finish_reason == "stop"
    ids = token_ids[:-1] if stopped and not keep_stop else token_ids
    return TrainingView(ids.astype(np.int32)) if len(ids) else Dropped("empty")


def cross_view(
    trajectory: Trajectory,
    source_fingerprint: str,
    learner: AgentTokenizer,
    *,
    max_tokens: int,
    ids: Literal["auto", "never"] = "auto",
    over_long: Literal["drop", "truncate"] = "drop",
    keep_stop: bool = True,
) -> TrainingView | Dropped:
    """Another agent's response in the learner's tokens, at most `max_tokens` with the stop token.

    ids: "auto" uses the sampled ids between equal tokenizers, "never" re-encodes the text always.
    over_long: "truncate" cuts instead of dropping. keep_stop: False leaves the stop token out.
    """
    if not trajectory.valid_text:
        return Dropped("broken_text")
    same_tokens = ids == "auto" and source_fingerprint == learner.fingerprint
    stopped = trajectory.finish_reason == "stop"
    if same_tokens and trajectory.token_ids is not None:
        response = unpack_ids(trajectory.token_ids)
        sampled_stop = int(response[-1]) if stopped else None
        response = response[:-1] if stopped else response
    else:
        try:
            response = learner.encode_response(trajectory.text)
        except UnrepresentableTextError:
            return Dropped("unrepresentable")
        sampled_stop = None
    if stopped and keep_stop:
        # A stop token that this learner's engine does not stop at must not be taught.
        stop = sampled_stop if sampled_stop in learner.stop_ids else learner.stop_id
        response = np.append(response, np.int32(stop))
    if len(response) == 0:
        return Dropped("empty")
    if len(response) > max_tokens:
        if over_long == "drop":
            return Dropped("too_long")
        response = response[:max_tokens]
    return TrainingView(response)

"""An agent's own responses of one step, from the engine to the trainer's log-probs."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np
import torch

from megatron_hacpo.algorithm.minibatch import MiniBatch
from megatron_hacpo.algorithm.objective import mean_log_prob
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Trajectory, pack_ids, unpack_ids
from megatron_hacpo.bridge.view import Dropped, own_view
from megatron_hacpo.megatron.batching import MicroBatchPlan
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import LogProbs, Policy
from megatron_hacpo.reward.base import Reason
from megatron_hacpo.rollout.base import Response


class OwnResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A sampled response as the leader tells it to its ranks.

    token_ids: int32 bytes. log_probs: float32 bytes, the engine's. reward: None = no valid reward.
    failure: why the verifier failed on it.
    """

    token_ids: bytes
    log_probs: bytes
    finish_reason: Literal["stop", "length"]
    text: str
    valid_text: bool
    reward: float | None
    failure: Reason | None = None

    @property
    def length(self) -> int:
        return len(self.token_ids) // 4


class Sampled(msgspec.Struct, frozen=True):
    """A step's responses before the trainer has seen them.

    prompts: `hash_prompts` of the step's batch. prompt_ids: int32 bytes of each prompt as the engine got it.
    responses: prompt-major.
    """

    prompts: str
    prompt_ids: list[bytes]
    responses: list[OwnResponse]


@dataclass(frozen=True)
class OwnBlock:
    """One own mini-batch, laid out once for its log-probs and its update.

    rows: indices of its usable responses in the step's own responses, [n]; the other fields follow `rows`.
    counts: int64 [n] tokens. log_probs: under the weights that sampled. reference: under the frozen ones.
    dropped: why the others are unusable.
    """

    rows: list[int]
    sequences: list[TokenSequence]
    plan: MicroBatchPlan
    counts: torch.Tensor
    log_probs: LogProbs
    reference: LogProbs | None
    dropped: Counter[str]

    @property
    def mean_log_probs(self) -> torch.Tensor:
        """float32 [n], computed as `importance_ratio` computes the new side."""
        return mean_log_prob(self.log_probs.sums, self.counts)


@dataclass(frozen=True)
class OwnRollouts:
    """responses: prompt-major, `group` per prompt. blocks: one per own mini-batch, in batch order."""

    prompt_ids: list[np.ndarray]
    responses: list[OwnResponse]
    group: int
    blocks: list[OwnBlock]

    def trajectories(self, *, with_ids: bool) -> list[Trajectory]:
        """The responses as they go to the other agents. An unusable one carries a mean log-prob of 0."""
        means = dict.fromkeys(range(len(self.responses)), 0.0)
        for block in self.blocks:
            means.update(zip(block.rows, block.mean_log_probs.tolist(), strict=True))
        return [
            Trajectory(
                prompt=row // self.group,
                text=r.text,
                valid_text=r.valid_text,
                reward=r.reward,
                finish_reason=r.finish_reason,
                token_count=r.length,
                mean_log_prob=means[row],
                token_ids=r.token_ids if with_ids else None,
            )
            for row, r in enumerate(self.responses)
        ]


def own_response(response: Response, tokenizer: AgentTokenizer) -> OwnResponse:
    """The engine's response with its text, not scored yet."""
    text, valid = tokenizer.decode_response(response.token_ids)
    return OwnResponse(
        token_ids=pack_ids(response.token_ids),
        log_probs=response.log_probs.astype("<f4").tobytes(),
        finish_reason=response.finish_reason,
        text=text,
        valid_text=valid,
        reward=None,
    )


def old_log_probs(
    policy: Policy,
    *,
    sampled: Sampled,
    group: int,
    minibatches: Sequence[MiniBatch],
    keep_stop: bool,
    with_reference: bool,
    with_entropy: bool = False,
) -> OwnRollouts:
    """Log-probs of the own responses under the weights that sampled them, mini-batch by mini-batch.

    The micro-batch plan made here is the one that the update uses: the same shapes in the same order through
    the same forward pass, which is what makes own ratios exactly 1 at the first update.
    """
    prompt_ids = [unpack_ids(ids) for ids in sampled.prompt_ids]
    responses = sampled.responses
    laid_out = []
    for minibatch in minibatches:
        rows, sequences, dropped = [], [], Counter[str]()
        for row in range(minibatch.prompt_start * group, minibatch.prompt_stop * group):
            response = responses[row]
            view = own_view(
                unpack_ids(response.token_ids), finish_reason=response.finish_reason, keep_stop=keep_stop
            )
            if isinstance(view, Dropped):
                dropped[view.reason] += 1
            else:
                rows.append(row)
                sequences.append(TokenSequence(prompt_ids[row // group], view.response_ids))
        laid_out.append((rows, sequences, policy.plan(sequences), dropped))
    old = [policy.log_probs(sequences, plan, with_entropy=with_entropy) for _, sequences, plan, _ in laid_out]
    reference: list[LogProbs | None] = [None] * len(laid_out)
    if with_reference:
        with policy.reference_weights():
            reference = [policy.log_probs(sequences, plan) for _, sequences, plan, _ in laid_out]
    blocks = [
        OwnBlock(
            rows=rows,
            sequences=sequences,
            plan=plan,
            counts=torch.tensor([len(s.response_ids) for s in sequences], dtype=torch.int64),
            log_probs=old[i],
            reference=reference[i],
            dropped=dropped,
        )
        for i, (rows, sequences, plan, dropped) in enumerate(laid_out)
    ]
    return OwnRollouts(prompt_ids, responses, group, blocks)

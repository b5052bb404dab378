"""What one learner makes of everybody's trajectories: capability, advantages, own and cross mini-batches."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megatron_hacpo.algorithm.advantage import AdvantageResult, advantages
from megatron_hacpo.algorithm.capability import CapabilityTracker, capability_ratio
from megatron_hacpo.algorithm.minibatch import MiniBatch, minibatch_order
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution
from megatron_hacpo.bridge.view import Dropped, cross_view
from megatron_hacpo.config import AlgorithmConfig, ExchangeConfig, RunConfig
from megatron_hacpo.learner.own import OwnBlock, OwnRollouts
from megatron_hacpo.megatron.packing import TokenSequence


@dataclass(frozen=True, kw_only=True)
class LearnerMiniBatch:
    """One update: responses of one source to a block of prompts, in the learner's tokens.

    place: source, prompts and m. rows: indices of the responses in the source's contribution, [n].
    counts: int64 [n] tokens of the learner's views. advantages: float64 [n]. old_means: [n], the source's
    mean log-probs. omega: factor of a cross response's gradient, omega(source, learner), 1 for own ones.
    nominal: what the objective divides by, usable or not. own: the block with the plan and the token-level
    old log-probs; None for a cross mini-batch.
    """

    place: MiniBatch
    rows: list[int]
    sequences: list[TokenSequence]
    counts: torch.Tensor
    advantages: torch.Tensor
    old_means: torch.Tensor
    omega: float
    nominal: int
    own: OwnBlock | None


@dataclass(frozen=True)
class StepBatch:
    """A learner's step. capability: P-hat by agent. advantages: of all responses, [P, R].
    dropped: own and cross responses that the learner cannot use, by reason. skipped: cross responses left out
    because their advantage is 0; crossing: all cross responses.
    """

    minibatches: list[LearnerMiniBatch]
    capability: dict[str, float]
    advantages: AdvantageResult
    dropped: Counter[str]
    skipped: int
    crossing: int


def build(
    pool: Sequence[Contribution],
    own: OwnRollouts,
    *,
    learner: int,
    step: int,
    tracker: CapabilityTracker,
    tokenizer: AgentTokenizer,
    config: RunConfig,
) -> StepBatch:
    """The learner's mini-batches of one step. `pool[learner]` is what `own` sent."""
    groups = [config.agents[c.agent].rollout.responses_per_prompt for c in pool]
    rewards = [reward_matrix(c, config.batch.prompts, group) for c, group in zip(pool, groups, strict=True)]
    tracker.update({c.agent: r for c, r in zip(pool, rewards, strict=True)})
    capability = {c.agent: tracker.capability(c.agent) for c in pool}
    mine = capability[pool[learner].agent]

    result = advantages(
        torch.cat(rewards, dim=1),
        torch.cat([torch.full((r.shape[1],), j) for j, r in enumerate(rewards)]),
        learner,
        torch.tensor([capability_ratio(mine, capability[c.agent]) for c in pool], dtype=torch.float64),
        capability_baseline=config.algorithm.capability_baseline,
        zero_equal_groups=config.algorithm.zero_equal_groups,
        baseline_guard=config.algorithm.baseline_guard,
        reward_range_unit=config.reward.range == (0.0, 1.0),
    )
    by_source = result.advantages.split(groups, dim=1)

    minibatches, skipped = [], 0
    dropped = sum((block.dropped for block in own.blocks), Counter[str]())
    order = _order(len(pool), learner, step, config)
    blocks = iter(own.blocks)
    for place in order:
        source = pool[place.source]
        block_advantages = by_source[place.source][place.prompt_start : place.prompt_stop].reshape(-1)
        if place.source == learner:
            minibatches.append(_own_minibatch(place, next(blocks), block_advantages, own.group))
        else:
            omega = _discrepancy(capability, source.agent, pool[learner].agent, config.algorithm)
            minibatch, reasons = _cross_minibatch(
                place,
                source,
                block_advantages,
                omega,
                own.prompt_ids,
                tokenizer,
                config.agents[pool[learner].agent].rollout.max_response_tokens,
                config.exchange,
            )
            minibatches.append(minibatch)
            dropped += reasons
            skipped += int((block_advantages == 0.0).sum())
    crossing = sum(r.numel() for j, r in enumerate(rewards) if j != learner)
    return StepBatch(minibatches, capability, result, dropped, skipped, crossing)


def own_minibatches(config: RunConfig) -> list[MiniBatch]:
    """The learner's own mini-batches: they depend on the prompt order alone, so they precede the exchange."""
    return minibatch_order(1, 0, 1, config.batch.prompts, config.batch.minibatch_prompts)


def reward_matrix(contribution: Contribution, prompts: int, group: int) -> torch.Tensor:
    """Rewards of one source, float64 [P, G_j], NaN = no valid reward.

    Raises ValueError unless there are `group` trajectories for each prompt, in prompt order.
    """
    if [t.prompt for t in contribution.trajectories] != [row // group for row in range(prompts * group)]:
        raise ValueError(
            f"agents.{contribution.agent}.rollout.responses_per_prompt: {group}: the agent sent other than "
            f"that many responses to each of {prompts} prompts ({len(contribution.trajectories)} in all); "
            "start all agents with one config"
        )
    values = [float("nan") if t.reward is None else t.reward for t in contribution.trajectories]
    return torch.tensor(values, dtype=torch.float64).reshape(prompts, group)


def _order(agents: int, learner: int, step: int, config: RunConfig) -> list[MiniBatch]:
    batch = config.batch
    return minibatch_order(
        agents, learner, step, batch.prompts, batch.minibatch_prompts, config.algorithm.alternate_minibatches
    )


def _discrepancy(
    capability: Mapping[str, float], source: str, learner: str, algorithm: AlgorithmConfig
) -> float:
    """omega(j, k): how much a source's responses weigh in the learner's gradient."""
    return (
        capability_ratio(capability[source], capability[learner]) if algorithm.discrepancy_gradient else 1.0
    )


def _own_minibatch(
    place: MiniBatch, block: OwnBlock, block_advantages: torch.Tensor, group: int
) -> LearnerMiniBatch:
    first = place.prompt_start * group
    return LearnerMiniBatch(
        place=place,
        rows=block.rows,
        sequences=block.sequences,
        counts=block.counts,
        advantages=block_advantages[[row - first for row in block.rows]],
        old_means=block.mean_log_probs,
        omega=1.0,
        nominal=len(block_advantages),
        own=block,
    )


def _cross_minibatch(
    place: MiniBatch,
    source: Contribution,
    block_advantages: torch.Tensor,
    omega: float,
    prompt_ids: Sequence[np.ndarray],
    tokenizer: AgentTokenizer,
    max_tokens: int,
    exchange: ExchangeConfig,
) -> tuple[LearnerMiniBatch, Counter[str]]:
    """Unusable responses are counted, and those without a signal left out: they would add exactly nothing."""
    group = len(block_advantages) // (place.prompt_stop - place.prompt_start)
    first = place.prompt_start * group
    rows, sequences, dropped = [], [], Counter[str]()
    for row, advantage in enumerate(block_advantages.tolist()):
        trajectory = source.trajectories[first + row]
        view = cross_view(
            trajectory,
            source.tokenizer,
            tokenizer,
            max_tokens=max_tokens,
            ids=exchange.ids,
            over_long=exchange.over_long,
            keep_stop=exchange.keep_stop,
        )
        if isinstance(view, Dropped):
            dropped[view.reason] += 1
        elif advantage != 0.0:
            rows.append(row)
            sequences.append(TokenSequence(prompt_ids[trajectory.prompt], view.response_ids))
    minibatch = LearnerMiniBatch(
        place=place,
        rows=[first + row for row in rows],
        sequences=sequences,
        counts=torch.tensor([len(s.response_ids) for s in sequences], dtype=torch.int64),
        advantages=block_advantages[rows],
        old_means=torch.tensor(
            [source.trajectories[first + row].mean_log_prob for row in rows], dtype=torch.float64
        ),
        omega=omega,
        nominal=len(block_advantages),
        own=None,
    )
    return minibatch, dropped

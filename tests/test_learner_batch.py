"""What a learner makes of a pool, with everything that can be missing or unusable in it."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from learner_steps import make_policy, other_contribution, own_rollouts, pair_config

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution
from megatron_hacpo.config import RunConfig
from megatron_hacpo.learner.batch import LearnerMiniBatch, StepBatch, build, reward_matrix
from megatron_hacpo.learner.metrics import batch_metrics, response_samples, rollout_metrics, update_metrics
from megatron_hacpo.learner.own import OwnRollouts
from megatron_hacpo.learner.update import has_signal, update
from megatron_hacpo.megatron.batching import MicroBatchPlan
from megatron_hacpo.megatron.policy import LogProbs, Policy
from megatron_hacpo.megatron.runtime import World


@pytest.fixture(scope="module")
def config() -> RunConfig:
    return pair_config()


@pytest.fixture(scope="module")
def policy(config: RunConfig, world: World) -> Policy:
    policy = make_policy(config, "A", world)
    policy.advance_learning_rate()
    return policy


@pytest.fixture(scope="module")
def tokenizer(config: RunConfig) -> AgentTokenizer:
    return AgentTokenizer.load(config.agents["A"].model)


@pytest.fixture
def own(config: RunConfig, policy: Policy, tokenizer: AgentTokenizer) -> OwnRollouts:
    return own_rollouts(config, policy, tokenizer, step=1)


def pool_of(own: OwnRollouts, tokenizer: AgentTokenizer, other: Contribution) -> list[Contribution]:
    mine = Contribution(
        generation=0,
        step=1,
        agent="A",
        tokenizer=tokenizer.fingerprint,
        prompts="",
        trajectories=own.trajectories(with_ids=True),
    )
    return [mine, other]


def changed(contribution: Contribution, rows: list[int], **values: object) -> Contribution:
    """The contribution with fields of some of its trajectories replaced."""
    trajectories = [
        msgspec.structs.replace(t, **values) if row in rows else t
        for row, t in enumerate(contribution.trajectories)
    ]
    return msgspec.structs.replace(contribution, trajectories=trajectories)


def build_pool(
    config: RunConfig, pool: list[Contribution], own: OwnRollouts, tokenizer: AgentTokenizer
) -> StepBatch:
    return build(
        pool, own, learner=0, step=1, tracker=CapabilityTracker(), tokenizer=tokenizer, config=config
    )


def test_mini_batches_are_pure_and_divide_by_the_nominal_count(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    batch = build_pool(config, pool_of(own, tokenizer, other_contribution(config, "B", 1)), own, tokenizer)
    assert [(mb.place.source, mb.place.prompt_start, mb.place.m) for mb in batch.minibatches] == [
        (0, 0, 0),
        (0, 4, 1),
        (1, 0, 2),
        (1, 4, 3),
    ]
    assert [mb.nominal for mb in batch.minibatches] == [16] * 4
    assert [mb.own is not None for mb in batch.minibatches] == [True, True, False, False]
    assert [len(mb.sequences) for mb in batch.minibatches[:2]] == [16, 16]
    assert batch.crossing == 32


def test_unusable_responses_keep_their_reward_and_are_counted(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    other = other_contribution(config, "B", 1)
    whole = build_pool(config, pool_of(own, tokenizer, other), own, tokenizer)
    spoiled = changed(other, [0], text="(+1\ufffd", valid_text=False)
    spoiled = changed(spoiled, [1], text="(" + "+1" * 50 + ")")
    spoiled = changed(spoiled, [2], text="", finish_reason="length", token_count=0, mean_log_prob=0.0)
    spoiled = changed(spoiled, [3], text="no such letters")
    got = build_pool(config, pool_of(own, tokenizer, spoiled), own, tokenizer)
    assert got.dropped == Counter(broken_text=1, too_long=1, empty=1, unrepresentable=1)
    assert torch.equal(got.advantages.advantages, whole.advantages.advantages)
    assert got.capability == whole.capability
    cross, before = got.minibatches[2], whole.minibatches[2]
    assert cross.rows == before.rows[4:]
    assert cross.nominal == before.nominal == 16
    metrics = batch_metrics(got, pool_of(own, tokenizer, spoiled), 0)
    assert metrics["bridge/dropped"] == 4.0
    assert metrics["bridge/dropped/too_long"] == 1.0


def test_a_stop_token_alone_is_trained_on_as_one_stop_token(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    other = changed(other_contribution(config, "B", 1), [1], text="", token_count=1, reward=0.0)
    batch = build_pool(config, pool_of(own, tokenizer, other), own, tokenizer)
    assert batch.dropped == Counter()
    cross = batch.minibatches[2]
    assert cross.sequences[cross.rows.index(1)].response_ids.tolist() == [tokenizer.stop_id]


def test_a_missing_reward_is_in_no_mean_and_teaches_nobody(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    other = changed(other_contribution(config, "B", 1), [0, 1, 5], reward=None)
    batch = build_pool(config, pool_of(own, tokenizer, other), own, tokenizer)
    rewards = reward_matrix(other, 8, 4)
    assert torch.isnan(rewards).sum() == 3
    valid = [t.reward for t in other.trajectories if t.reward is not None]
    assert batch.capability["B"] == pytest.approx(sum(valid) / len(valid))
    assert batch.advantages.advantages[0, 4:6].tolist() == [0.0, 0.0]
    assert not {0, 1, 5} & set(batch.minibatches[2].rows)


def test_a_source_without_any_reward_does_not_move_its_capability(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    tracker = CapabilityTracker()
    other = other_contribution(config, "B", 1)
    pool = pool_of(own, tokenizer, other)
    build(pool, own, learner=0, step=1, tracker=tracker, tokenizer=tokenizer, config=config)
    before = tracker.capability("B")
    silent = changed(other, list(range(32)), reward=None)
    build([pool[0], silent], own, learner=0, step=2, tracker=tracker, tokenizer=tokenizer, config=config)
    assert tracker.capability("B") == before


def test_equal_rewards_give_no_signal_and_no_update(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer, policy: Policy
) -> None:
    other = changed(other_contribution(config, "B", 1), list(range(32)), reward=1.0)
    mine = pool_of(own, tokenizer, other)[0]
    batch = build_pool(config, [changed(mine, list(range(32)), reward=1.0), other], own, tokenizer)
    assert batch.advantages.equal_groups == 8
    assert not any(has_signal(mb, config.algorithm) for mb in batch.minibatches)
    before = [p.clone() for p in policy.parameters()]
    records = [update(policy, mb, config.algorithm) for mb in batch.minibatches]
    assert all(torch.equal(a, b) for a, b in zip(before, policy.parameters(), strict=True))
    metrics = update_metrics(records, kl_coef=0.0)
    assert metrics["updates/without_signal"] == 4
    assert metrics["grad_norm"] is None
    assert metrics["ratio/own/first_update_max_abs_dev"] is None


def test_kl_alone_is_a_signal_for_own_responses_only(
    own: OwnRollouts, tokenizer: AgentTokenizer, config: RunConfig
) -> None:
    penalised = pair_config("algorithm.kl_coef=0.01")
    other = changed(other_contribution(config, "B", 1), list(range(32)), reward=1.0)
    mine = changed(pool_of(own, tokenizer, other)[0], list(range(32)), reward=1.0)
    batch = build_pool(penalised, [mine, other], own, tokenizer)
    assert [has_signal(mb, penalised.algorithm) for mb in batch.minibatches] == [True, True, False, False]


def test_zero_advantages_are_left_out_of_cross_mini_batches_alone(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer
) -> None:
    other = changed(other_contribution(config, "B", 1), [0, 1, 2, 3], reward=1.0)
    mine = changed(pool_of(own, tokenizer, other)[0], [0, 1, 2, 3], reward=1.0)
    batch = build_pool(config, [mine, other], own, tokenizer)
    assert batch.skipped == 4
    assert batch.minibatches[2].rows == list(range(4, 16))
    assert len(batch.minibatches[0].sequences) == 16


def test_a_ratio_that_is_not_finite_skips_the_update_and_leaves_no_nan(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer, policy: Policy
) -> None:
    batch = build_pool(config, pool_of(own, tokenizer, other_contribution(config, "B", 1)), own, tokenizer)
    poisoned = replace(
        batch.minibatches[2], old_means=torch.full_like(batch.minibatches[2].old_means, math.nan)
    )
    record = update(policy, poisoned, config.algorithm)
    assert record.computed
    assert not record.applied
    assert update_metrics([record], kl_coef=0.0)["updates/nonfinite"] == 1
    assert all(bool(p.isfinite().all()) for p in policy.parameters())


def test_pools_of_the_wrong_size_are_refused(config: RunConfig) -> None:
    other = other_contribution(config, "B", 1)
    short = msgspec.structs.replace(other, trajectories=other.trajectories[:-1])
    with pytest.raises(
        ValueError,
        match=r"agents.B.rollout.responses_per_prompt: 4: .* 8 prompts \(31 in all\)",
    ):
        reward_matrix(short, 8, 4)


def test_samples_show_what_the_step_trained_on(
    config: RunConfig, own: OwnRollouts, tokenizer: AgentTokenizer, world: World
) -> None:
    fresh = make_policy(config, "A", world)
    fresh.advance_learning_rate()
    pool = pool_of(own, tokenizer, other_contribution(config, "B", 1))
    batch = build_pool(config, pool, own, tokenizer)
    records = [update(fresh, mb, config.algorithm) for mb in batch.minibatches]
    prompts = [f"prompt {i}" for i in range(8)]
    rows = response_samples(1, prompts, pool, batch, records, 4)
    assert [row["source"] for row in rows] == ["A", "A", "B", "B"]
    for row, minibatch in zip(rows, batch.minibatches, strict=True):
        place = minibatch.rows[1 % len(minibatch.rows)]
        trajectory = pool[minibatch.place.source].trajectories[place]
        assert (row["text"], row["reward"]) == (trajectory.text, trajectory.reward)
        assert row["prompt"] == prompts[place // 4]
    assert rows[0]["ratio"] == 1.0


def test_rollout_metrics_count_valid_rewards(own: OwnRollouts) -> None:
    responses = [msgspec.structs.replace(r, reward=None) if i < 3 else r for i, r in enumerate(own.responses)]
    metrics = rollout_metrics(replace(own, responses=responses))
    assert metrics["reward/count"] == 29
    assert metrics["reward/invalid"] == 3
    assert metrics["reward/failed"] == 0
    assert metrics["reward/mean"] == pytest.approx(np.mean([r.reward for r in own.responses[3:]]))
    assert metrics["response/truncated_fraction"] == 0.0


def test_rollout_metrics_count_failures_by_reason(own: OwnRollouts) -> None:
    reasons = ["timeout", "timeout", "crash"]
    failing = [
        msgspec.structs.replace(r, reward=0.0, failure=reason)
        for r, reason in zip(own.responses[:3], reasons, strict=True)
    ]
    metrics = rollout_metrics(replace(own, responses=[*failing, *own.responses[3:]]))
    failed = {name: value for name, value in metrics.items() if name.startswith("reward/failed")}
    assert {name: value for name, value in failed.items() if value} == {
        "reward/failed": 3,
        "reward/failed/timeout": 2,
        "reward/failed/crash": 1,
    }
    assert len(failed) == 9  # also those that did not occur
    assert metrics["reward/invalid"] == 0  # the reward of a failure may be the lowest one


def test_three_agents_of_which_two_are_the_same_folder(world: World, tmp_path: Path) -> None:
    config = pair_config(
        "agents.C={model: examples/tiny/A}", "algorithm.delta=0.9", "batch.minibatch_prompts=8"
    )
    policy = make_policy(config, "A", world)
    tokenizer = AgentTokenizer.load(config.agents["A"].model)
    policy.advance_learning_rate()
    own = own_rollouts(config, policy, tokenizer, step=2)
    pool = [*pool_of(own, tokenizer, other_contribution(config, "B", 1)), other_contribution(config, "C", 2)]
    batch = build(
        pool, own, learner=0, step=2, tracker=CapabilityTracker(), tokenizer=tokenizer, config=config
    )
    assert [mb.place.source for mb in batch.minibatches] == [0, 2, 1]  # step 2 starts one source further
    records = [update(policy, mb, config.algorithm) for mb in batch.minibatches]
    assert all(record.applied for record in records)


VARIANTS = {
    "hacpo": [],
    "gspo": ["algorithm.name=gspo"],
    "grpo": ["algorithm.name=grpo", "algorithm.clip_low=0.02", "algorithm.clip_high=0.03"],
    "naive": ["algorithm.name=naive", "algorithm.alpha=0"],
    "no adv": ["algorithm.capability_baseline=false"],
    "no omega": ["algorithm.discrepancy_gradient=false"],
    "alpha 0": ["algorithm.alpha=0.0"],
    "alpha 3": ["algorithm.alpha=3.0"],
    "no stepwise": ["algorithm.delta_step=0.0"],
    "no clip": ["algorithm.cross_clip=none"],
    "no clamp": ["algorithm.log_ratio_clamp=null"],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_objective_of_every_method_equals_its_formula(variant: str, world: World) -> None:
    """Each update's objective, recomputed in numpy from the log-probs just before it."""
    config = pair_config(*VARIANTS[variant], "optimizer.lr=2e-3", "optimizer.warmup_steps=0")
    policy = make_policy(config, "A", world)
    policy.advance_learning_rate()
    tokenizer = AgentTokenizer.load(config.agents["A"].model)
    own = own_rollouts(config, policy, tokenizer, step=1)
    # The other agent is weaker, so that omega is not 1.
    other = changed(other_contribution(config, "B", 1), list(range(0, 32, 4)), reward=0.0)
    pool = pool_of(own, tokenizer, other)[: 2 if config.algorithm.share else 1]
    batch = build_pool(config, pool, own, tokenizer)
    assert len(batch.minibatches) == 2 * len(pool)
    for minibatch in batch.minibatches:
        plan = minibatch.own.plan if minibatch.own else policy.plan(minibatch.sequences)
        now = policy.log_probs(minibatch.sequences, plan)
        record = update(policy, minibatch, config.algorithm)
        expected = formula(config, minibatch, now, plan)
        assert record.tallies["loss/objective"][0] == pytest.approx(expected, abs=1e-6)


def formula(config: RunConfig, minibatch: LearnerMiniBatch, now: LogProbs, plan: MicroBatchPlan) -> float:
    """The objective as the methods' definitions have it, divided by the nominal number of responses."""
    a, A = config.algorithm, minibatch.advantages.numpy()
    s = np.exp(now.sums.numpy() / minibatch.counts.numpy() - minibatch.old_means.numpy())

    def surrogate(ratio: np.ndarray, advantage: np.ndarray) -> np.ndarray:
        return np.minimum(ratio * advantage, np.clip(ratio, 1 - a.clip_low, 1 + a.clip_high) * advantage)

    if minibatch.own is not None and a.name == "grpo":
        rows = [row for micro_batch in plan[0] for row in micro_batch]
        counts = minibatch.counts.numpy()[rows]
        ratios = np.exp(torch.cat(now.tokens).numpy() - torch.cat(minibatch.own.log_probs.tokens).numpy())
        per_token = surrogate(ratios, np.repeat(A[rows], counts))
        terms = [part.mean() for part in np.split(per_token, np.cumsum(counts)[:-1])]
    elif minibatch.own is not None or a.name == "naive":
        terms = surrogate(s, A)
    else:
        omega = minibatch.omega if a.discrepancy_gradient else 1.0
        assert (minibatch.omega != 1.0) == a.discrepancy_gradient
        lower = 1 - a.delta + minibatch.place.m * a.delta_step
        c = s if a.cross_clip == "none" else np.clip(s, lower, 1.0)
        terms = c * np.minimum(c, 1.0) ** a.alpha * omega * A
    return float(np.sum(terms)) / minibatch.nominal


def test_groups_of_different_size_keep_their_own_nominal_counts(world: World) -> None:
    config = pair_config("agents.B.rollout={responses_per_prompt: 6}")
    policy = make_policy(config, "A", world)
    tokenizer = AgentTokenizer.load(config.agents["A"].model)
    own = own_rollouts(config, policy, tokenizer, step=1)
    wider = pair_config("rollout.responses_per_prompt=6")
    pool = pool_of(own, tokenizer, other_contribution(wider, "B", 1))
    batch = build_pool(config, pool, own, tokenizer)
    assert batch.advantages.advantages.shape == (8, 10)
    assert [mb.nominal for mb in batch.minibatches] == [16, 16, 24, 24]
    expected = batch.advantages.advantages[:4, 4:].reshape(-1)
    assert torch.equal(batch.minibatches[2].advantages, expected[batch.minibatches[2].rows])


def test_without_stop_tokens_own_and_cross_views_lose_them_alike(world: World) -> None:
    config = pair_config("exchange.keep_stop=false", "algorithm.alternate_minibatches=true")
    policy = make_policy(config, "A", world)
    policy.advance_learning_rate()
    tokenizer = AgentTokenizer.load(config.agents["A"].model)
    own = own_rollouts(config, policy, tokenizer, step=1, spoiled_rows=(0,))
    assert own.blocks[0].dropped == Counter(empty=1)
    batch = build_pool(config, pool_of(own, tokenizer, other_contribution(config, "B", 1)), own, tokenizer)
    assert batch.dropped == Counter(empty=1)
    assert [mb.place.source for mb in batch.minibatches] == [0, 1, 0, 1]
    assert len(batch.minibatches[0].sequences) == 15
    assert batch.minibatches[0].nominal == 16
    for minibatch in batch.minibatches:
        assert all(s.response_ids[-1] != tokenizer.stop_id for s in minibatch.sequences)
    records = [update(policy, mb, config.algorithm) for mb in batch.minibatches]
    assert update_metrics(records, kl_coef=0.0)["ratio/own/first_update_max_abs_dev"] == 0.0

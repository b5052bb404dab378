"""Fixed HACPO steps on the tiny agents, for tests that compare layouts: no sampling, a made-up pool."""

import random
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution, Trajectory, pack_ids
from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.data import rule_task
from megatron_hacpo.learner.batch import build, own_minibatches
from megatron_hacpo.learner.own import OwnResponse, OwnRollouts, Sampled, old_log_probs
from megatron_hacpo.learner.update import UpdateRecord, update
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.runtime import World

ROOT = Path(__file__).parents[1]
PAIR = ROOT / "examples/tiny/pair.yaml"


def pair_config(*overrides: str) -> RunConfig:
    """The demo's configuration with absolute model paths, on few prompts."""
    models = [f"agents.{name}.model={ROOT / 'examples/tiny' / name}" for name in "AB"]
    small = ["batch.prompts=8", "batch.minibatch_prompts=4", "rollout.responses_per_prompt=4"]
    return load(PAIR, [*models, *small, *overrides])


def make_policy(config: RunConfig, name: str, world: World, *, microbatch_tokens: int = 512) -> Policy:
    """The trainable model of one agent of the configuration."""
    agent = config.agents[name]
    return Policy(
        Path(agent.model),
        world=world,
        dtype=getattr(torch, agent.dtype),
        optimizer=agent.optimizer,
        steps=config.run.steps,
        temperature=agent.rollout.temperature,
        microbatch_tokens=microbatch_tokens,
        keep_reference=config.algorithm.kl_coef > 0.0,
        recompute=agent.recompute,
        router_aux_loss_coef=agent.router_aux_loss_coef,
        offload=agent.placement.offload,
    )


def answers(step: int, prompts: int, group: int, salt: int) -> list[tuple[str, bool]]:
    """(text, right) per response: right and wrong rules, some of other lengths, every group mixed."""
    rng = random.Random(1000 * step + salt)
    texts = []
    for prompt in rule_task.batch(7, step, prompts):
        for column in range(group):
            right = column == 0 or (column < group - 1 and rng.random() < 0.4)
            text = prompt.answer
            if not right:
                text = "(" + rng.choice("+-") + "".join(rng.choices("0123456789", k=rng.randint(3, 7))) + ")"
            texts.append((text, text == prompt.answer))
    return texts


def own_rollouts(
    config: RunConfig,
    policy: Policy,
    tokenizer: AgentTokenizer,
    step: int,
    spoiled_rows: tuple[int, ...] = (),
) -> OwnRollouts:
    """Made-up own responses with the policy's real log-probs; spoiled ones are a stop token alone."""
    group = config.rollout.responses_per_prompt
    responses = []
    for row, (text, right) in enumerate(answers(step, config.batch.prompts, group, salt=1)):
        text, right = ("", False) if row in spoiled_rows else (text, right)
        ids = np.append(tokenizer.encode_response(text), np.int32(tokenizer.stop_id))
        responses.append(
            OwnResponse(
                token_ids=ids.astype("<i4").tobytes(),
                log_probs=np.zeros(len(ids), "<f4").tobytes(),
                finish_reason="stop",
                text=text,
                valid_text=True,
                reward=float(right),
            )
        )
    prompts = rule_task.batch(7, step, config.batch.prompts)
    return old_log_probs(
        policy,
        sampled=Sampled("", [pack_ids(tokenizer.render_prompt(p.messages)) for p in prompts], responses),
        group=group,
        minibatches=own_minibatches(config),
        keep_stop=config.exchange.keep_stop,
        with_reference=config.algorithm.kl_coef > 0.0,
    )


def other_contribution(config: RunConfig, name: str, step: int) -> Contribution:
    """What another agent sends: other texts, with mean log-probs near those of a sampler."""
    group = config.rollout.responses_per_prompt
    rng = random.Random(step)
    trajectories = [
        Trajectory(
            prompt=row // group,
            text=text,
            valid_text=True,
            reward=float(right),
            finish_reason="stop",
            token_count=len(text),
            mean_log_prob=-rng.uniform(0.1, 1.5),
        )
        for row, (text, right) in enumerate(answers(step, config.batch.prompts, group, salt=2))
    ]
    return Contribution(
        generation=0, step=step, agent=name, tokenizer="other", prompts="", trajectories=trajectories
    )


def run_steps(
    config: RunConfig,
    name: str,
    policy: Policy,
    steps: int,
    *,
    first: int = 1,
    tracker: CapabilityTracker | None = None,
) -> list[UpdateRecord]:
    """HACPO steps `first` to `steps` of agent `name` against a made-up other agent; all updates' records."""
    agent = config.agents[name]
    tokenizer = AgentTokenizer.load(agent.model)
    tracker = tracker or CapabilityTracker()
    other = next(n for n in config.names if n != name)
    records = []
    for step in range(first, steps + 1):
        policy.advance_learning_rate()
        own = own_rollouts(config, policy, tokenizer, step)
        mine = Contribution(
            generation=0,
            step=step,
            agent=name,
            tokenizer=tokenizer.fingerprint,
            prompts="",
            trajectories=own.trajectories(with_ids=True),
        )
        pool = {name: mine, other: other_contribution(config, other, step)}
        batch = build(
            [pool[n] for n in config.names],
            own,
            learner=config.names.index(name),
            step=step,
            tracker=tracker,
            tokenizer=tokenizer,
            config=config,
        )
        assert batch.dropped == Counter()
        records += [update(policy, minibatch, config.algorithm) for minibatch in batch.minibatches]
    return records

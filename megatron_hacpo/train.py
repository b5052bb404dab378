"""The loop: one process of one agent. All agents run the same one and meet only in the exchange."""

from functools import partial

from megatron_hacpo.agent import Agent
from megatron_hacpo.bootstrap import open_agent
from megatron_hacpo.config import RunConfig
from megatron_hacpo.learner.metrics import StepClock


def train(config: RunConfig, name: str, start: int = 0) -> None:
    """Train agent `name` for the run's steps after `start`; its peers are trained by their own processes."""
    run_step = sample_step if config.debug.rollout_only else train_step
    with open_agent(config, name, start) as agent:
        agent.sync_weights(step=start)
        if start == 0:
            agent.evaluate(step=0)
        step = start
        for step in range(start + 1, config.run.steps + 1):
            run_step(agent, step)
            if step == config.run.steps or (config.evaluation.every and step % config.evaluation.every == 0):
                agent.evaluate(step)
            agent.settle_checkpoint()
            if agent.stopping:
                break
        agent.settle_checkpoint(wait=True)
        agent.on_phase(step, "export")
        agent.export()


def train_step(agent: Agent, step: int) -> None:
    """One step of the algorithm, from prompts to new weights in the engine."""
    clock = StepClock(partial(agent.on_phase, step))
    agent.policy.advance_learning_rate()
    prompts = agent.source.batch(step)
    with clock("rollout"):
        sampled = agent.generate(prompts, step)
    with clock("reward"):
        scored = agent.score(sampled, step)
    with clock("logprob"):
        own = agent.old_log_probs(scored)
        gap = agent.check_engine(own)
    with clock("exchange"):
        pool = agent.exchange_trajectories(own, prompts, step)
    with clock("update"):
        batch = agent.build_batch(pool, own, step)
        records = [agent.update(minibatch, step) for minibatch in batch.minibatches]
    with clock("save"):
        agent.begin_checkpoint(step)
    with clock("sync"):
        agent.sync_weights(step)
    agent.report(step, prompts, own, pool, batch, records, {**gap, **clock.metrics()})


def sample_step(agent: Agent, step: int) -> None:
    """The part of a step that makes responses and rewards, and no training."""
    clock = StepClock(partial(agent.on_phase, step))
    prompts = agent.source.batch(step)
    with clock("rollout"):
        sampled = agent.generate(prompts, step)
    with clock("reward"):
        scored = agent.score(sampled, step)
    agent.look_for_stop()
    agent.report_samples(step, scored, clock.metrics())

"""The loop: one process of one agent. All agents run the same one and meet only in the exchange."""

from megatron_hacpo.agent import Agent
from megatron_hacpo.bootstrap import open_agent
from megatron_hacpo.config import RunConfig
from megatron_hacpo.learner.metrics import StepClock


def train(config: RunConfig, name: str) -> None:
    """Train agent `name` for the run's steps; its peers are trained by their own processes."""
    with open_agent(config, name) as agent:
        agent.sync_weights(step=0)
        agent.evaluate(step=0)
        for step in range(1, config.run.steps + 1):
            train_step(agent, step)
            if step == config.run.steps or (config.evaluation.every and step % config.evaluation.every == 0):
                agent.evaluate(step)
        agent.export()


def train_step(agent: Agent, step: int) -> None:
    """One step of the algorithm, from prompts to new weights in the engine."""
    clock = StepClock()
    agent.policy.advance_learning_rate()
    prompts = agent.source.batch(step)
    with clock("rollout"):
        sampled = agent.generate(prompts, step)
    with clock("reward"):
        scored = agent.score(sampled)
    with clock("logprob"):
        own = agent.old_log_probs(scored)
        gap = agent.check_engine(own)
    with clock("exchange"):
        pool = agent.exchange_trajectories(own, prompts, step)
    with clock("update"):
        batch = agent.build_batch(pool, own, step)
        records = [agent.update(minibatch, step) for minibatch in batch.minibatches]
    with clock("sync"):
        agent.sync_weights(step)
    agent.report(step, prompts, own, pool, batch, records, {**gap, **clock.metrics()})

"""Everything that one process of one agent needs, put together from the configuration."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from transformers.utils import logging as transformers_logging

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution, hash_prompts, pack_ids
from megatron_hacpo.config import AgentConfig, RunConfig, dump
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.source import PromptSource
from megatron_hacpo.evaluate import evaluate
from megatron_hacpo.inputs import load_tokenizers, open_prompts
from megatron_hacpo.learner import report
from megatron_hacpo.learner.batch import LearnerMiniBatch, StepBatch, build, own_minibatches
from megatron_hacpo.learner.own import OwnRollouts, Sampled, old_log_probs, own_response
from megatron_hacpo.learner.report import StepClock
from megatron_hacpo.learner.update import UpdateRecord, update
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.export import write_hf_folder
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.report.writer import MetricsWriter
from megatron_hacpo.reward import Verifier, get_verifier, score
from megatron_hacpo.rollout.base import Engine, Sampling
from megatron_hacpo.rollout.local import LocalEngine

STORE_VARIABLE = "HACPO_STORE"
"""host:port of the launcher's store, where agents meet."""

_SAMPLED = msgspec.msgpack.Decoder(Sampled)


@dataclass
class Agent:
    """One process of one agent. `engine` and `writer` live on the leader alone.

    index: the agent's place among the run's agents. sources: the agents whose responses it trains on, itself
    included; learner: its place among those.
    """

    config: RunConfig
    name: str
    index: int
    sources: list[str]
    world: runtime.World
    tokenizer: AgentTokenizer
    source: PromptSource
    verifier: Verifier
    policy: Policy
    exchange: Exchange
    engine: Engine | None
    writer: MetricsWriter | None
    tracker: CapabilityTracker
    nonfinite_updates: int = field(default=0)
    wide_gap_steps: int = field(default=0)

    @property
    def settings(self) -> AgentConfig:
        return self.config.agents[self.name]

    @property
    def learner(self) -> int:
        return self.sources.index(self.name)

    @property
    def folder(self) -> Path:
        """Where this agent's results go."""
        return self.config.path / self.name

    def generate(self, prompts: Sequence[Prompt], step: int) -> Sampled | None:
        """G responses per prompt with the engine's current weights; on the leader, None elsewhere."""
        if self.engine is None:
            return None
        rollout = self.settings.rollout
        sampling = Sampling(
            responses_per_prompt=rollout.responses_per_prompt,
            max_tokens=rollout.max_response_tokens,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            seed=_seed(self.config.run.seed, self.index, step),
        )
        prompt_ids = [self.tokenizer.render_prompt(p.messages) for p in prompts]
        responses = self.engine.generate(prompt_ids, sampling)
        return Sampled(
            [pack_ids(ids) for ids in prompt_ids], [own_response(r, self.tokenizer) for r in responses]
        )

    def score(self, prompts: Sequence[Prompt], sampled: Sampled | None) -> Sampled:
        """The leader's responses with their rewards, on every rank."""
        payload = None
        if sampled is not None:
            texts = [r.text for r in sampled.responses]
            reasons = [r.finish_reason for r in sampled.responses]
            result = score(prompts, texts, reasons, self.verifier, reward_range=self.config.reward.range)
            rewards = [None if np.isnan(reward) else float(reward) for reward in result.rewards]
            scored = [
                msgspec.structs.replace(r, reward=reward)
                for r, reward in zip(sampled.responses, rewards, strict=True)
            ]
            payload = msgspec.msgpack.encode(Sampled(sampled.prompt_ids, scored))
        return _SAMPLED.decode(self.world.broadcast(payload))

    def old_log_probs(self, scored: Sampled) -> OwnRollouts:
        """The responses with the trainer's log-probs, old and (for KL) reference."""
        return old_log_probs(
            self.policy,
            sampled=scored,
            group=self.settings.rollout.responses_per_prompt,
            minibatches=own_minibatches(self.config),
            keep_stop=self.config.exchange.keep_stop,
            with_reference=self.config.algorithm.kl_coef > 0.0,
        )

    def exchange_trajectories(
        self, own: OwnRollouts, prompts: Sequence[Prompt], step: int
    ) -> list[Contribution]:
        """Everybody's responses to the step's prompts; a method that shares nothing gets its own back."""
        contribution = Contribution(
            generation=0,
            step=step,
            agent=self.name,
            tokenizer=self.tokenizer.fingerprint,
            prompts=hash_prompts([p.id for p in prompts]),
            trajectories=own.trajectories(with_ids=self.config.exchange.ids == "auto"),
        )
        return self.exchange.all_gather(contribution if self.world.is_leader else None)

    def build_batch(self, pool: Sequence[Contribution], own: OwnRollouts, step: int) -> StepBatch:
        """Capability, advantages and mini-batches of this learner."""
        return build(
            pool,
            own,
            learner=self.learner,
            step=step,
            tracker=self.tracker,
            tokenizer=self.tokenizer,
            config=self.config,
        )

    def update(self, minibatch: LearnerMiniBatch, step: int) -> UpdateRecord:
        """One optimizer update; stops the run after too many in a row that were not finite."""
        record = update(self.policy, minibatch, self.config.algorithm)
        if record.computed:
            self.nonfinite_updates = 0 if record.applied else self.nonfinite_updates + 1
        if self.nonfinite_updates >= self.config.checks.max_nonfinite_updates:
            raise RuntimeError(
                f"agent {self.name}, step {step}: {self.nonfinite_updates} updates in a row had a loss or "
                f"gradient norm that is not finite; the step's responses are in "
                f"{self.config.path}/step_{step}/pool"
            )
        return record

    def sync_weights(self, step: int) -> None:
        """Give the engine the policy's weights."""
        stream = self.policy.export()
        if self.engine is not None:
            self.engine.update_weights(stream, step)
        else:
            for _ in stream:
                pass

    def report(
        self,
        step: int,
        prompts: Sequence[Prompt],
        own: OwnRollouts,
        pool: Sequence[Contribution],
        batch: StepBatch,
        records: Sequence[UpdateRecord],
        clock: StepClock,
    ) -> None:
        """Write the step's metrics; stops the run when engine and trainer stay apart."""
        gap = report.engine_gap(self.policy, own)
        if self.writer is not None:
            row = {
                "step": step,
                "lr": self.policy.learning_rate,
                **report.rollout_metrics(own),
                **report.batch_metrics(batch, pool, self.learner),
                **report.update_metrics(records, kl_coef=self.config.algorithm.kl_coef),
                **gap,
                "time/waiting": self.exchange.waited_seconds,
                **clock.metrics(),
            }
            self.writer.step(row)
            texts = [p.messages[-1]["content"] for p in prompts]
            count = self.config.report.rollout_samples
            self.writer.samples(report.response_samples(step, texts, pool, batch, records, count))
        mean_gap, limit = gap[report.GAP_MEAN], self.settings.max_logprob_gap
        wide = mean_gap is not None and not mean_gap <= limit  # not: NaN is wide
        self.wide_gap_steps = self.wide_gap_steps + 1 if wide else 0
        if self.wide_gap_steps >= self.config.checks.max_logprob_gap_steps:
            raise RuntimeError(
                f"agent {self.name}, step {step}: the engine's log-probs differ from the trainer's by "
                f"{mean_gap:.2g} in the mean; rollout.max_logprob_gap allows {limit:.2g} and was exceeded in "
                f"{self.wide_gap_steps} steps in a row"
            )

    def evaluate(self, step: int) -> None:
        """Accuracy on the held-out prompts, into eval.jsonl."""
        prompts = self.source.held_out()
        if self.engine is None or self.writer is None or not prompts:
            return
        result = evaluate(
            self.engine,
            prompts,
            agent=self.settings,
            tokenizer=self.tokenizer,
            verifier=self.verifier,
            reward_range=self.config.reward.range,
        )
        self.writer.evaluation({"step": step, **result})

    def export(self) -> None:
        """Write the trained agent as a Hugging Face folder."""
        stream = self.policy.export()
        if self.world.is_leader:
            write_hf_folder(Path(self.settings.model), stream, self.folder / "hf")
        else:
            for _ in stream:
                pass


@contextmanager
def open_agent(config: RunConfig, name: str) -> Iterator[Agent]:
    """Build this process's part of agent `name` and leave the world together with the others at the end.

    After an error nothing is waited for: the launcher ends the other processes.
    """
    transformers_logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    settings = config.agents[name]
    index = config.names.index(name)
    sources = config.names if config.algorithm.share else [name]
    timeout = timedelta(minutes=config.exchange.timeout_minutes)
    store = _launcher_store(timeout)
    if store is None and len(sources) > 1:
        raise ValueError(
            f"{STORE_VARIABLE}: not set, but {name} exchanges with {len(sources) - 1} other agents; "
            "start the run with `hacpo launch`, or set it to the host:port of the run's TCPStore"
        )
    layout = runtime.Layout(**settings.parallel.model_dump())
    world_store, rank = _world_store(store, name, layout.world_size)
    world = runtime.start(store=world_store, rank=rank, layout=layout, seed=config.run.seed, timeout=timeout)
    tokenizers = load_tokenizers(config)
    dtype = getattr(torch, settings.dtype)
    policy = Policy(
        Path(settings.model),
        world=world,
        dtype=dtype,
        optimizer=settings.optimizer,
        steps=config.run.steps,
        temperature=settings.rollout.temperature,
        microbatch_tokens=config.batch.microbatch_tokens,
        keep_reference=config.algorithm.kl_coef > 0.0,
    )
    engine = writer = None
    if world.is_leader:
        engine = LocalEngine(
            settings.model, dtype=dtype, device=world.device, stop_ids=tokenizers[name].stop_ids
        )
        config_file = config.path / "config.yaml"
        if not config_file.exists():  # the launcher writes it; torchrun and srun do not
            config_file.parent.mkdir(parents=True, exist_ok=True)
            config_file.write_text(dump(config), encoding="utf-8")
        writer = MetricsWriter(
            config.path / name, tensorboard=config.report.tensorboard, wandb=config.report.wandb
        )
    agent = Agent(
        config=config,
        name=name,
        index=index,
        sources=sources,
        world=world,
        tokenizer=tokenizers[name],
        source=open_prompts(config, tokenizers),
        verifier=get_verifier(config.reward.verifier),
        policy=policy,
        exchange=Exchange(
            store=store,
            agents=sources,
            me=name,
            pool_dir=config.path,
            keep=config.exchange.keep_steps,
            timeout=timeout,
            is_leader=world.is_leader,
            broadcast=world.broadcast,
        ),
        engine=engine,
        writer=writer,
        tracker=CapabilityTracker(config.algorithm.capability_window, config.algorithm.capability_metric),
    )
    yield agent
    agent.exchange.close()
    if writer is not None:
        writer.close()
    world.close()


def _launcher_store(timeout: timedelta) -> dist.Store | None:
    address = os.environ.get(STORE_VARIABLE)
    if address is None:
        return None
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timeout)


def _world_store(store: dist.Store | None, name: str, world_size: int) -> tuple[dist.Store, int]:
    """Where this agent's ranks meet, and this process's rank: the run's store, else torchrun's, else none."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if size != world_size:
        raise ValueError(
            f"agents.{name}.parallel: its sizes multiply to {world_size}, but {size} processes were started; "
            "start as many as the product, or change the sizes"
        )
    if store is not None:
        return dist.PrefixStore(f"world/{name}", store), rank
    if "MASTER_ADDR" in os.environ:
        env_store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size))
        return env_store, rank
    if size > 1:
        raise ValueError(
            f"MASTER_ADDR: not set, but agent {name} has {size} processes; use torchrun or `hacpo launch`"
        )
    return dist.HashStore(), rank


def _seed(*parts: int) -> int:
    """One independent seed per combination of parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])

"""Everything that one process of one agent needs, put together from the configuration."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution, hash_prompts, pack_ids
from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.source import PromptSource
from megatron_hacpo.evaluation.benchmark import Benchmark
from megatron_hacpo.evaluation.measure import measure, write_problems
from megatron_hacpo.hf.write import write_hf_folder
from megatron_hacpo.inputs import Verifiers
from megatron_hacpo.learner import metrics
from megatron_hacpo.learner.batch import LearnerMiniBatch, StepBatch, build, own_minibatches
from megatron_hacpo.learner.gradients import gradient_cosines
from megatron_hacpo.learner.metrics import Metrics
from megatron_hacpo.learner.own import OwnResponse, OwnRollouts, Sampled, old_log_probs, own_response
from megatron_hacpo.learner.update import UpdateRecord, update
from megatron_hacpo.learner.window import WindowWatch
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.report.writer import MetricsWriter
from megatron_hacpo.reward.base import RewardResult
from megatron_hacpo.reward.length import less_overlong
from megatron_hacpo.rollout.base import OnResponse, Response, Rollout, RolloutLost, Sampling, ignore

_SAMPLED = msgspec.msgpack.Decoder(Sampled)


@dataclass
class Agent:
    """One process of one agent. `verifiers` and `writer` live on the leader alone.

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
    benchmarks: list[Benchmark]
    verifiers: Verifiers | None
    policy: Policy
    exchange: Exchange
    rollout: Rollout
    writer: MetricsWriter | None
    tracker: CapabilityTracker
    window: WindowWatch
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
        """G responses per prompt with the engine's current weights; on the leader, None elsewhere.

        The verifier gets each as soon as it is complete; `score` waits for the rewards.
        """
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
        own: dict[int, OwnResponse] = {}

        def submit(index: int, response: Response) -> None:
            assert self.verifiers is not None
            own[index] = own_response(response, self.tokenizer)
            prompt = prompts[index // sampling.responses_per_prompt]
            self.verifiers.usual.submit(index, prompt, own[index].text, response.finish_reason)

        responses = self._responses(prompt_ids, sampling, on_response=submit)
        if responses is None:
            return None
        return Sampled([pack_ids(ids) for ids in prompt_ids], [own[index] for index in range(len(responses))])

    def _responses(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response] | None:
        """`Rollout.generate`; what has been trained is saved before the run ends without an engine."""
        try:
            return self.rollout.generate(prompts, sampling, on_response=on_response)
        except RolloutLost as error:
            self.export()
            raise RuntimeError(
                f"{error}; the weights of agent {self.name} are in {self.folder}/hf"
            ) from error

    def score(self, sampled: Sampled | None) -> Sampled:
        """What `generate` gave the leader, with its rewards, on every rank."""
        payload = None
        if sampled is not None:
            assert self.verifiers is not None
            result = self.verifiers.usual.collect()
            self._complain(result)
            shaped = self._shaped(result.rewards, sampled)
            rewards = [None if np.isnan(reward) else float(reward) for reward in shaped]
            failures = {failure.index: failure.reason for failure in result.failures}
            scored = [
                msgspec.structs.replace(r, reward=reward, failure=failures.get(index))
                for index, (r, reward) in enumerate(zip(sampled.responses, rewards, strict=True))
            ]
            payload = msgspec.msgpack.encode(Sampled(sampled.prompt_ids, scored))
        return _SAMPLED.decode(self.world.broadcast(payload))

    def _shaped(self, rewards: np.ndarray, sampled: Sampled) -> np.ndarray:
        """The rewards that are trained on: less for responses that come near the limit, if so configured."""
        settings = self.config.reward
        if settings.overlong_buffer == 0:
            return rewards
        return less_overlong(
            rewards,
            np.array([response.length for response in sampled.responses]),
            limit=self.settings.rollout.max_response_tokens,
            buffer=settings.overlong_buffer,
            penalty=settings.overlong_penalty,
            lowest=settings.range[0],
        )

    def old_log_probs(self, scored: Sampled) -> OwnRollouts:
        """The responses with the trainer's log-probs, old and (for KL) reference."""
        self.rollout.release()
        return old_log_probs(
            self.policy,
            sampled=scored,
            group=self.settings.rollout.responses_per_prompt,
            minibatches=own_minibatches(self.config),
            keep_stop=self.config.exchange.keep_stop,
            with_reference=self.config.algorithm.kl_coef > 0.0,
            with_entropy=self.config.report.entropy,
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
        every = self.config.report.gradient_cosine_every
        keep_gradient = every > 0 and step % every == 0
        record = update(self.policy, minibatch, self.config.algorithm, keep_gradient=keep_gradient)
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
        self.rollout.sync_weights(step)

    def check_engine(self, own: OwnRollouts) -> Metrics:
        """Engine's log-probs against the trainer's; stops the run when they stay apart. On every rank."""
        gap = metrics.engine_gap(self.policy, own)
        mean, limit = gap[metrics.GAP_MEAN], self.settings.max_logprob_gap
        wide = mean is not None and not mean <= limit  # not: NaN is wide
        self.wide_gap_steps = self.wide_gap_steps + 1 if wide else 0
        if self.wide_gap_steps >= self.config.checks.max_logprob_gap_steps:
            raise RuntimeError(
                f"agent {self.name}: the engine's log-probs are {mean:.2g} from the trainer's in the mean, "
                f"{self.wide_gap_steps} steps in a row above rollout.max_logprob_gap = {limit:.2g}"
            )
        return gap

    def report(
        self,
        step: int,
        prompts: Sequence[Prompt],
        own: OwnRollouts,
        pool: Sequence[Contribution],
        batch: StepBatch,
        records: Sequence[UpdateRecord],
        measured: Metrics,
    ) -> None:
        """Write the step's metrics and some of its responses; `measured` is what only the loop knows."""
        cosines = gradient_cosines(self.policy, batch, records, self.learner, self.sources)
        if self.writer is None:
            return
        for warning in self.window.look(batch, records, pool, self.learner):
            print(f"warning: agent {self.name}, step {step}: {warning}", file=sys.stderr)
        row = {
            "step": step,
            "epochs": self.source.epochs(step),
            "lr": self.policy.learning_rate,
            **metrics.rollout_metrics(own),
            **metrics.batch_metrics(batch, pool, self.learner),
            **metrics.update_metrics(records, kl_coef=self.config.algorithm.kl_coef),
            **metrics.edge_metrics(batch, records, pool, self.learner),
            **cosines,
            "time/waiting": self.exchange.waited_seconds,
            **measured,
        }
        self.writer.step(row)
        texts = [p.messages[-1]["content"] for p in prompts]
        count = self.config.report.rollout_samples
        self.writer.samples(metrics.response_samples(step, texts, pool, batch, records, count))

    def evaluate(self, step: int) -> None:
        """Held-out prompts and benchmarks, into eval.jsonl and eval/step_N/."""
        row: dict[str, float] = {}
        for benchmark in self.benchmarks:
            measured = measure(
                self._responses,
                benchmark,
                rollout=self.settings.rollout,
                tokenizer=self.tokenizer,
                verifiers=self.verifiers,
            )
            if measured is not None:
                self._complain(measured.scored)
                row |= measured.metrics()
                texts = self.config.evaluation.keep_responses
                write_problems(measured, self.folder / "eval" / f"step_{step}", texts=texts)
        if self.writer is not None and row:
            self.writer.evaluation({"step": step, **row})

    def _complain(self, result: RewardResult) -> None:
        if complaint := result.complaint():
            print(f"warning: agent {self.name}: {complaint}", file=sys.stderr, flush=True)

    def export(self) -> None:
        """Write the trained agent as a Hugging Face folder."""
        self.rollout.release()
        stream = self.policy.export()
        if self.world.is_leader:
            write_hf_folder(Path(self.settings.model), stream, self.folder / "hf")
        else:
            for _ in stream:
                pass


def _seed(*parts: int) -> int:
    """One independent seed per combination of parts."""
    return int(np.random.SeedSequence(parts).generate_state(1)[0])

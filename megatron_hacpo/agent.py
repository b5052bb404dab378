"""Everything that one process of one agent needs, put together from the configuration."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Contribution, hash_prompts, unpack_ids
from megatron_hacpo.checkpoint.saver import Saver
from megatron_hacpo.checkpoint.state import AgentState
from megatron_hacpo.checkpoint.steps import pool_folder
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
from megatron_hacpo.learner.own import OwnRollouts, Sampled, old_log_probs
from megatron_hacpo.learner.update import UpdateRecord, update
from megatron_hacpo.learner.window import WindowWatch
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.report.writer import MetricsWriter
from megatron_hacpo.rollout.base import OnResponse, Response, Rollout, RolloutLost, Sampling, ignore
from megatron_hacpo.sampler import Sampler, complain


@dataclass
class Agent:
    """One process of one agent. `verifiers` and `writer` live on the leader alone.

    index: the agent's place among the run's agents. sources: the agents whose responses it trained on last,
    itself included; learner: its place among those. on_phase: told the step and the phase that begins.
    asked_to_stop: whether the run is to end after a step, known to the leader. stopping: whether some agent
    was asked.
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
    sampler: Sampler
    saver: Saver
    rollout: Rollout
    writer: MetricsWriter | None
    tracker: CapabilityTracker
    window: WindowWatch
    on_phase: Callable[[int, str], None]
    asked_to_stop: Callable[[], bool]
    stopping: bool = field(default=False)
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
        """G responses per prompt with the engine's current weights; see `Sampler.generate`."""
        return self.sampler.generate(prompts, step, self.responses)

    def score(self, sampled: Sampled | None, step: int) -> Sampled:
        """What `generate` gave the leader, with its rewards, on every rank."""
        return self.sampler.score(sampled, step)

    def responses(
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
        contribution = None
        if self.world.is_leader:
            contribution = Contribution(
                generation=0,  # the exchange knows
                step=step,
                agent=self.name,
                tokenizer=self.tokenizer.fingerprint,
                prompts=hash_prompts([p.id for p in prompts]),
                trajectories=own.trajectories(with_ids=self.config.exchange.ids == "auto"),
                stop=self.asked_to_stop(),
            )
        pool = self.exchange.all_gather(contribution)
        self.sources = [c.agent for c in pool]
        self.stopping = any(c.stop for c in pool)
        return pool

    def look_for_stop(self) -> None:
        """For a step without an exchange: whether the run is to end after it, known to the leader."""
        asked = bytes([self.asked_to_stop()]) if self.world.is_leader else None
        self.stopping = self.world.broadcast(asked) == b"\1"

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
                f"{pool_folder(self.config.path, step)}"
            )
        return record

    def sync_weights(self, step: int) -> None:
        """Give the engine the policy's weights."""
        self.rollout.sync_weights(step)

    def check_engine(self, own: OwnRollouts) -> Metrics:
        """Engine's log-probs against the trainer's; stops the run when they stay apart. On every rank."""
        gap = metrics.engine_gap(self.policy, own)
        if self.config.debug.replay is not None:
            return gap  # to the engine of another run
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

    def report_samples(self, step: int, scored: Sampled, measured: Metrics) -> None:
        """Write the metrics of responses that nothing is trained on."""
        if self.writer is None:
            return
        ids = [unpack_ids(prompt) for prompt in scored.prompt_ids]
        own = OwnRollouts(ids, scored.responses, self.settings.rollout.responses_per_prompt, blocks=[])
        epochs = self.source.epochs(step)
        self.writer.step({"step": step, "epochs": epochs, **metrics.rollout_metrics(own), **measured})

    def evaluate(self, step: int) -> None:
        """Held-out prompts and benchmarks, into eval.jsonl and eval/step_N/."""
        self.on_phase(step, "evaluate")
        row: dict[str, float] = {}
        for benchmark in self.benchmarks:
            measured = measure(
                self.responses,
                benchmark,
                rollout=self.settings.rollout,
                tokenizer=self.tokenizer,
                verifiers=self.verifiers,
            )
            if measured is not None:
                complain(self.name, measured.scored)
                row |= measured.metrics()
                texts = self.config.evaluation.keep_responses
                write_problems(measured, self.folder / "eval" / f"step_{step}", texts=texts)
        if self.writer is not None and row:
            self.writer.evaluation({"step": step, **row})

    def begin_checkpoint(self, step: int) -> None:
        """Save what the step has made of the agent, if it is time."""
        if not self.saver.due(step, last=self.stopping or step == self.config.run.steps):
            return
        state = AgentState(
            agent=self.name,
            step=step,
            updates=self.policy.updates,
            capability=self.tracker.state_dict(),
            warned=self.window.warned,
            nonfinite_updates=self.nonfinite_updates,
            wide_gap_steps=self.wide_gap_steps,
            layout=self.settings.parallel.model_dump(),
        )
        self.saver.begin(self.policy, state)

    def take_on(self, state: AgentState, folder: Path) -> None:
        """Go on as the agent that saved `state` and `folder`."""
        self.policy.load_state(folder, updates=state.updates)
        self.window.hold_back(state.warned)
        self.nonfinite_updates = state.nonfinite_updates
        self.wide_gap_steps = state.wide_gap_steps

    def settle_checkpoint(self, *, wait: bool = False) -> None:
        """Complete the checkpoint that is being written, if it is there or `wait`; after the step's rows."""
        self.saver.settle(wait=wait)

    def export(self) -> None:
        """Write the trained agent as a Hugging Face folder."""
        self.rollout.release()
        stream = self.policy.export()
        if self.world.is_leader:
            write_hf_folder(Path(self.settings.model), stream, self.folder / "hf")
        else:
            for _ in stream:
                pass

"""Prompts and tokenizers of a run: the same for every agent and every process."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import AgentConfig, RewardConfig, RunConfig
from megatron_hacpo.data import rule_task
from megatron_hacpo.data.filters import without_duplicates, without_long
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.read import PromptFile, read_prompts
from megatron_hacpo.data.source import ListSource, PromptSource, TaskSource
from megatron_hacpo.reward.pool import RewardPool
from megatron_hacpo.reward.registry import Spec

_TOGETHER = 1000
"""Prompts that are tokenized at a time."""


def load_tokenizers(config: RunConfig) -> dict[str, AgentTokenizer]:
    """Every agent's tokenizer, by agent name."""
    return {name: _tokenizer(agent) for name, agent in config.agents.items()}


class Prompts:
    """The prompts that a configuration names, without those that are too long for any agent.

    Its methods read files. They raise ValueError, naming the prompt, for one that some agent would read as
    something else, for a file without prompts, and for fewer training prompts than a batch has.

    remarks: for people, a line each about what was left out so far.
    """

    def __init__(self, config: RunConfig, tokenizers: Mapping[str, AgentTokenizer]) -> None:
        self._config = config
        self._tokenizers = tokenizers
        self.remarks: list[str] = []

    def source(self) -> PromptSource:
        """The training prompts in their order."""
        data, size, seed = self._config.data, self._config.batch.prompts, self._config.run.seed
        if data.path is None:
            task = TaskSource(seed=seed, batch_size=size, digits=data.digits)
            self._refuse_long(task.batch(1))
            return task
        file = read_prompts(data.path, data.columns, split=data.split, bad_rows=data.bad_rows)
        prompts = self._known("data", file)
        if data.duplicates == "drop":
            prompts, disputed = without_duplicates(prompts)
            self._remark("data", len(file.prompts) - len(prompts), "prompts that occur again are left out")
            if disputed:
                first, other = disputed[0]
                self._remark(
                    "data",
                    len(disputed),
                    f"of them have another answer than the first time ({other.id}: {other.answer!r}, "
                    f"{first.id}: {first.answer!r})",
                )
        prompts = self._short_enough("data", prompts)
        if len(prompts) < size:
            left_out = f" ({'; '.join(self.remarks)})" if self.remarks else ""
            raise ValueError(
                f"batch.prompts: {size}: data.path has {len(prompts)} usable prompts{left_out}; lower "
                "batch.prompts or add prompts"
            )
        source = ListSource(prompts, seed=seed, batch_size=size)
        steps = len(prompts) / size
        self.remarks.append(f"data.path: {len(prompts)} prompts; an epoch is {steps:.4g} steps")
        return source

    def held_out(self) -> list[Prompt]:
        """Those of the task or of `evaluation.path`; none where there are none."""
        config = self._config
        evaluation, data = config.evaluation, config.data
        if evaluation.prompts == 0:
            return []
        if data.path is None:
            prompts = rule_task.held_out(evaluation.prompts, digits=data.digits)
            self._refuse_long(prompts)
            return prompts
        if evaluation.path is None:
            return []
        file = read_prompts(evaluation.path, data.columns, split=evaluation.split, bad_rows=data.bad_rows)
        prompts = self._known("evaluation", file)[: evaluation.prompts]
        return self._short_enough("evaluation", prompts)

    def benchmarks(self) -> dict[str, list[Prompt]]:
        """Those of each benchmark, by its name."""
        found = {}
        for name, benchmark in self._config.evaluation.benchmarks.items():
            key = f"evaluation.benchmarks.{name}"
            file = read_prompts(
                benchmark.path, benchmark.columns, split=benchmark.split, bad_rows=benchmark.bad_rows
            )
            prompts = self._known(key, file)[: benchmark.prompts]
            found[name] = self._short_enough(key, prompts, benchmark.max_prompt_tokens)
        return found

    def _known(self, key: str, file: PromptFile) -> list[Prompt]:
        if file.skipped:
            self._remark(key, len(file.skipped), f"bad rows are left out (the first: {file.skipped[0]})")
        return file.prompts

    def _remark(self, key: str, count: int, what: str) -> None:
        if count:
            self.remarks.append(f"{key}.path: {count} {what}")

    def _short_enough(self, key: str, prompts: Sequence[Prompt], limit: int | None = None) -> list[Prompt]:
        """Those within every agent's limit: `limit`, or else its `rollout.max_prompt_tokens`."""
        kept = without_long(prompts, self._lengths(prompts), self._limits(limit))
        name = f"{key}.max_prompt_tokens" if limit else "rollout.max_prompt_tokens"
        self._remark(key, len(prompts) - len(kept), f"prompts longer than {name} are left out")
        if not kept:
            raise ValueError(f"{name}: no prompt of {key}.path is within it; raise it")
        return kept

    def _refuse_long(self, prompts: Sequence[Prompt]) -> None:
        """Of a task, whose prompts all have one length."""
        for agent, counts in self._lengths(prompts).items():
            limit = self._limits(None)[agent]
            if max(counts) > limit:
                raise ValueError(
                    f"rollout.max_prompt_tokens: {limit} is below the {max(counts)} tokens of a "
                    f"{self._config.data.task} prompt for agent {agent}; raise it"
                )

    def _limits(self, limit: int | None) -> dict[str, int]:
        agents = self._config.agents.items()
        return {name: limit or agent.rollout.max_prompt_tokens for name, agent in agents}

    def _lengths(self, prompts: Sequence[Prompt]) -> dict[str, list[int]]:
        """Tokens of each rendered prompt: every agent's tokenizer counts every prompt, equal ones once."""
        counted: dict[str, list[int]] = {}
        for name, tokenizer in self._tokenizers.items():
            if tokenizer.identity not in counted:
                parts = (prompts[i : i + _TOGETHER] for i in range(0, len(prompts), _TOGETHER))
                counts = [count for part in parts for count in _token_counts(part, name, tokenizer)]
                counted[tokenizer.identity] = counts
        return {name: counted[tokenizer.identity] for name, tokenizer in self._tokenizers.items()}


def _token_counts(prompts: Sequence[Prompt], agent: str, tokenizer: AgentTokenizer) -> list[int]:
    """Tokens of rendered prompts; ValueError if the agent would read something else than what one says."""
    messages = [prompt.messages for prompt in prompts]
    for prompt, lost in zip(prompts, tokenizer.lost_characters(messages), strict=True):
        if lost:
            raise ValueError(
                f"prompt {prompt.id}: agent {agent}'s vocabulary has no token for {lost!r}; "
                "remove the prompt or change it"
            )
    try:
        counts = [len(ids) for ids in tokenizer.render_prompts(messages)]
    except ValueError as error:
        raise ValueError(f"agent {agent}: {error}") from error
    for prompt, count in zip(prompts, counts, strict=True):
        if count == 0:
            raise ValueError(
                f"prompt {prompt.id}: no tokens for agent {agent}; remove the prompt or change it"
            )
    return counts


def _tokenizer(agent: AgentConfig) -> AgentTokenizer:
    template = None if agent.chat_template is None else Path(agent.chat_template).read_text("utf-8")
    return AgentTokenizer.load(
        agent.model,
        chat_template=template,
        plain_template=agent.plain_template,
        stop_token=agent.stop_token,
    )


class Verifiers:
    """The verifiers of a run and of its benchmarks in worker processes of this one, each started once."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._pools: dict[str, RewardPool] = {}
        self.usual = self.of(None)
        for benchmark in config.evaluation.benchmarks.values():
            self.of(benchmark.verifier)

    def of(self, verifier: Spec | None) -> RewardPool:
        """A benchmark's own, which gives rewards from 0 to 1; the run's for None."""
        key = json.dumps(verifier)
        if key not in self._pools:
            self._pools[key] = _open_pool(self._config.reward, verifier)
        return self._pools[key]

    def close(self) -> None:
        """End the processes."""
        for pool in self._pools.values():
            pool.close()


def _open_pool(reward: RewardConfig, verifier: Spec | None) -> RewardPool:
    return RewardPool(
        reward.verifier if verifier is None else verifier,
        reward_range=reward.range if verifier is None else (0.0, 1.0),
        workers=reward.workers,
        deadline=reward.deadline_seconds,
        memory_mb=reward.memory_mb,
        on_failure=reward.on_failure,
        truncated=reward.truncated,
    )

"""A benchmark: problems, how responses to them are drawn, and what their rewards come to."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from megatron_hacpo.config import RolloutConfig, RunConfig
from megatron_hacpo.config.schema import HELD_OUT, BenchmarkConfig
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.evaluation.estimators import best_at_k, half_width, majority, pass_at_k
from megatron_hacpo.inputs import Prompts
from megatron_hacpo.reward.base import RewardResult
from megatron_hacpo.rollout.base import Sampling

T = TypeVar("T")

SEED = 777
"""Fixed, so that evaluations differ by the weights alone."""


@dataclass(frozen=True)
class Benchmark:
    """rewards: (lowest, highest)."""

    name: str
    prompts: list[Prompt]
    settings: BenchmarkConfig
    rewards: tuple[float, float] = (0.0, 1.0)

    @property
    def headline(self) -> str:
        """The metric of its mean reward."""
        return self.name if self.name in HELD_OUT else f"{self.name}/avg@{self.settings.samples}"

    def sampling(self, rollout: RolloutConfig) -> Sampling:
        """How an agent with these rollout settings draws responses: as in training where nothing is said."""
        own = self.settings
        return Sampling(
            responses_per_prompt=own.samples,
            max_tokens=own.max_response_tokens or rollout.max_response_tokens,
            temperature=rollout.temperature if own.temperature is None else own.temperature,
            top_p=own.top_p or rollout.top_p,
            top_k=rollout.top_k if own.top_k is None else own.top_k,
            seed=SEED,
        )


@dataclass(frozen=True)
class Measurement:
    """Responses to a benchmark, prompt-major.

    scored: their rewards and answers. votes: whether the verifier finds answers. lengths: int [P, n], tokens.
    truncated: bool [P, n]. texts: [P * n].
    """

    benchmark: Benchmark
    scored: RewardResult
    votes: bool
    lengths: np.ndarray
    truncated: np.ndarray
    texts: list[str]

    @property
    def rewards(self) -> np.ndarray:
        """float64 [P, n], NaN where there is no valid one."""
        return self.scored.rewards.reshape(self.lengths.shape)

    @property
    def scores(self) -> np.ndarray:
        """float64 [P, n]: the rewards, with the lowest where there is no valid one."""
        return np.nan_to_num(self.rewards, nan=self.benchmark.rewards[0])

    def per_problem(self) -> dict[str, np.ndarray]:
        """Metric -> float64 [P], of which a benchmark's result is the mean. The headline comes first."""
        benchmark, scores = self.benchmark, self.scores
        name, n = benchmark.name, benchmark.settings.samples
        lowest, highest = benchmark.rewards
        correct = scores > highest - 1e-9 * (highest - lowest)  # a sum of weights may be a little less
        values = {benchmark.headline: scores.mean(axis=1)}
        for k in benchmark.settings.pass_at:
            values[f"{name}/pass@{k}"] = pass_at_k(correct, k)
        if n > 1:
            values[f"{name}/best@{n}"] = best_at_k(scores, n)
        if n > 1 and self.votes:
            votes = map(majority, scores.tolist(), self._by_problem(self.scored.answers))
            values[f"{name}/maj@{n}"] = np.array(list(votes))
        return values

    def _by_problem(self, values: Sequence[T]) -> list[Sequence[T]]:
        n = self.benchmark.settings.samples
        return [values[i : i + n] for i in range(0, len(values), n)]

    def metrics(self) -> dict[str, float]:
        """All that becomes of it: means with half widths of their 95 % intervals, groups, and responses."""
        benchmark, name = self.benchmark, self.benchmark.name
        metrics: dict[str, float] = {}
        for metric, values in self.per_problem().items():
            metrics |= {metric: float(values.mean()), f"{metric}/ci95": half_width(values)}
        groups = defaultdict(list)
        for prompt, score in zip(benchmark.prompts, self.scores.mean(axis=1).tolist(), strict=True):
            groups[prompt.group].append(score)
        if len(groups) > 1:
            metrics |= {f"{name}/group/{group}": float(np.mean(s)) for group, s in sorted(groups.items())}
        metrics |= {
            f"{name}/tokens": float(self.lengths.mean()),
            f"{name}/tokens_max": float(self.lengths.max()),
            f"{name}/truncated": float(self.truncated.mean()),
            f"{name}/invalid": float(np.isnan(self.rewards).mean()),
        }
        if self.votes:
            metrics[f"{name}/no_answer"] = float(np.mean([a is None for a in self.scored.answers]))
        return metrics

    def problems(self, *, texts: bool) -> list[dict[str, Any]]:
        """One row a problem: id, group, ground truth, and for each response reward, tokens, whether it was
        truncated, answer, and with `texts` its text."""
        rows = []
        answers, responses = self._by_problem(self.scored.answers), self._by_problem(self.texts)
        for i, prompt in enumerate(self.benchmark.prompts):
            row = {
                "id": prompt.id,
                "group": prompt.group,
                "truth": prompt.answer,
                "rewards": self.rewards[i].tolist(),
                "tokens": self.lengths[i].tolist(),
                "truncated": self.truncated[i].tolist(),
            }
            if self.votes:
                row["answers"] = list(answers[i])
            if texts:
                row["responses"] = list(responses[i])
            rows.append(row)
        return rows


def open_benchmarks(config: RunConfig, prompts: Prompts) -> list[Benchmark]:
    """Those of a run, the held-out prompts first."""
    usual, held_out = config.reward.range, prompts.held_out()
    settings = BenchmarkConfig(path="", temperature=None)
    found = [Benchmark("sampled", held_out, settings, usual)] if held_out else []
    found += [replace(b, name="greedy", settings=BenchmarkConfig(path="")) for b in found]
    problems = prompts.benchmarks()
    for name, settings in config.evaluation.benchmarks.items():
        rewards = usual if settings.verifier is None else (0.0, 1.0)
        found.append(Benchmark(name, problems[name], settings, rewards))
    return found

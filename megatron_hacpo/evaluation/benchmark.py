"""A benchmark: problems, how responses to them are drawn, and what their rewards come to."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_hacpo.config import RolloutConfig, RunConfig
from megatron_hacpo.config.schema import HELD_OUT
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.evaluation.estimators import best_at_k, half_width, majority, pass_at_k
from megatron_hacpo.inputs import Prompts
from megatron_hacpo.reward.registry import Spec, get_verifier
from megatron_hacpo.rollout.base import Sampling

SEED = 777
"""Fixed, so that evaluations differ by the weights alone."""


@dataclass(frozen=True)
class Benchmark:
    """verifier: None for the run's. rewards: (lowest, highest).

    temperature, top_p, top_k, max_tokens: None where the agent's rollout settings hold.
    answer: the answer in a response, for the vote of maj@n; None where the verifier has none.
    """

    name: str
    prompts: list[Prompt]
    samples: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    pass_at: tuple[int, ...] = ()
    verifier: Spec | None = None
    rewards: tuple[float, float] = (0.0, 1.0)
    answer: Callable[[str], str | None] | None = None

    @property
    def headline(self) -> str:
        """The metric of its mean reward."""
        return self.name if self.name in HELD_OUT else f"{self.name}/avg@{self.samples}"

    def sampling(self, rollout: RolloutConfig) -> Sampling:
        """How an agent with these rollout settings draws responses."""

        def own(value: Any, usual: Any) -> Any:
            return usual if value is None else value

        return Sampling(
            responses_per_prompt=self.samples,
            max_tokens=own(self.max_tokens, rollout.max_response_tokens),
            temperature=own(self.temperature, rollout.temperature),
            top_p=own(self.top_p, rollout.top_p),
            top_k=own(self.top_k, rollout.top_k),
            seed=SEED,
        )


@dataclass(frozen=True)
class Measurement:
    """Responses to a benchmark, prompt-major.

    rewards: float64 [P, n], NaN where there is no valid one. lengths: int [P, n], tokens. truncated: bool
    [P, n]. answers, texts: [P * n].
    """

    benchmark: Benchmark
    rewards: np.ndarray
    lengths: np.ndarray
    truncated: np.ndarray
    answers: list[str | None]
    texts: list[str]

    @property
    def scores(self) -> np.ndarray:
        """float64 [P, n]: the rewards, with the lowest where there is no valid one."""
        return np.nan_to_num(self.rewards, nan=self.benchmark.rewards[0])

    def per_problem(self) -> dict[str, np.ndarray]:
        """Metric -> float64 [P], of which a benchmark's result is the mean. The headline comes first."""
        benchmark, scores = self.benchmark, self.scores
        name, n = benchmark.name, benchmark.samples
        values = {benchmark.headline: scores.mean(axis=1)}
        for k in benchmark.pass_at:
            values[f"{name}/pass@{k}"] = pass_at_k(scores >= benchmark.rewards[1], k)
        if n > 1:
            values[f"{name}/best@{n}"] = best_at_k(scores, n)
        if n > 1 and benchmark.answer is not None:
            answers = [self.answers[i : i + n] for i in range(0, len(self.answers), n)]
            values[f"{name}/maj@{n}"] = np.array(list(map(majority, scores.tolist(), answers)))
        return values

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
        if benchmark.answer is not None:
            unanswered = sum(answer is None for answer in self.answers)
            metrics[f"{name}/no_answer"] = unanswered / len(self.answers)
        return metrics

    def problems(self, *, texts: bool) -> list[dict[str, Any]]:
        """One row a problem: id, group, ground truth, and for each response reward, tokens, whether it was
        truncated, answer, and with `texts` its text."""
        n = self.benchmark.samples
        rows = []
        for i, prompt in enumerate(self.benchmark.prompts):
            at = slice(i * n, (i + 1) * n)
            row = {
                "id": prompt.id,
                "group": prompt.group,
                "truth": prompt.answer,
                "rewards": self.rewards[i].tolist(),
                "tokens": self.lengths[i].tolist(),
                "truncated": self.truncated[i].tolist(),
            }
            if self.benchmark.answer is not None:
                row["answers"] = self.answers[at]
            if texts:
                row["responses"] = self.texts[at]
            rows.append(row)
        return rows


def open_benchmarks(config: RunConfig, prompts: Prompts) -> list[Benchmark]:
    """Those of a run, the held-out prompts first."""
    usual = get_verifier(config.reward.verifier).answer
    held_out = Benchmark("sampled", prompts.held_out(), rewards=config.reward.range, answer=usual)
    found = [held_out, replace(held_out, name="greedy", temperature=0.0)] if held_out.prompts else []
    problems = prompts.benchmarks()
    for name, settings in config.evaluation.benchmarks.items():
        verifier = settings.verifier
        benchmark = Benchmark(
            name,
            problems[name],
            samples=settings.samples,
            temperature=settings.temperature,
            top_p=settings.top_p,
            top_k=settings.top_k,
            max_tokens=settings.max_response_tokens,
            pass_at=settings.pass_at,
            verifier=verifier,
            rewards=config.reward.range if verifier is None else (0.0, 1.0),
            answer=usual if verifier is None else get_verifier(verifier).answer,
        )
        found.append(benchmark)
    return found

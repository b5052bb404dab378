"""Measuring an agent on benchmarks, in training and alone."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import RunConfig
from megatron_hacpo.evaluation.benchmark import Benchmark, Measurement
from megatron_hacpo.inputs import open_pool
from megatron_hacpo.report.files import plain
from megatron_hacpo.reward.pool import RewardPool
from megatron_hacpo.rollout.base import Response

Generate = Callable[..., list[Response] | None]
"""`Rollout.generate`."""


def measure(
    generate: Generate,
    benchmark: Benchmark,
    *,
    config: RunConfig,
    agent: str,
    tokenizer: AgentTokenizer,
    verifier: RewardPool | None,
) -> Measurement | None:
    """Responses to a benchmark and their rewards; a collective where `generate` is one.

    agent: its name. verifier: the run's, on the leader. None where `generate` hands nothing back.
    """
    ids = [tokenizer.render_prompt(prompt.messages) for prompt in benchmark.prompts]
    texts: dict[int, str] = {}
    with ExitStack() as stack:
        if verifier is not None and benchmark.verifier is not None:
            verifier = stack.enter_context(open_pool(config, benchmark.verifier))

        def submit(index: int, response: Response) -> None:
            assert verifier is not None
            texts[index], _ = tokenizer.decode_response(response.token_ids)
            prompt = benchmark.prompts[index // benchmark.samples]
            verifier.submit(index, prompt, texts[index], response.finish_reason)

        responses = generate(ids, benchmark.sampling(config.agents[agent].rollout), on_response=submit)
        if responses is None:
            return None
        assert verifier is not None
        rewards = verifier.collect().rewards
    shape = len(benchmark.prompts), benchmark.samples
    answer = benchmark.answer
    return Measurement(
        benchmark,
        rewards=rewards.reshape(shape),
        lengths=np.array([len(r.token_ids) for r in responses]).reshape(shape),
        truncated=np.array([r.finish_reason == "length" for r in responses]).reshape(shape),
        answers=[None if answer is None else answer(texts[i]) for i in range(len(responses))],
        texts=[texts[i] for i in range(len(responses))],
    )


def write_problems(measurement: Measurement, folder: Path, *, texts: bool) -> None:
    """One line a problem into FOLDER/NAME.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(plain(row), ensure_ascii=False) for row in measurement.problems(texts=texts))
    path = folder / f"{measurement.benchmark.name}.jsonl"
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", errors="backslashreplace")

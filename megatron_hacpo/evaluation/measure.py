"""Measuring an agent on benchmarks, in training and alone."""

import json
from pathlib import Path

import numpy as np

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import RolloutConfig
from megatron_hacpo.evaluation.benchmark import Benchmark, Measurement
from megatron_hacpo.inputs import Verifiers
from megatron_hacpo.report.files import plain
from megatron_hacpo.rollout.base import Generate, Response


def measure(
    generate: Generate,
    benchmark: Benchmark,
    *,
    rollout: RolloutConfig,
    tokenizer: AgentTokenizer,
    verifiers: Verifiers | None,
) -> Measurement | None:
    """Responses to a benchmark and their rewards; a collective where `generate` is one.

    rollout: the agent's. verifiers: on the leader. None where `generate` hands nothing back.
    """
    ids = tokenizer.render_prompts([prompt.messages for prompt in benchmark.prompts])
    n = benchmark.settings.samples
    verifier = None if verifiers is None else verifiers.of(benchmark.settings.verifier)
    texts: dict[int, str] = {}

    def submit(index: int, response: Response) -> None:
        assert verifier is not None
        texts[index], _ = tokenizer.decode_response(response.token_ids)
        verifier.submit(index, benchmark.prompts[index // n], texts[index], response.finish_reason)

    responses = generate(ids, benchmark.sampling(rollout), on_response=submit)
    if responses is None:
        return None
    assert verifier is not None
    shape = len(benchmark.prompts), n
    return Measurement(
        benchmark,
        scored=verifier.collect(),
        votes=verifier.finds_answers,
        lengths=np.array([len(r.token_ids) for r in responses]).reshape(shape),
        truncated=np.array([r.finish_reason == "length" for r in responses]).reshape(shape),
        texts=[texts[i] for i in range(len(responses))],
    )


def write_problems(measurement: Measurement, folder: Path, *, texts: bool) -> None:
    """One line a problem into FOLDER/NAME.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = (json.dumps(plain(row), ensure_ascii=False) for row in measurement.problems(texts=texts))
    path = folder / f"{measurement.benchmark.name}.jsonl"
    path.write_text("".join(f"{row}\n" for row in rows), encoding="utf-8", errors="backslashreplace")

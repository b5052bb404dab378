"""Whether the files of prompts are there and hold prompts, and whether benchmarks can be measured."""

from collections.abc import Iterator
from pathlib import Path

from megatron_hacpo.config.errors import line
from megatron_hacpo.config.schema import HELD_OUT, BenchmarkConfig, PromptFileConfig, RunConfig
from megatron_hacpo.data.read import read_prompts
from megatron_hacpo.data.rule_task import LETTERS
from megatron_hacpo.hf.read import read_config


def data_problems(config: RunConfig, *, training: bool) -> Iterator[str]:
    """What is wrong with `data`, if it is used, and `evaluation`, one line each."""
    data, evaluation = config.data, config.evaluation
    if data.path is not None:
        if training:
            yield from _file_problems("data", data.path, data.split, data)
        if evaluation.path is not None:
            yield from _file_problems("evaluation", evaluation.path, evaluation.split, data)
    else:
        if evaluation.path is not None:
            wrong = f"data.task {data.task} has its own held-out prompts; cut it"
            yield line("evaluation.path", evaluation.path, wrong)
        if evaluation.prompts % len(LETTERS):
            wrong = f"not a multiple of the {len(LETTERS)} kinds of {data.task}; round it"
            yield line("evaluation.prompts", evaluation.prompts, wrong)
    for name, benchmark in evaluation.benchmarks.items():
        key = f"evaluation.benchmarks.{name}"
        if name in HELD_OUT:
            yield f"{key}: the held-out prompts are called so; choose another name"
        yield from _file_problems(key, benchmark.path, benchmark.split, benchmark)
        yield from _sampling_problems(key, benchmark)
        yield from _length_problems(key, name, config)


def _file_problems(key: str, path: str, split: str | None, file: PromptFileConfig) -> Iterator[str]:
    try:
        read_prompts(path, file.columns, split=split, bad_rows=file.bad_rows)
    except OSError as error:
        wrong = f"cannot be read ({error.strerror}); give the path of a file or folder of prompts"
        yield line(f"{key}.path", path, wrong)
    except ValueError as error:
        yield f"{key}.path: {error}"


def _sampling_problems(key: str, benchmark: BenchmarkConfig) -> Iterator[str]:
    from megatron_hacpo.reward.registry import get_verifier

    if benchmark.samples > 1 and benchmark.temperature == 0.0:
        wrong = "greedy responses to a prompt are all the same; set temperature, or null for the rollout's"
        yield line(f"{key}.samples", benchmark.samples, wrong)
    for k in benchmark.pass_at:
        if k > benchmark.samples:
            wrong = f"needs as many responses, samples is {benchmark.samples}; raise that or lower k"
            yield line(f"{key}.pass_at", k, wrong)
    if benchmark.temperature is not None and 0.0 < benchmark.temperature < 0.01:
        yield line(f"{key}.temperature", benchmark.temperature, "too low to sample; write 0 for greedy")
    if isinstance(benchmark.verifier, dict) and sum(map(abs, benchmark.verifier.values())) > 1.0 + 1e-9:
        wrong = "the weights add up to more than 1, the highest reward of a benchmark; lower them"
        yield line(f"{key}.verifier", benchmark.verifier, wrong)
    if benchmark.verifier is not None:
        try:
            get_verifier(benchmark.verifier)
        except ValueError as error:
            yield f"{key}: {error}"


def _length_problems(key: str, name: str, config: RunConfig) -> Iterator[str]:
    for agent_name, agent in config.agents.items():
        try:
            limit = read_config(Path(agent.model)).max_position_embeddings
        except ValueError:
            continue  # told of the model itself
        total = config.benchmark_tokens(name, agent_name)
        if total > limit:
            response = config.evaluation.benchmarks[name].max_response_tokens
            wrong = f"with the prompt up to {total} tokens, and agent {agent_name}'s model reads {limit}"
            yield line(f"{key}.max_response_tokens", response, f"{wrong} (max_position_embeddings); lower it")

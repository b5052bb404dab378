"""What a schema cannot see: whether a run's parts fit each other and the files they name."""

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path

from megatron_hacpo.config.check_data import data_problems
from megatron_hacpo.config.check_model import model_problems
from megatron_hacpo.config.check_rollout import rollout_problems
from megatron_hacpo.config.errors import ConfigError, line
from megatron_hacpo.config.method import method_value
from megatron_hacpo.config.schema import RunConfig

RESERVED = re.compile(
    r"logs(\.\d+)?|step_\d+(\.\d+)?|(config\.yaml|(identity|launch|summary)\.json|curves\.png)", re.IGNORECASE
)
"""Names in a run's folder that no agent may have."""

NARROW_TOKEN_CLIP = 0.05
SHARING_KEYS = ("capability_baseline", "discrepancy_gradient", "cross_clip")
"""Single tokens' ratios leave a narrower window than this at once."""


def check(config: RunConfig, *, training: bool = True, servers_here: bool = True) -> list[str]:
    """Look at everything that can be known before a process is started.

    training: false for what only measures, and reads no training prompts. servers_here: false where rollout
    servers see other files, as in a container, than this process does.
    Returns warnings, one line each. Raises ConfigError with a line for every mistake.
    """
    errors = [
        *_agent_name_problems(config),
        *(problem for name, agent in config.agents.items() for problem in model_problems(name, agent)),
        *_batch_problems(config),
        *_optimizer_problems(config),
        *(
            problem
            for name, agent in config.agents.items()
            for problem in rollout_problems(name, agent, servers_here)
        ),
        *_reward_problems(config),
        *data_problems(config, training=training),
        *_report_problems(config),
        *_checks_problems(config),
        *_replay_problems(config),
    ]
    window = None
    try:
        window = _window_warning(config)
    except ValueError as error:
        errors.append(str(error))
    if errors:
        raise ConfigError(errors)
    return [*([window] if window else []), *_warnings(config)]


def _agent_name_problems(config: RunConfig) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name in config.agents:
        if RESERVED.fullmatch(name):
            yield f"agents.{name}: the run's folder needs this name itself; rename the agent"
        twin = seen.setdefault(name.lower(), name)
        if twin != name:
            yield f"agents.{name}: differs from agent {twin} in case alone; agents are folders, rename one"


def _batch_problems(config: RunConfig) -> Iterator[str]:
    batch = config.batch
    if batch.prompts % batch.minibatch_prompts:
        yield line(
            "batch.minibatch_prompts",
            batch.minibatch_prompts,
            f"does not divide batch.prompts = {batch.prompts}; use a divisor of {batch.prompts}",
        )
    longest, name, context = max(
        (math.ceil(agent.rollout.max_tokens / agent.parallel.context), name, agent.parallel.context)
        for name, agent in config.agents.items()
    )
    if batch.microbatch_tokens < longest:
        whole = config.agents[name].rollout.max_tokens
        share = f" on each of {context} context-parallel processes" if context > 1 else ""
        yield line(
            "batch.microbatch_tokens",
            batch.microbatch_tokens,
            f"less than one sequence of agent {name}, up to {whole} tokens (max_prompt_tokens + "
            f"max_response_tokens){share}; use at least {longest}",
        )
    for name in config.agents:
        yield from _group_problems(config, name)


def _group_problems(config: RunConfig, name: str) -> Iterator[str]:
    """Of the responses that agent `name` trains on, per prompt and per mini-batch."""
    responses = {other: agent.rollout.responses_per_prompt for other, agent in config.agents.items()}
    counts = list(responses.values()) if config.algorithm.share else [responses[name]]
    if sum(counts) < 2:
        wrong = f"gives agent {name} a single response per prompt and so no advantage; use at least 2"
        yield line("rollout.responses_per_prompt", responses[name], wrong)


def _optimizer_problems(config: RunConfig) -> Iterator[str]:
    sections = {"optimizer": config.optimizer}
    for name, agent in config.agents.items():
        if agent.optimizer != config.optimizer:
            sections[f"agents.{name}.optimizer"] = agent.optimizer
    for key, optimizer in sections.items():
        if optimizer.min_lr > optimizer.lr:
            yield line(f"{key}.min_lr", optimizer.min_lr, f"above lr = {optimizer.lr:g}; lower it")
        if optimizer.cpu_offload and not optimizer.distributed:
            yield line(f"{key}.cpu_offload", True, f"needs {key}.distributed; write true there")
        if optimizer.schedule != "constant" and optimizer.warmup_steps >= config.run.steps:
            wrong = f"leaves no step of run.steps = {config.run.steps} to the schedule; lower it"
            yield line(f"{key}.warmup_steps", optimizer.warmup_steps, wrong)

    for name, agent in config.agents.items():
        if agent.optimizer.cpu_offload and agent.dtype == "float32":
            wrong = (
                f"needs agents.{name}.dtype bfloat16 (megatron-core offloads no float32 models); change one"
            )
            yield line(("agents", name, "optimizer", "cpu_offload"), True, wrong)


def _reward_problems(config: RunConfig) -> Iterator[str]:
    from megatron_hacpo.reward.registry import get_verifier

    try:
        get_verifier(config.reward.verifier)
    except ValueError as error:
        yield str(error)
    for name, agent in config.agents.items():
        limit = agent.rollout.max_response_tokens
        if config.reward.overlong_buffer > limit:
            wrong = f"more than agent {name}'s rollout.max_response_tokens = {limit}; lower it"
            yield line("reward.overlong_buffer", config.reward.overlong_buffer, wrong)
    compared = config.algorithm.share and len(config.agents) > 1
    if compared and config.reward.range[0] < 0 and config.algorithm.capability_metric == "mean":
        yield line(
            "algorithm.capability_metric",
            "mean",
            f"needs rewards from 0 up, reward.range is {list(config.reward.range)}; use positive_share",
        )


def _report_problems(config: RunConfig) -> Iterator[str]:
    if config.report.wandb and importlib.util.find_spec("wandb") is None:
        yield "report.wandb: true: wandb is not installed; install megatron-hacpo[wandb] or write false"


def _checks_problems(config: RunConfig) -> Iterator[str]:
    if config.checks.on_agent_loss == "continue" and config.exchange.keep_steps < 2:
        wrong = (
            "too few for checks.on_agent_loss = continue: who could not complete a step when an agent was "
            "lost reads it from the disk, while others may be one step further; use at least 2"
        )
        yield line("exchange.keep_steps", config.exchange.keep_steps, wrong)


def _replay_problems(config: RunConfig) -> Iterator[str]:
    replay = config.debug.replay
    if replay is None:
        return
    if not Path(replay).is_dir():
        yield line("debug.replay", replay, "no such folder; give one such as runs/NAME")
        return
    for name in config.agents:
        if not any(Path(replay).glob(f"step_*/pool/{name}.sampled")):
            wrong = f"has no responses of agent {name}; give the folder of a run in which it samples"
            yield line("debug.replay", replay, wrong)


def _window_warning(config: RunConfig) -> str | None:
    """The HACPO clipping window: a warning where it is narrow, ValueError where it is closed."""
    from megatron_hacpo.algorithm.minibatch import check_window

    algorithm, batch = config.algorithm, config.batch
    stepwise = algorithm.share and algorithm.cross_clip == "stepwise"
    if not stepwise or batch.prompts % batch.minibatch_prompts:
        return None
    return check_window(
        len(config.agents),
        batch.prompts,
        batch.minibatch_prompts,
        algorithm.delta,
        algorithm.delta_step,
        algorithm.alternate_minibatches,
    )


def _warnings(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    for key in ("own_ratio", *(SHARING_KEYS if algorithm.share else ())):
        value, usual = getattr(algorithm, key), method_value(algorithm.name, key)
        if value != usual:
            yield f"algorithm.{key}: {value}: an ablation; {algorithm.name} by itself has {usual}"
    if algorithm.own_ratio == "token" and max(algorithm.clip_low, algorithm.clip_high) < NARROW_TOKEN_CLIP:
        yield (
            f"algorithm.clip_low, clip_high: {algorithm.clip_low:g}, {algorithm.clip_high:g}: "
            "narrow for ratios per token; grpo's own are 0.2, 0.28"
        )
    evaluation = config.evaluation
    if (
        config.data.path is not None
        and evaluation.path is None
        and evaluation.prompts
        and not evaluation.benchmarks
    ):
        yield "evaluation.path: not set: no accuracy is measured; name a file of held-out prompts"

"""How long agents are predicted to compute in a step, and how to divide the devices so that fewest wait.

A cost model, not a measurement: only the ratios between agents are of use. docs/doctor.md has it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.doctor.finding import Finding
from megatron_hacpo.doctor.memory import LOCAL_BATCH, estimate, micro_batches
from megatron_hacpo.doctor.shape import ITEM_BYTES, Shape, lengths
from megatron_hacpo.launch.placement import DoesNotFit, Node, place

UTILISATION = 0.35
"""Of a device's peak FLOP/s, in forward and backward passes."""

BANDWIDTH_USE = 0.7
"""Of a device's memory bandwidth, while tokens are generated one by one."""

WAIT = 0.25
"""Share of a step that an agent may wait without a warning."""

GAIN = 0.05
"""How much shorter a step must get for a split to be worth a word."""


@dataclass(frozen=True)
class Device:
    """A kind of GPU. flops: dense, per second, by dtype. bandwidth: of its memory, bytes per second."""

    name: str
    flops: Mapping[str, float]
    bandwidth: float


DEVICES = (
    Device("A100", {"bfloat16": 312e12, "float32": 19.5e12}, 2.0e12),
    Device("H100", {"bfloat16": 989e12, "float32": 67e12}, 3.35e12),
    Device("H200", {"bfloat16": 989e12, "float32": 67e12}, 4.8e12),
    Device("B200", {"bfloat16": 2250e12, "float32": 75e12}, 8.0e12),
)
"""By the makers' data sheets, of the modules with NVLink."""

UNKNOWN = Device("", {"bfloat16": 989e12, "float32": 67e12}, 3.35e12)
"""In the proportions of an H100; of its seconds only ratios are shown."""

ASSUMPTIONS = (
    f"{UTILISATION:.0%} of the peak FLOP/s and {BANDWIDTH_USE:.0%} of the bandwidth; prompts and responses "
    "of half their longest, as many tokens in every tokenizer; no time for rewards, exchange and weight sync"
)


def device_of(gpu: str) -> Device:
    """By a GPU's name, such as `NVIDIA H100 80GB HBM3`; UNKNOWN for others."""
    return next((device for device in DEVICES if device.name in gpu), UNKNOWN)


@dataclass(frozen=True)
class Step:
    """Predicted seconds of an agent's phases in a step; they follow each other."""

    generation: float
    log_probs: float
    training: float

    @property
    def total(self) -> float:
        return self.generation + self.log_probs + self.training


@dataclass(frozen=True)
class Machine:
    """What an agent computes on. memory: bytes of one device, None if not known."""

    device: Device = UNKNOWN
    memory: int | None = None


def predict(config: RunConfig, agent: str, shape: Shape, machine: Machine) -> Step:
    """Of one agent, without the time that it waits."""
    settings = config.agents[agent]
    parallel = settings.parallel
    speed = UTILISATION * machine.device.flops[settings.dtype] * parallel.world_size
    one = shape.forward(lengths(settings).sequence)
    own = config.batch.prompts * settings.rollout.responses_per_prompt
    passes = 2 if config.algorithm.kl_coef > 0.0 else 1
    # Backward costs two forward passes, recomputation one more.
    updates = 4 if settings.recompute == "full" else 3
    trained = own
    if config.algorithm.share:
        trained = config.batch.prompts * sum(a.rollout.responses_per_prompt for a in config.agents.values())
    bubble = 1 + (parallel.pipeline - 1) / (micro_batches(config, agent) * parallel.virtual_pipeline)
    return Step(
        generation=_generation(config, agent, shape, machine),
        log_probs=passes * own * one * bubble / speed,
        training=updates * trained * one * bubble / speed,
    )


def _generation(config: RunConfig, agent: str, shape: Shape, machine: Machine) -> float:
    """Seconds of prompts and tokens of the busiest server. Its weights are read once for a token of all
    responses in flight, a response's cache for each of its tokens; or what is multiplied takes longer."""
    settings = config.agents[agent]
    item, mean = ITEM_BYTES[settings.dtype], lengths(settings)
    tensor, servers, most = _servers(settings)
    if (generation := estimate(config, agent, shape, machine.memory).generation) and generation.tokens:
        most = min(most, max(1, int(generation.tokens / mean.in_flight)))
    flops = UTILISATION * machine.device.flops[settings.dtype] * tensor
    bandwidth = BANDWIDTH_USE * machine.device.bandwidth * tensor
    responses = -(-config.batch.prompts * settings.rollout.responses_per_prompt // servers)
    # The longest response of a batch goes through all of its tokens, one by one.
    turns = max(responses / min(most, responses) * mean.response, settings.rollout.max_response_tokens)
    tokens = responses * mean.response
    read = (turns * shape.parameters + tokens * shape.cache_elements * mean.in_flight) * item / bandwidth
    computed = tokens * shape.forward(1) / flops
    prompts = -(-config.batch.prompts // servers) * shape.forward(mean.prompt) / flops
    return prompts + max(read, computed)


def _servers(settings: AgentConfig) -> tuple[int, int, int]:
    """(devices of a server, servers, responses that one generates at once)."""
    sglang = settings.rollout.sglang
    if settings.rollout.engine == "local":
        return 1, 1, LOCAL_BATCH
    return sglang.tensor, len(sglang.addresses) or sglang.servers, sglang.max_concurrent


@dataclass(frozen=True)
class Split:
    """Another division of the devices. settings: as `--set` takes them. seconds: of the slowest agent."""

    config: RunConfig
    settings: list[str]
    seconds: float


@dataclass(frozen=True)
class _Option:
    """One agent with so many copies and servers."""

    settings: AgentConfig
    devices: int
    seconds: float


def better_split(
    config: RunConfig, shapes: Mapping[str, Shape], machines: Mapping[str, Machine], nodes: Sequence[Node]
) -> Split | None:
    """The division of the nodes' devices with the shortest step: agents change in their data-parallel copies
    and their servers alone. None if none is shorter by `GAIN`.

    shapes, machines: by agent. Only what `place` can place and memory holds, by the estimate, counts.
    """
    total = sum(node.devices for node in nodes)
    options = {name: _options(config, name, shapes[name], machines[name], total) for name in config.agents}
    now = max(predict(config, name, shapes[name], machines[name]).total for name in config.agents)
    times = sorted({option.seconds for choices in options.values() for option in choices})
    for limit in times:
        if limit > (1 - GAIN) * now:
            return None
        fast = {n: [o for o in choices if o.seconds <= limit] for n, choices in options.items()}
        if not all(fast.values()):
            continue
        for chosen in _choices(config, fast, total):
            agents = {name: option.settings for name, option in chosen.items()}
            split = config.model_copy(update={"agents": agents})
            if _fits(split, nodes):
                seconds = max(option.seconds for option in chosen.values())
                return Split(split, _changes(config, split), seconds)
    return None


def _fits(config: RunConfig, nodes: Sequence[Node]) -> bool:
    try:
        place(config, nodes)
    except DoesNotFit:
        return False
    return True


def _choices(
    config: RunConfig, fast: Mapping[str, Sequence[_Option]], total: int
) -> Iterator[dict[str, _Option]]:
    """One of each agent's options, no more devices than there are: first what changes little and uses all,
    then what uses fewest, which is placed more easily. Nothing if even that is too much."""
    least = {name: min(options, key=lambda o: (o.devices, o.seconds)) for name, options in fast.items()}
    left = total - sum(option.devices for option in least.values())
    if left < 0:
        return
    kept, spare = dict(least), left
    for name, options in fast.items():
        for option in options:
            if option.settings == config.agents[name] and option.devices - least[name].devices <= spare:
                spare -= option.devices - least[name].devices
                kept[name] = option
    full = dict(kept)
    for name, options in fast.items():
        if kept[name].settings != config.agents[name]:
            affordable = [option for option in options if option.devices <= full[name].devices + spare]
            best = min(affordable, key=lambda option: (option.seconds, option.devices))
            spare -= best.devices - full[name].devices
            full[name] = best
    yield full
    yield kept
    yield least


def _options(config: RunConfig, agent: str, shape: Shape, machine: Machine, total: int) -> list[_Option]:
    """Of one agent, with at most `total` devices."""
    settings = config.agents[agent]
    parallel, sglang = settings.parallel, settings.rollout.sglang
    copy = parallel.world_size // parallel.data
    apart = settings.rollout.engine == "sglang" and not sglang.addresses and not settings.placement.colocated
    options = []
    for data in _counts(total // copy):
        ranks = copy * data
        if ranks // parallel.pipeline % parallel.expert:
            continue
        servers = [sglang.servers]
        if apart:
            servers = list(_counts((total - ranks) // sglang.tensor))
        elif settings.placement.colocated:
            servers = [max(1, sglang.servers * data // parallel.data)]
        for count in servers:
            changed = _with(settings, data, count)
            other = config.model_copy(update={"agents": {**config.agents, agent: changed}})
            memory = estimate(other, agent, shape, machine.memory)
            if machine.memory is None or memory.highest <= machine.memory:
                seconds = predict(other, agent, shape, machine).total
                options.append(_Option(changed, ranks + (count * sglang.tensor if apart else 0), seconds))
    return options


def _counts(most: int) -> Iterator[int]:
    """Numbers up to `most`, not all of the large ones."""
    yield from range(1, min(most, 16) + 1)
    yield from range(24, most + 1, 8)


def _with(settings: AgentConfig, data: int, servers: int) -> AgentConfig:
    sglang = settings.rollout.sglang.model_copy(update={"servers": servers})
    return settings.model_copy(
        update={
            "parallel": settings.parallel.model_copy(update={"data": data}),
            "rollout": settings.rollout.model_copy(update={"sglang": sglang}),
        }
    )


def _changes(old: RunConfig, new: RunConfig) -> list[str]:
    settings = []
    for name, agent in new.agents.items():
        before = old.agents[name]
        if agent.parallel.data != before.parallel.data:
            settings.append(f"agents.{name}.parallel.data={agent.parallel.data}")
        if agent.rollout.sglang.servers != before.rollout.sglang.servers:
            settings.append(f"agents.{name}.rollout.sglang.servers={agent.rollout.sglang.servers}")
    return settings


def findings(
    config: RunConfig,
    shapes: Mapping[str, Shape],
    machines: Mapping[str, Machine],
    nodes: Sequence[Node] | None,
) -> Iterator[Finding]:
    """Each agent's predicted step, and a warning for each one that waits too long.

    nodes: whose devices may be divided otherwise; None without GPUs, where processes share cores and nothing
    is worth a warning.
    """
    steps = {name: predict(config, name, shapes[name], machines[name]) for name in config.agents}
    slowest = max(steps, key=lambda name: steps[name].total)
    longest = steps[slowest].total
    known = all(machine.device is not UNKNOWN for machine in machines.values())
    split: Split | None = None
    waits = config.algorithm.share and nodes is not None
    if waits and nodes is not None and any(1 - step.total / longest > WAIT for step in steps.values()):
        split = better_split(config, shapes, machines, nodes)
    for name, step in steps.items():
        subject, text = f"agents.{name} step", _shown(step, machines[name].device, longest, known)
        share = 1 - step.total / longest
        if not waits or share <= WAIT:
            yield Finding("ok", subject, text)
        else:
            text += f": it would wait {share:.0%} of the step for {slowest}"
            yield Finding("warning", subject, f"{text}; {_advice(split, slowest, longest)}")


def _shown(step: Step, device: Device, longest: float, known: bool) -> str:
    """Seconds where they mean something, else shares of the longest step."""
    parts = {"generation": step.generation, "log-probs": step.log_probs, "training": step.training}
    if known:
        listed = ", ".join(f"{name} {seconds:.0f}" for name, seconds in parts.items())
        return f"about {step.total:.0f} s on {device.name} ({listed})"
    listed = ", ".join(f"{name} {seconds / longest:.2f}" for name, seconds in parts.items())
    return f"{step.total / longest:.2f} of the longest agent's ({listed})"


def _advice(split: Split | None, slowest: str, longest: float) -> str:
    if split is None:
        return (
            "no other number of copies and servers on these devices is better; "
            f"give {slowest} more devices, or the others fewer"
        )
    settings = " ".join(f"--set {setting}" for setting in split.settings)
    return f"a step of {split.seconds / longest:.2f} of the time by {settings}"

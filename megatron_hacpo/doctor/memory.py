"""What an agent's processes and servers need of a GPU's memory, phase by phase; docs/doctor.md has the model.

A first estimate, to find what cannot fit before a run tries: it is meant to be within some ten percent.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.doctor.finding import Finding, Level
from megatron_hacpo.doctor.shape import ITEM_BYTES, Held, Shape, lengths, sequence_parts

GB = 10**9

CHUNK_TOKENS = 512
"""Of log-probs, as in `megatron/chunked_logprob.py`."""

CONTEXT_BYTES = 4 * GB
"""Of a process: CUDA's context, NCCL's buffers, and what the allocator cannot use."""

SERVER_BYTES = 3 * GB
"""Of a server beside weights and cache: CUDA's context, graphs, buffers."""

MEMORY_FRACTION = 0.85
"""About what SGLang chooses where `memory_fraction` is null."""

LOCAL_BATCH = 1024
"""Responses that the local engine generates at once."""

FULL, HOPELESS = 0.95, 1.25
"""Of a GPU; an estimate above the first is a warning, above the second, beyond its uncertainty, an error."""

FEW = 0.5
"""Of the concurrent responses, whose cache should fit."""

ASSUMPTIONS = (
    f"fused attention; per process {CONTEXT_BYTES / GB:g} GB for CUDA, NCCL and fragmentation, per server "
    f"{SERVER_BYTES / GB:g} GB; responses and prompts of half their longest; a server takes memory_fraction "
    "of what is free when it starts; experts are used alike"
)


@dataclass(frozen=True)
class Training:
    """Bytes on the fullest GPU while the trainer computes.

    rollout: what is there for generation meanwhile: of colocated servers what they never give back, of a
    local engine its weights. host: bytes in the node's memory for this process, at most.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    log_probs: int
    other: int
    rollout: int
    host: int

    @property
    def states(self) -> int:
        """What the trainer has between two updates."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        return self.states + self.activations + self.log_probs + self.other + self.rollout


@dataclass(frozen=True)
class Generation:
    """Bytes on a GPU while a server, or the leader's local engine, generates.

    trainer: what is left of a trainer there. cache: None where the size of the GPU decides and is not known.
    tokens: that fit into one server's cache; None: as many as are wanted. longest: tokens of one sequence.
    wanted: tokens of the sequences in flight, in the mean over the time that they are.
    """

    weights: int
    cache: int | None
    trainer: int
    other: int
    tokens: int | None
    longest: int
    wanted: int

    @property
    def total(self) -> int:
        return self.weights + (self.cache or 0) + self.trainer + self.other


@dataclass(frozen=True)
class MemoryEstimate:
    """An agent's, per GPU of `gpu_bytes`, None if they are not known.

    generation: None where servers of somebody else generate. sending: bytes while colocated servers take the
    weights, which are beside the trainer's; None if nothing is shared.
    """

    gpu_bytes: int | None
    training: Training
    generation: Generation | None
    sending: int | None

    @property
    def highest(self) -> int:
        """Bytes of the fullest phase."""
        generation = self.generation.total if self.generation is not None else 0
        return max(self.training.total, generation, self.sending or 0)


def estimate(config: RunConfig, agent: str, shape: Shape, gpu_bytes: int | None) -> MemoryEstimate:
    """Of one agent's processes; gpu_bytes: of a GPU, None if it is not known."""
    settings = config.agents[agent]
    stages = [_training(config, agent, shape, stage) for stage in range(settings.parallel.pipeline)]
    training = max(stages, key=lambda stage: stage.total)
    if settings.rollout.engine == "local":
        return MemoryEstimate(gpu_bytes, training, _local_generation(config, agent, shape, stages[0]), None)
    if settings.rollout.sglang.addresses:
        return MemoryEstimate(gpu_bytes, training, None, None)
    colocated = settings.placement.colocated
    generation = _generation(config, agent, shape, training if colocated else None, gpu_bytes)
    beside = _without_states(settings, training)
    sending = beside + generation.other + generation.weights if colocated else None
    return MemoryEstimate(gpu_bytes, training, generation, sending)


def _training(config: RunConfig, agent: str, shape: Shape, stage: int) -> Training:
    settings = config.agents[agent]
    parallel, item = settings.parallel, ITEM_BYTES[settings.dtype]
    held = shape.held(parallel, stage)
    states, copy = _optimizer(settings, held)
    tokens = config.batch.microbatch_tokens
    rollout = 0
    if settings.rollout.engine == "local":
        rollout = shape.parameters * item if stage == 0 else 0  # the leader's
    elif settings.placement.colocated:
        rollout = SERVER_BYTES
    return Training(
        weights=held.all * item,
        gradients=held.all * 4,
        optimizer=0 if settings.optimizer.cpu_offload else states + copy,
        activations=round(item * tokens * _activation_elements(config, agent, shape, stage)),
        log_probs=_log_probs(settings, shape, tokens) if stage == parallel.pipeline - 1 else 0,
        other=CONTEXT_BYTES,
        rollout=rollout,
        host=_host(config, settings, held, states + copy),
    )


def _host(config: RunConfig, settings: AgentConfig, held: Held, optimizer: int) -> int:
    """Bytes of a process in its node's memory: the KL's reference, with the current weights while these make
    room for it; states that are kept or moved there; the copy from which a checkpoint is written, which is of
    this rank's share and, unless training goes on meanwhile, of divided states alone."""
    item = ITEM_BYTES[settings.dtype]
    bytes_ = 2 * item * held.all if config.algorithm.kl_coef > 0.0 else 0
    if settings.optimizer.cpu_offload or settings.placement.offload != "none":
        bytes_ += optimizer
    if settings.placement.offload == "all":
        bytes_ += item * held.all
    if config.checkpoint.every:
        share = _share(settings, held)
        states = sum(_optimizer_bytes(settings)) * share
        if config.checkpoint.asynchronous:
            bytes_ += round(item * share + states)
        elif settings.optimizer.distributed:
            bytes_ += round(states)
    return bytes_


def _optimizer(settings: AgentConfig, held: Held) -> tuple[int, int]:
    """Bytes of (Adam's two moments, the float32 copy of the weights), per rank: Megatron's 6 + 12 / d bytes a
    parameter, with gradients and weights, in bfloat16."""
    moments, copied = _optimizer_bytes(settings)
    kept = _share(settings, held) if settings.optimizer.distributed else held.all
    return round(moments * kept), round(copied * kept)


def _optimizer_bytes(settings: AgentConfig) -> tuple[int, int]:
    """The same, a parameter."""
    return 8, 4 if settings.dtype == "bfloat16" else 0


def _share(settings: AgentConfig, held: Held) -> float:
    """Parameters a rank when those that several data-parallel ranks hold are divided among them."""
    parallel = settings.parallel
    shared = parallel.context * parallel.data
    return held.dense / shared + held.expert / max(1.0, parallel.tensor * shared / parallel.expert)


def _activation_elements(config: RunConfig, agent: str, shape: Shape, stage: int) -> float:
    """Per token of a micro-batch: what all layers of a stage keep for backward, for all micro-batches that
    are under way there; and one layer's again for gradients. Full recomputation keeps each layer's input,
    and all of the one layer that it computes again."""
    settings = config.agents[agent]
    parallel = settings.parallel
    layer = shape.activation_elements(parallel)
    part = shape.hidden / sequence_parts(parallel)
    kept = part if settings.recompute == "full" else layer
    again = layer if settings.recompute == "full" else 0.0
    under_way = float(min(parallel.pipeline - stage, micro_batches(config, agent)))
    if parallel.virtual_pipeline > 1:
        under_way += (parallel.pipeline - 1) / parallel.virtual_pipeline
    return under_way * shape.layers / parallel.pipeline * kept + again + layer + 2 * shape.hidden


def micro_batches(config: RunConfig, agent: str) -> int:
    """Of one update, per data-parallel rank, at mean lengths."""
    settings = config.agents[agent]
    sequences = config.batch.minibatch_prompts * settings.rollout.responses_per_prompt
    tokens = sequences * lengths(settings).sequence
    together = config.batch.microbatch_tokens * settings.parallel.context * settings.parallel.data
    return max(1, -(-int(tokens) // together))


def _log_probs(settings: AgentConfig, shape: Shape, tokens: int) -> int:
    """One chunk's logits with what is computed of them, hidden states with gradients, and the gradient of the
    output layer's weight, in float32 and twice in the weight's dtype."""
    item = ITEM_BYTES[settings.dtype]
    columns = shape.vocab / settings.parallel.tensor
    chunk = CHUNK_TOKENS * columns * (8 + item)
    return round(chunk + 3 * item * tokens * shape.hidden + columns * shape.hidden * (4 + 2 * item))


def _generation(
    config: RunConfig, agent: str, shape: Shape, trainer: Training | None, gpu_bytes: int | None
) -> Generation:
    """trainer: whose GPUs the servers share."""
    settings = config.agents[agent]
    sglang, rollout, item = settings.rollout.sglang, settings.rollout, ITEM_BYTES[settings.dtype]
    weights = shape.parameters * item // sglang.tensor
    per_token = shape.cache_elements * item / sglang.tensor
    cache: int | None = None
    if gpu_bytes is not None:
        before = _at_start(settings, trainer) if trainer is not None else 0
        cache = max(0, round((sglang.memory_fraction or MEMORY_FRACTION) * (gpu_bytes - before)) - weights)
    if sglang.cache_tokens is not None:
        stated = round(sglang.cache_tokens * per_token)
        cache = stated if cache is None else min(cache, stated)
    responses = -(-config.batch.prompts * rollout.responses_per_prompt // sglang.servers)
    return Generation(
        weights=weights,
        cache=cache,
        trainer=_left(settings, trainer) if trainer is not None else 0,
        other=SERVER_BYTES,
        tokens=None if cache is None else int(cache / per_token),
        longest=rollout.max_tokens,
        wanted=round(min(sglang.max_concurrent, responses) * lengths(settings).in_flight),
    )


def _local_generation(config: RunConfig, agent: str, shape: Shape, leader: Training) -> Generation:
    """The leader's engine generates beside all that the trainer has; its cache grows as it needs."""
    settings = config.agents[agent]
    item, rollout = ITEM_BYTES[settings.dtype], settings.rollout
    at_once = min(LOCAL_BATCH, config.batch.prompts * rollout.responses_per_prompt)
    wanted = round(at_once * lengths(settings).in_flight)
    return Generation(
        weights=shape.parameters * item,
        cache=wanted * shape.cache_elements * item,
        trainer=leader.total - leader.rollout,
        other=0,
        tokens=None,
        longest=rollout.max_tokens,
        wanted=wanted,
    )


def _without_states(settings: AgentConfig, trainer: Training) -> int:
    """Bytes of a trainer on its GPU when gradients and states have been moved, if `placement.offload` moves
    any; the allocator's memory goes with them."""
    if settings.placement.offload == "none":
        return trainer.total - trainer.rollout
    return trainer.weights + trainer.other


def _at_start(settings: AgentConfig, trainer: Training) -> int:
    """Of a trainer beside which servers start: the same, before the first update has made Adam's moments and
    activations."""
    if settings.placement.offload != "none":
        return _without_states(settings, trainer)
    moments = trainer.optimizer * 2 // 3 if settings.dtype == "bfloat16" else trainer.optimizer
    return trainer.states - moments + trainer.other


def _left(settings: AgentConfig, trainer: Training) -> int:
    """Bytes of a trainer on its GPU after it has moved all that `placement.offload` names."""
    weights = trainer.weights if settings.placement.offload == "all" else 0
    return _without_states(settings, trainer) - weights


def findings(config: RunConfig, agent: str, found: MemoryEstimate) -> Iterator[Finding]:
    """A line for each phase, of sending weights only where it alone does not fit."""
    settings, training = config.agents[agent], found.training
    key = f"agents.{agent}"
    fix = _fixes(key, settings)
    parts = {
        "weights": training.weights,
        "gradients": training.gradients,
        "optimizer": training.optimizer,
        "activations": training.activations,
        "log-probs": training.log_probs,
        "rollout": training.rollout,
        "other": training.other,
    }
    judged = _judged(f"{key} memory, training", training.total, found, parts, fix)
    yield judged
    generation = found.generation
    if generation is None:
        return
    if found.sending is not None and judged.level == "ok":
        parts = {
            "trainer": found.sending - generation.weights - generation.other,
            "server weights": generation.weights,
            "other": generation.other,
        }
        fix = f"raise {key}.rollout.sglang.tensor, which divides the servers' weights, or {fix}"
        sending = _judged(f"{key} memory, sending weights", found.sending, found, parts, fix)
        if sending.level != "ok":
            yield sending
    yield _generation_finding(key, settings, found, generation)


def _generation_finding(
    key: str, settings: AgentConfig, found: MemoryEstimate, generation: Generation
) -> Finding:
    parts = {
        "weights": generation.weights,
        "cache": generation.cache or 0,
        "trainer": generation.trainer,
        "other": generation.other,
    }
    subject, sglang = f"{key} memory, generation", f"{key}.rollout.sglang"
    if settings.rollout.engine == "local":
        fix = f"set {key}.rollout.engine: sglang, or lower batch.prompts"
        return _judged(subject, generation.total, found, parts, fix)
    fix = f"lower {sglang}.memory_fraction"
    if settings.placement.colocated and settings.placement.offload != "all":
        fix = f"set {key}.placement.offload: all, or {fix}"
    judged = _judged(subject, generation.total, found, parts, fix)
    if generation.tokens is None:
        return replace(judged, text=f"{judged.text}; the cache gets what SGLang finds free")
    holds = (
        f"{_sum(generation.total, found.gpu_bytes, parts)}; a server's cache holds {generation.tokens:,} "
        f"tokens, one sequence takes up to {generation.longest:,}, those in flight {generation.wanted:,} in "
        "the mean"
    )
    more = f"{sglang}.cache_tokens" if settings.rollout.sglang.cache_tokens else f"{sglang}.memory_fraction"
    if generation.tokens < generation.longest:
        return Finding("error", subject, f"{holds}: not one fits; raise {more} or {sglang}.tensor")
    if judged.level == "ok" and generation.tokens < FEW * generation.wanted:
        return Finding(
            "warning", subject, f"{holds}: they wait for each other; raise {more} or {sglang}.tensor"
        )
    return replace(judged, text=holds) if judged.level == "ok" else judged


def _judged(subject: str, total: int, found: MemoryEstimate, parts: dict[str, int], fix: str) -> Finding:
    size, text = found.gpu_bytes, _sum(total, found.gpu_bytes, parts)
    if size is None or total <= FULL * size:
        return Finding("ok", subject, text)
    if total <= size:
        return Finding("warning", subject, f"{text}: nearly all; {fix}")
    level: Level = "error" if total > HOPELESS * size else "warning"
    return Finding(level, subject, f"{text}: {gb(total - size)} too much; {fix}")


def _fixes(key: str, settings: AgentConfig) -> str:
    """What makes a trainer smaller, the cheapest first."""
    parallel, optimizer = settings.parallel, settings.optimizer
    fixes = []
    if not optimizer.distributed and parallel.data * parallel.context > 1:
        fixes.append("set optimizer.distributed: true")
    if settings.recompute != "full":
        fixes.append(f"set {key}.recompute: full")
    fixes += ["lower batch.microbatch_tokens", f"raise {key}.parallel.tensor or .pipeline"]
    if not optimizer.cpu_offload and settings.dtype == "bfloat16":
        fixes.append("set optimizer.cpu_offload: true")
    return " or ".join(fixes)


def _sum(total: int, of: int | None, parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {part / GB:.1f}" for name, part in parts.items() if part >= GB / 20)
    return f"{gb(total)} of {'a GPU' if of is None else gb(of)} ({listed})"


def gb(number: int) -> str:
    """For people."""
    if number < GB / 10:
        return f"{number / 10**6:.0f} MB"
    return f"{number / GB:.1f} GB" if number < 100 * GB else f"{number / GB:,.0f} GB"

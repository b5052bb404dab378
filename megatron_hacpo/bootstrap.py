"""From a configuration and an environment to one working process of one agent."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.agent import Agent
from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.members import current
from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.checkpoint.identity import Identity, identify
from megatron_hacpo.checkpoint.pool import Pool
from megatron_hacpo.checkpoint.resume import find_resume_point, load_state, note_attempt, rewind
from megatron_hacpo.checkpoint.saver import Saver
from megatron_hacpo.checkpoint.state import MANIFEST, RANDOM
from megatron_hacpo.checkpoint.steps import checkpoint_folder
from megatron_hacpo.config import RunConfig, dump
from megatron_hacpo.data.source import PromptSource
from megatron_hacpo.evaluation.benchmark import Benchmark, open_benchmarks
from megatron_hacpo.inputs import Prompts, Verifiers, load_tokenizers
from megatron_hacpo.join import Place, join
from megatron_hacpo.learner.window import WindowWatch
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.random_state import set_random_states
from megatron_hacpo.process.heartbeat import STOP_KEY
from megatron_hacpo.report.writer import MetricsWriter
from megatron_hacpo.rollout.base import Rollout
from megatron_hacpo.rollout.embedded import EmbeddedRollout
from megatron_hacpo.rollout.local import LocalEngine
from megatron_hacpo.rollout.sglang.setup import open_rollout
from megatron_hacpo.sampler import Sampler

LOSS_MARGIN_SECONDS = 30.0
"""Beyond `checks.silent_seconds`, until the launcher must have told who is left."""


@contextmanager
def open_agent(config: RunConfig, name: str, start: int = 0) -> Iterator[Agent]:
    """Build this process's part of agent `name` and leave the world together with the others at the end.

    start: the step that the agent goes on after; its state is in the run's folder.

    After an error nothing is waited for: the launcher ends the other processes.
    """
    disable_progress_bar()
    place = join(config, name)
    tokenizers = load_tokenizers(config)
    prompts = Prompts(config, tokenizers)
    policy = _open_policy(place)
    # What the user can have got wrong comes before the servers, which take minutes.
    source, benchmarks = prompts.source(), open_benchmarks(config, prompts)
    identity = writer = None
    if place.world.is_leader:
        identity = identify(config, {n: t.identity for n, t in tokenizers.items()}, source.fingerprint)
        writer = _open_folder(place, identity, start)
    place.world.barrier()
    agent = _assemble(place, tokenizers[name], source, benchmarks, policy, identity, writer)
    if start:
        _go_on(agent, start)
    try:
        yield agent
    finally:
        agent.rollout.close()  # also after an error: servers would outlive this process for a while
    _leave(agent)


def _open_policy(place: Place) -> Policy:
    config, settings = place.config, place.settings
    return Policy(
        Path(settings.model),
        world=place.world,
        dtype=getattr(torch, settings.dtype),
        optimizer=settings.optimizer,
        steps=config.run.steps,
        temperature=settings.rollout.temperature,
        microbatch_tokens=config.batch.microbatch_tokens,
        keep_reference=config.algorithm.kl_coef > 0.0,
        recompute=settings.recompute,
        router_aux_loss_coef=settings.router_aux_loss_coef,
        offload=settings.placement.offload,
    )


def _open_folder(place: Place, identity: Identity, start: int) -> MetricsWriter:
    """The run's folder, which otherwise the launcher has prepared, and in it what this agent reports."""
    config = place.config
    if place.store is None:
        _prepare(config, identity, start)
    return MetricsWriter(
        config.path / place.name,
        tensorboard=config.report.tensorboard,
        wandb=config.report.wandb,
        after=start,
    )


def _prepare(config: RunConfig, identity: Identity, start: int) -> None:
    """The run's folder for a process that no launcher has started."""
    if start and len(config.names) > 1:
        raise ValueError(
            f"--from-step: {start}: without a launcher one agent cannot take the others back; "
            "use `hacpo launch --resume`"
        )
    if start:
        rewind(config.path, find_resume_point(config.path, identity, step=start), config.names)
    config_file = config.path / "config.yaml"
    if not config_file.exists():
        config_file.parent.mkdir(parents=True, exist_ok=True)
        config_file.write_text(dump(config), encoding="utf-8")
        note_attempt(config.path, identity)


def _assemble(
    place: Place,
    tokenizer: AgentTokenizer,
    source: PromptSource,
    benchmarks: list[Benchmark],
    policy: Policy,
    identity: Identity | None,
    writer: MetricsWriter | None,
) -> Agent:
    """The agent of all its parts. Starts its servers and waits for the other agents."""
    config, name, world = place.config, place.name, place.world
    verifiers = Verifiers(config) if world.is_leader else None
    keep = config.exchange.keep_steps
    pool = Pool(config.path, name, keep=keep, since_checkpoint=config.checkpoint.every > 0)
    rollout = _open_rollout(place, policy, tokenizer.stop_ids)
    return Agent(
        config=config,
        name=name,
        index=config.names.index(name),
        sources=place.sources,
        world=world,
        tokenizer=tokenizer,
        source=source,
        benchmarks=benchmarks,
        verifiers=verifiers,
        policy=policy,
        exchange=_open_exchange(place, pool),
        sampler=Sampler(config, name, world, tokenizer, verifiers, pool),
        saver=Saver(
            config.path,
            name,
            Path(place.settings.model),
            world,
            config.checkpoint,
            identity,
            finished=partial(_finished, place, writer),
            warn=partial(_warn, name),
            on_phase=place.on_phase,
        ),
        rollout=rollout,
        writer=writer,
        tracker=CapabilityTracker(config.algorithm.capability_window, config.algorithm.capability_metric),
        window=WindowWatch(config.algorithm),
        on_phase=place.on_phase,
        asked_to_stop=partial(_asked_to_stop, place.store),
    )


def _open_rollout(place: Place, policy: Policy, stop_ids: tuple[int, ...]) -> Rollout:
    """What generates for this agent, by `rollout.engine`; a collective of its ranks."""
    config, name, world, settings = place.config, place.name, place.world, place.settings
    if settings.rollout.engine == "sglang":
        return open_rollout(
            name,
            settings,
            ranks=world,
            device=world.device,
            weights=policy.stage_tensors,
            hf_config=policy.hf_config,
            stop_ids=stop_ids,
            context=config.longest(name),
            run_dir=config.path,
            seed=config.server_seed(name),
            trainer=policy.memory,
            warn=partial(_warn, name),
        )
    engine = None
    if world.is_leader:
        dtype = getattr(torch, settings.dtype)
        engine = LocalEngine(settings.model, dtype=dtype, device=world.device, stop_ids=stop_ids)
    return EmbeddedRollout(engine, policy.export)


def _open_exchange(place: Place, pool: Pool) -> Exchange:
    """Waits for the other agents' leaders."""
    checks, world = place.config.checks, place.world
    return Exchange(
        store=place.store,
        agents=place.sources,
        me=place.name,
        save=pool.save_contribution,
        load=pool.load_contribution,
        timeout=place.timeout,
        survives=checks.on_agent_loss == "continue",
        loss_seconds=checks.silent_seconds + LOSS_MARGIN_SECONDS,
        is_leader=world.is_leader,
        broadcast=world.broadcast,
    )


def _finished(place: Place, writer: MetricsWriter | None, step: int) -> list[str] | None:
    """Tell the run that this agent has saved a step; all agents' names if all of them have."""
    assert writer is not None
    config, store = place.config, place.store
    writer.sync()
    if store is None:
        folder = checkpoint_folder(config.path, step)
        return config.names if all((folder / n / MANIFEST).is_file() for n in config.names) else None
    store.set(f"saved/{step}/{place.name}", "")
    agents = current(store, config.names)
    return agents if store.check([f"saved/{step}/{agent}" for agent in agents]) else None


def _asked_to_stop(store: dist.Store | None) -> bool:
    return store is not None and store.check([STOP_KEY])


def _go_on(agent: Agent, start: int) -> None:
    """Give an agent what it had after step `start`; one that was not there then begins with its model."""
    agent.rollout.release()  # a colocated server's memory
    agent.policy.start_after(start)
    state, own = load_state(agent.config.path, start, agent.name)
    agent.tracker.load_state_dict(state.capability)
    if not own:
        _warn(agent.name, f"joins after step {start} with the weights of {agent.settings.model}")
        return
    folder = checkpoint_folder(agent.config.path, start) / agent.name
    agent.take_on(state, folder)
    if state.layout == agent.settings.parallel.model_dump():  # elsewhere no rank has a stream to go on with
        set_random_states((folder / RANDOM / str(agent.world.rank)).read_bytes())


def _leave(agent: Agent) -> None:
    """End together with the others, all written."""
    agent.exchange.close()
    agent.saver.finish()
    if agent.verifiers is not None:
        agent.verifiers.close()
    if agent.writer is not None:
        agent.writer.close()
    agent.world.close()


def _warn(name: str, text: str) -> None:
    print(f"warning: agent {name}: {text}", file=sys.stderr, flush=True)

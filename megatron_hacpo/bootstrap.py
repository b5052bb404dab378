"""From a configuration and an environment to one working process of one agent."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.agent import Agent
from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.bridge.exchange import Exchange
from megatron_hacpo.bridge.members import current
from megatron_hacpo.checkpoint.identity import Identity, identify
from megatron_hacpo.checkpoint.pool import Pool
from megatron_hacpo.checkpoint.resume import find_resume_point, load_state, note_attempt, rewind
from megatron_hacpo.checkpoint.saver import Saver
from megatron_hacpo.checkpoint.state import MANIFEST, RANDOM
from megatron_hacpo.checkpoint.steps import checkpoint_folder
from megatron_hacpo.config import RunConfig, dump
from megatron_hacpo.evaluation.benchmark import open_benchmarks
from megatron_hacpo.inputs import Prompts, Verifiers, load_tokenizers
from megatron_hacpo.learner.window import WindowWatch
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.random_state import set_random_states
from megatron_hacpo.process.heartbeat import STOP_KEY, Heartbeat
from megatron_hacpo.process.network import use_interface_towards
from megatron_hacpo.process.store import STORE_VARIABLE, connect, store_address
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
    on_phase = _on_phase(f"{name}.rank{_number('RANK', 0)}")
    torch.set_num_threads(_number("OMP_NUM_THREADS", 1))
    settings = config.agents[name]
    index = config.names.index(name)
    sources = config.names if config.algorithm.share else [name]
    timeout = timedelta(minutes=config.exchange.timeout_minutes)
    store = None
    if (address := store_address()) is not None:
        use_interface_towards(address[0])
        store = connect(address, timeout)
    if store is None and len(sources) > 1:
        raise ValueError(
            f"{STORE_VARIABLE}: not set, but {name} exchanges with {len(sources) - 1} other agents; "
            "start the run with `hacpo launch`, or set it to the host:port of the run's TCPStore"
        )
    layout = runtime.Layout(**settings.parallel.model_dump())
    world_store, rank = _world_store(store, name, layout.world_size)
    world = runtime.start(store=world_store, rank=rank, layout=layout, seed=config.run.seed, timeout=timeout)
    tokenizers = load_tokenizers(config)
    prompts = Prompts(config, tokenizers)
    policy = _open_policy(config, name, world)
    # What the user can have got wrong comes before the servers, which take minutes.
    source, benchmarks = prompts.source(), open_benchmarks(config, prompts)
    writer = identity = None
    if world.is_leader:
        identity = identify(config, {n: t.identity for n, t in tokenizers.items()}, source.fingerprint)
        if store is None:  # otherwise the launcher does it
            _prepare(config, identity, start)
        writer = MetricsWriter(
            config.path / name,
            tensorboard=config.report.tensorboard,
            wandb=config.report.wandb,
            after=start,
        )
    world.barrier()
    verifiers = Verifiers(config) if world.is_leader else None
    keep = config.exchange.keep_steps
    pool = Pool(config.path, name, keep=keep, since_checkpoint=config.checkpoint.every > 0)
    rollout = _open_rollout(config, name, world, policy, tokenizers[name].stop_ids)
    agent = Agent(
        config=config,
        name=name,
        index=index,
        sources=sources,
        world=world,
        tokenizer=tokenizers[name],
        source=source,
        benchmarks=benchmarks,
        verifiers=verifiers,
        policy=policy,
        exchange=_open_exchange(config, name, sources, store, world, pool, timeout),
        sampler=Sampler(config, name, world, tokenizers[name], verifiers, pool),
        saver=Saver(
            config.path,
            name,
            Path(settings.model),
            world,
            config.checkpoint,
            identity,
            finished=partial(_finished, store, config, name, writer),
            warn=partial(_warn, name),
            on_phase=on_phase,
        ),
        rollout=rollout,
        writer=writer,
        tracker=CapabilityTracker(config.algorithm.capability_window, config.algorithm.capability_metric),
        window=WindowWatch(config.algorithm),
        on_phase=on_phase,
        asked_to_stop=partial(_asked_to_stop, store),
    )
    if start:
        _go_on(agent, start)
    try:
        yield agent
    finally:
        rollout.close()  # also after an error: servers would outlive this process for a while
    agent.exchange.close()
    agent.saver.finish()
    if verifiers is not None:
        verifiers.close()
    if writer is not None:
        writer.close()
    world.close()


def _open_policy(config: RunConfig, name: str, world: runtime.World) -> Policy:
    settings = config.agents[name]
    return Policy(
        Path(settings.model),
        world=world,
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


def _open_exchange(
    config: RunConfig,
    name: str,
    sources: list[str],
    store: dist.Store | None,
    world: runtime.World,
    pool: Pool,
    timeout: timedelta,
) -> Exchange:
    """Waits for the other agents' leaders."""
    return Exchange(
        store=store,
        agents=sources,
        me=name,
        save=pool.save_contribution,
        load=pool.load_contribution,
        timeout=timeout,
        survives=config.checks.on_agent_loss == "continue",
        loss_seconds=config.checks.silent_seconds + LOSS_MARGIN_SECONDS,
        is_leader=world.is_leader,
        broadcast=world.broadcast,
    )


def _warn(name: str, text: str) -> None:
    print(f"warning: agent {name}: {text}", file=sys.stderr, flush=True)


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


def _finished(
    store: dist.Store | None, config: RunConfig, name: str, writer: MetricsWriter | None, step: int
) -> list[str] | None:
    """Tell the run that this agent has saved a step; all agents' names if all of them have."""
    assert writer is not None
    writer.sync()
    if store is None:
        folder = checkpoint_folder(config.path, step)
        return config.names if all((folder / n / MANIFEST).is_file() for n in config.names) else None
    store.set(f"saved/{step}/{name}", "")
    agents = current(store, config.names)
    return agents if store.check([f"saved/{step}/{agent}" for agent in agents]) else None


def _asked_to_stop(store: dist.Store | None) -> bool:
    return store is not None and store.check([STOP_KEY])


def _on_phase(name: str) -> Callable[[int, str], None]:
    """Tells the launcher, if there is one, the step and the phase that begins; from now on it hears us."""
    address = store_address()
    return (lambda step, phase: None) if address is None else Heartbeat(address, name).phase


def _open_rollout(
    config: RunConfig, name: str, world: runtime.World, policy: Policy, stop_ids: tuple[int, ...]
) -> Rollout:
    """What generates for this agent, by `rollout.engine`; a collective of its ranks."""
    settings = config.agents[name]
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
            trainer=policy,
            warn=partial(_warn, name),
        )
    engine = None
    if world.is_leader:
        dtype = getattr(torch, settings.dtype)
        engine = LocalEngine(settings.model, dtype=dtype, device=world.device, stop_ids=stop_ids)
    return EmbeddedRollout(engine, policy.export)


def _world_store(store: dist.Store | None, name: str, world_size: int) -> tuple[dist.Store, int]:
    """Where this agent's ranks meet, and this process's rank: the run's store, else torchrun's, else none."""
    rank, size = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if rank >= size:
        raise ValueError(f"RANK: {rank} is not below WORLD_SIZE = {size}; ranks count from 0")
    if size != world_size:
        raise ValueError(
            f"agents.{name}.parallel: its sizes multiply to {world_size}, but {size} processes were started; "
            "start as many as the product, or change the sizes"
        )
    if store is not None:
        return dist.PrefixStore(f"world/{name}", store), rank
    if "MASTER_ADDR" in os.environ:
        env_store, _, _ = next(dist.rendezvous("env://", rank=rank, world_size=size))
        return env_store, rank
    if size > 1:
        raise ValueError(
            f"MASTER_ADDR: not set, but agent {name} has {size} processes; use torchrun or `hacpo launch`"
        )
    return dist.HashStore(), rank


def _number(variable: str, default: int) -> int:
    """A whole number from the environment; of a list such as OMP_NUM_THREADS=4,2 the first."""
    value = os.environ.get(variable, str(default)).split(",")[0]
    if not value.isdigit():
        raise ValueError(f"{variable}: {value!r} is not a whole number; correct the environment")
    return int(value)

"""From an agent's configuration to its servers, checked and ready for weights."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from megatron_hacpo.config import AgentConfig
from megatron_hacpo.hf.families import tensor_shapes
from megatron_hacpo.process.store import connect, store_address
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.members import Member, Members, Memory, Place
from megatron_hacpo.rollout.sglang.remote import KEY_VARIABLE, RemotePlace
from megatron_hacpo.rollout.sglang.rollout import SGLangRollout
from megatron_hacpo.rollout.sglang.server import (
    CONTEXT_MARGIN,
    GPU_VARIABLE,
    LocalPlace,
    new_key,
    server_spec,
)
from megatron_hacpo.rollout.sglang.sync import ExpectedWeights, OwnWeights, Ranks, WeightSync
from megatron_hacpo.rollout.sglang.transports import (
    DiskTransport,
    DistributedTransport,
    TensorTransport,
    Transport,
)
from megatron_hacpo.rollout.sglang.turns import Trainer, Turns


def open_rollout(
    name: str,
    settings: AgentConfig,
    *,
    ranks: Ranks,
    device: torch.device,
    weights: Callable[[], Iterator[tuple[str, torch.Tensor]]],
    hf_config: Any,
    stop_ids: tuple[int, ...],
    context: int,
    run_dir: Path,
    seed: int,
    warn: Callable[[str], None],
    trainer: Trainer,
) -> SGLangRollout:
    """Start or find the servers of agent `name`; a collective of its ranks.

    weights: this pipeline stage's (Hugging Face name, full tensor). context: tokens of the longest sequence.
    run_dir: gets the servers' logs and, with the transport `disk`, weights. warn: told in one line of servers
    that are lost or come back. trainer: of whose memory colocated servers have the use.
    Raises ValueError for servers that are not what the configuration says, RuntimeError for one that does not
    start.
    """
    sglang = settings.rollout.sglang
    members: Members | None = None
    loop: LoopThread | None = None

    def hold(tag: Memory, held: bool) -> None:
        if members is not None and loop is not None:
            loop.run(members.hold(tag, held))

    turns = Turns(trainer, barrier=ranks.barrier, hold=hold) if settings.placement.colocated else None
    if ranks.is_leader:
        loop = LoopThread()
        members = _start(name, settings, context, run_dir, seed, device, warn, loop)
    kind = _kind(settings, ranks, warn)
    sync = WeightSync(
        ranks,
        weights,
        ExpectedWeights(tensor_shapes(hf_config), getattr(torch, settings.dtype)),
        lambda loop: _transport(kind, name, settings, run_dir, ranks, device, loop),
        bucket_bytes=sglang.bucket_mb * 2**20,
        checking_transport=(
            (lambda loop: _files(settings, run_dir / "weights" / f"{name}-check", ranks, loop))
            if sglang.verify_sync and kind != "disk"
            else None
        ),
    )
    return SGLangRollout(
        ranks,
        sync,
        turns,
        members,
        loop,
        stop_ids=stop_ids,
        max_concurrent=sglang.max_concurrent,
        hang_seconds=sglang.hang_seconds,
    )


def open_engine(
    name: str,
    settings: AgentConfig,
    *,
    ranks: Ranks,
    device: torch.device,
    stop_ids: tuple[int, ...],
    context: int,
    run_dir: Path,
    warn: Callable[[str], None],
) -> SGLangRollout:
    """As `open_rollout`, of managed servers that generate with the weights of their folder; ranks: one."""
    sglang = settings.rollout.sglang
    loop = LoopThread()
    members = _start(name, settings, context, run_dir, 0, device, warn, loop)
    rollout = SGLangRollout(
        ranks,
        OwnWeights(loop, lambda number: members.all[number].client),
        None,
        members,
        loop,
        stop_ids=stop_ids,
        max_concurrent=sglang.max_concurrent,
        hang_seconds=sglang.hang_seconds,
    )
    rollout.sync_weights(0)
    return rollout


def _start(
    name: str,
    settings: AgentConfig,
    context: int,
    run_dir: Path,
    seed: int,
    device: torch.device,
    warn: Callable[[str], None],
    loop: LoopThread,
) -> Members:
    """All servers of an agent, answering and looked over."""
    members = Members(
        _members(name, settings, context, run_dir, seed, device),
        start_seconds=60.0 * settings.rollout.sglang.start_minutes,
        warn=warn,
    )
    try:
        loop.run(members.start_all())
        for member in members.all:
            loop.run(_check(member, settings, context + CONTEXT_MARGIN))
    except BaseException:
        loop.run(members.close())
        raise
    return members


def _kind(settings: AgentConfig, ranks: Ranks, warn: Callable[[str], None]) -> str:
    """The transport that `auto` stands for, the same on all ranks: what two versions of torch share are files
    for certain, neither handles of a GPU's memory nor NCCL."""
    sglang = settings.rollout.sglang
    if sglang.transport != "auto":
        return sglang.transport
    kind = "tensor" if settings.placement.colocated else "distributed"
    if ranks.is_leader:
        theirs, ours = _servers_torch(sglang.python), torch.__version__
        if theirs is not None and theirs.partition("+")[0] != ours.partition("+")[0]:
            warn(
                f"rollout.sglang.transport: auto is disk, as the servers have torch {theirs} and the trainer "
                f"{ours}; {kind} is faster, if it works between them: benchmarks/gpu_sglang.py"
            )
            kind = "disk"
    return ranks.broadcast(kind.encode() if ranks.is_leader else None).decode()


def _transport(
    kind: str,
    name: str,
    settings: AgentConfig,
    run_dir: Path,
    ranks: Ranks,
    device: torch.device,
    loop: LoopThread,
) -> Transport:
    sglang = settings.rollout.sglang
    if kind == "tensor":
        return TensorTransport(loop)
    if kind == "disk":
        folder = Path(sglang.weights_dir) / name if sglang.weights_dir else run_dir / "weights" / name
        return _files(settings, folder, ranks, loop)
    timeout = timedelta(seconds=sglang.hang_seconds)
    group = f"{name}-stage{ranks.stage}-{os.getpid()}"
    theirs = _servers_torch(sglang.python) or "not known"
    return DistributedTransport(loop, group, device, timeout, theirs)


def _files(settings: AgentConfig, folder: Path, ranks: Ranks, loop: LoopThread) -> DiskTransport:
    """A server has as long for them as for its start."""
    return DiskTransport(loop, folder, ranks.stage, 60.0 * settings.rollout.sglang.start_minutes)


def _servers_torch(python: str | None) -> str | None:
    """The version of torch beside an interpreter of this node; None if that is not here. Servers do not tell
    theirs."""
    if python is None or not Path(python).is_file():
        return None
    code = "from importlib.metadata import version; print(version('torch'))"
    return subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def _members(
    name: str, settings: AgentConfig, context: int, run_dir: Path, seed: int, device: torch.device
) -> list[Member]:
    sglang = settings.rollout.sglang
    if sglang.addresses:
        key = os.environ.get(sglang.key_variable)
        return [
            Member(number, ServerClient(url, key), tensor=1) for number, url in enumerate(sglang.addresses)
        ]
    places = _places(name, settings, context, run_dir, seed, device)
    return [_started(number, place, settings) for number, place in enumerate(places)]


def _places(
    name: str, settings: AgentConfig, context: int, run_dir: Path, seed: int, device: torch.device
) -> list[Place]:
    """Where the run's own servers are started: on their nodes if those wait for orders, else here."""
    sglang = settings.rollout.sglang
    if (key := os.environ.get(KEY_VARIABLE)) is not None:
        address = store_address()
        assert address is not None, "a run whose servers are started on their nodes has a store"
        store = connect(address, timedelta(minutes=sglang.start_minutes))
        return [RemotePlace(store, run_dir, name, number, key) for number in range(sglang.servers)]
    key = new_key()
    first_gpu = int(os.environ.get(GPU_VARIABLE, "0")) if device.type == "cuda" else None
    specs = (
        server_spec(
            settings,
            context=context,
            host=sglang.host,
            first_gpu=None if first_gpu is None else first_gpu + number * sglang.tensor,
            seed=seed + number,
            key=key,
        )
        for number in range(sglang.servers)
    )
    return [LocalPlace(spec, run_dir, name, number) for number, spec in enumerate(specs)]


def _started(number: int, place: Place, settings: AgentConfig) -> Member:
    server = place()
    sglang = settings.rollout.sglang
    return Member(
        number,
        server.client,
        tensor=sglang.tensor,
        server=server,
        start=place,
        restarts_left=sglang.restarts,
    )


async def _check(member: Member, settings: AgentConfig, needed: int) -> None:
    """ValueError unless the server is one that this agent can use."""
    try:
        said = await member.client.info()
    except ServerError as error:
        raise ValueError(f"rollout.sglang: {error}") from None
    member.tensor, member.cache_tokens = said.tensor, said.cache_tokens
    where = f"rollout.sglang: {member.client.url}"
    if not _same_model(Path(said.model_path), Path(settings.model)):
        raise ValueError(
            f"{where} serves {said.model_path}, the agent is {settings.model}; start it with that"
        )
    if said.dtype != settings.dtype:
        raise ValueError(
            f"{where} computes in {said.dtype}, the agent in {settings.dtype}; start it with that"
        )
    if said.context_length < needed:
        raise ValueError(
            f"{where} has a context of {said.context_length} tokens, sequences need {needed} "
            f"(the longest of rollouts and benchmarks + {CONTEXT_MARGIN}); start it with more"
        )


def _same_model(served: Path, model: Path) -> bool:
    """By its configuration if both folders can be read here, else by the folder's name."""
    if not (served / "config.json").is_file():
        return served.name == model.name
    return bool(_config(served) == _config(model))


def _config(folder: Path) -> Any:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))

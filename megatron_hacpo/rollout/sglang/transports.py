"""Three ways for weights into servers, behind one interface.

The order of one sync: `prepare` on every server (by the leader), `send` bucket by bucket (by one rank of each
pipeline stage, stage by stage), `finish` on every server (by the leader). Nothing is generated in between.
"""

import base64
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from megatron_hacpo.hf.write import write_weights
from megatron_hacpo.process.network import own_address
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError, ServerGone
from megatron_hacpo.rollout.sglang.loop import LoopThread

T = TypeVar("T")

Bucket = list[tuple[str, torch.Tensor]]
"""(Hugging Face name, full tensor), non-empty."""


@dataclass(frozen=True)
class Target:
    """A server that gets weights. number, incarnation: which of the agent's, and which process of it.
    ranks: its tensor-parallel size."""

    number: int
    incarnation: int
    ranks: int
    client: ServerClient


class Transport(Protocol):
    """Raises ServerError where a server does not take part; the sync then starts anew without it."""

    async def prepare(self, target: Target) -> None:
        """Stop generating and get ready for weights."""
        ...

    def send(self, targets: Sequence[Target], bucket: Bucket) -> None:
        """One bucket to all servers. Called in a thread, one bucket after the other."""
        ...

    async def finish(self, target: Target, version: str) -> None:
        """The weights are complete: know them as `version` and generate again."""
        ...

    def close(self) -> None: ...


async def pause(target: Target) -> None:
    """Requests stay where they are; their keys and values go with the weights, by `flush_cache`."""
    await target.client.post("/pause_generation", {"mode": "retract"})


async def _begin(target: Target) -> None:
    await pause(target)
    try:
        await target.client.post("/begin_weight_update", {})
    except ServerError as error:
        if "already open" not in str(error):  # what an interrupted sync left behind
            raise


async def _end(target: Target, version: str) -> None:
    await target.client.post("/end_weight_update", {})
    await target.client.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})
    await target.client.post("/continue_generation", {})


class DistributedTransport:
    """Broadcasts over a process group of the sending rank and all servers' ranks: gloo on CPUs, NCCL on GPUs.
    The group is made anew when the servers change."""

    def __init__(
        self,
        loop: LoopThread,
        name: str,
        device: torch.device,
        timeout: timedelta,
        servers_torch: str = "not known",
    ) -> None:
        """name: unlike that of any other rank that sends to the same servers. servers_torch: its version."""
        self._loop = loop
        self._servers_torch = servers_torch
        self._name = name
        self._device = device
        self._timeout = timeout
        self._store: dist.TCPStore | None = None
        self._group: Any = None
        self._group_name = ""
        self._joined: tuple[tuple[int, int], ...] = ()
        self._made = 0

    async def prepare(self, target: Target) -> None:
        await _begin(target)

    async def finish(self, target: Target, version: str) -> None:
        await _end(target, version)

    def send(self, targets: Sequence[Target], bucket: Bucket) -> None:
        """One broadcast per tensor, from where it lies: over gloo, a flat copy takes as long again."""
        self._join(targets)
        tensors = [tensor.contiguous() for _, tensor in bucket]
        request = {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
            "shapes": [list(tensor.shape) for tensor in tensors],
            "group_name": self._group_name,
            "flush_cache": True,
        }
        posts = [
            self._loop.start(t.client.post("/update_weights_from_distributed", request)) for t in targets
        ]
        try:
            # NCCL connects in the first broadcast, which waits for the others as gloo's constructor does.
            self._abandonable(lambda: _broadcast(self._group, tensors), posts)
            for post in posts:
                post.result()
        except RuntimeError as error:
            self._leave()  # the servers that still wait for bytes see the connection go
            if isinstance(error, ServerError):
                raise
            raise ServerGone(f"weights could not be sent: {error}; {self._versions()}") from error

    def close(self) -> None:
        self._leave()

    def _join(self, targets: Sequence[Target]) -> None:
        """A group of this rank and the servers' ranks, unless it is there."""
        members = tuple((t.number, t.incarnation) for t in targets)
        if self._group is not None and members == self._joined:
            return
        if self._group is not None:
            name = self._group_name
            self._leave()
            for target in targets:
                self._loop.run(_destroy_group(target, name))
        address = own_address(urlsplit(targets[0].client.url).hostname or "")
        if self._store is None:
            self._store = dist.TCPStore(
                address, 0, is_master=True, wait_for_workers=False, timeout=self._timeout
            )
        self._made += 1
        self._group_name = f"{self._name}-{self._made}"
        backend = "nccl" if self._device.type == "cuda" else "gloo"
        world, offset, posts = 1 + sum(t.ranks for t in targets), 1, []
        for target in targets:
            request = {
                "master_address": address,
                "master_port": self._store.port,
                "rank_offset": offset,
                "world_size": world,
                "group_name": self._group_name,
                "backend": backend,
            }
            posts.append(self._loop.start(target.client.post("/init_weights_update_group", request)))
            offset += target.ranks
        # The prefixes under which SGLang's own torch looks for the others.
        inner = dist.PrefixStore(f"{self._group_name}/", dist.PrefixStore(self._group_name, self._store))
        store = dist.PrefixStore("cpu/" if backend == "gloo" else "cuda/", inner)
        try:
            self._group = self._abandonable(lambda: _make_group(backend, store, world, self._timeout), posts)
            for post in posts:
                post.result()
        except RuntimeError as error:
            if isinstance(error, ServerError):
                raise
            urls = ", ".join(target.client.url for target in targets)
            raise ServerGone(f"no process group with {urls}: {error}; {self._versions()}") from error
        self._joined = members

    def _abandonable(self, action: Callable[[], T], posts: "Sequence[Future[Any]]") -> T:
        """What `action` returns, which waits for the servers: in a thread that is left alone when a request
        fails, with its error, or when the time is over."""
        done: Future[T] = Future()
        threading.Thread(target=_run, args=(done, action), daemon=True).start()
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not done.done():
            for post in posts:
                if post.done():
                    post.result()
            if time.monotonic() > deadline:
                raise RuntimeError(f"not done within {self._timeout.total_seconds():g} s")
            time.sleep(0.0005)
        return done.result()

    def _versions(self) -> str:
        return (
            f"the servers' torch is {self._servers_torch}, the trainer's {torch.__version__}: "
            "if they do not go together, use transport: disk"
        )

    def _leave(self) -> None:
        if self._group is not None:
            self._group.shutdown()
        self._group, self._joined = None, ()


def _run(done: "Future[T]", action: Callable[[], T]) -> None:
    try:
        done.set_result(action())
    except BaseException as error:  # the one who waits for it raises it
        done.set_exception(error)


def _make_group(backend: str, store: dist.Store, world: int, timeout: timedelta) -> Any:
    """A process group in which this process is rank 0."""
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, 0, world, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, 0, world, options)


def _broadcast(group: Any, tensors: Sequence[torch.Tensor]) -> None:
    """From rank 0, to its end."""
    works = [group.broadcast(tensor, 0) for tensor in tensors]
    for work in works:
        work.wait()
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)


async def _destroy_group(target: Target, name: str) -> None:
    try:
        await target.client.post("/destroy_weights_update_group", {"group_name": name})
    except ServerError as error:
        if "does not exist" not in str(error):
            raise


class TensorTransport:
    """Tensors in the requests themselves: as handles of GPU memory on a GPU's own node, else as bytes."""

    def __init__(self, loop: LoopThread) -> None:
        self._loop = loop

    async def prepare(self, target: Target) -> None:
        await _begin(target)

    async def finish(self, target: Target, version: str) -> None:
        await _end(target, version)

    def send(self, targets: Sequence[Target], bucket: Bucket) -> None:
        payload = serialized(bucket)
        posts = [
            self._loop.start(
                target.client.post(
                    "/update_weights_from_tensor",
                    {"serialized_named_tensors": [payload] * target.ranks, "flush_cache": True},
                )
            )
            for target in targets
        ]
        for post in posts:
            post.result()

    def close(self) -> None: ...


def serialized(bucket: Bucket) -> str:
    """What SGLang unpickles: a list of (name, tensor). On a GPU tensors become CUDA IPC handles, good until
    the request is answered; on a CPU copies, since a view would take its whole storage along.
    """
    if bucket[0][1].is_cuda:
        data = bytes(ForkingPickler.dumps([(name, tensor.contiguous()) for name, tensor in bucket]))
    else:
        data = pickle.dumps([(name, tensor.clone()) for name, tensor in bucket])
    return base64.b64encode(data).decode()


class DiskTransport:
    """Weights as files in a folder that trainer and servers share; servers see a complete folder or none."""

    def __init__(self, loop: LoopThread, folder: Path, stage: int, seconds: float) -> None:
        """folder: this transport's own. stage: of the pipeline; each writes files of its own. seconds: in
        which a server has read them."""
        self._loop = loop
        self._seconds = seconds
        self._partial = folder / ".partial"
        self._folder = folder
        self._stage = stage
        self._files = 0

    async def prepare(self, target: Target) -> None:
        await pause(target)

    def send(self, targets: Sequence[Target], bucket: Bucket) -> None:
        part = self._partial / f"stage{self._stage:03}-{self._files:05}"
        part.mkdir(parents=True)
        write_weights(bucket, part)
        (part / "model.safetensors").rename(part.with_suffix(".safetensors"))
        part.rmdir()
        self._files += 1

    async def finish(self, target: Target, version: str) -> None:
        complete = self._folder / f"version-{version}"
        request = {"model_path": str(complete.absolute()), "weight_version": version, "flush_cache": True}
        await target.client.post("/update_weights_from_disk", request, seconds=self._seconds)
        await target.client.post("/continue_generation", {})

    def start(self) -> None:
        """Before a sync, on the leader: nothing of an earlier one is left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._partial.mkdir(parents=True)
        self._files = 0

    def complete(self, version: str) -> None:
        """After all stages have sent, on the leader."""
        self._partial.rename(self._folder / f"version-{version}")

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

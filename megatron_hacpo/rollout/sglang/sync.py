"""One sync: the policy's weights, stage by stage and bucket by bucket, into the servers, and proof of it."""

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_hacpo.hf.write import by_bytes
from megatron_hacpo.rollout.base import finite
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError, ServerGone
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.transports import DiskTransport, Target, Transport

Tensors = Iterator[tuple[str, torch.Tensor]]

ALIVE_SECONDS = 30.0
"""In which a server that lives answers."""


class Ranks(Protocol):
    """What a sync needs to know of the agent's world: this rank's pipeline stage, of how many, and whether it
    is the one of its stage that sends."""

    @property
    def is_leader(self) -> bool: ...
    @property
    def stage(self) -> int: ...
    @property
    def stages(self) -> int: ...
    @property
    def sends(self) -> bool: ...

    def barrier(self) -> None: ...

    def first_of_stage(self, stage: int) -> int:
        """The rank that sends for a stage."""
        ...

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank. Others pass None."""
        ...


class SyncFailed(RuntimeError):  # noqa: N818 - reads as what happened
    """Servers did not take part. reasons: by their number."""

    def __init__(self, reasons: Mapping[int, str]) -> None:
        super().__init__("; ".join(reasons.values()))
        self.reasons = dict(reasons)


@dataclass(frozen=True)
class ExpectedWeights:
    """What the model has, by its configuration: shape by Hugging Face name, and one dtype."""

    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype


Servers = Sequence[tuple[int, int, int, str, str | None]]
"""(number, incarnation, ranks, url, key) of each."""


class Sync(Protocol):
    def update(self, targets: Servers, version: int) -> None:
        """Have the servers generate with the weights `version`. Raises SyncFailed if some did not answer."""
        ...

    def close(self) -> None: ...


class OwnWeights:
    """Servers that keep the weights of their folder and only learn how they are called."""

    def __init__(self, loop: LoopThread, clients: Callable[[int], ServerClient]) -> None:
        """clients: by a server's number, in `loop`."""
        self._loop = loop
        self._clients = clients

    def update(self, targets: Servers, version: int) -> None:
        failed = {}
        request = {"new_version": str(version), "abort_all_requests": False}
        for number, *_ in targets:
            try:
                self._loop.run(self._clients(number).post("/update_weight_version", request))
            except ServerError as error:
                failed[number] = str(error)
        if failed:
            raise SyncFailed(failed)

    def close(self) -> None:
        """Nothing is open."""


class WeightSync:
    """Every rank of an agent has one; `update` is a collective of the world."""

    def __init__(
        self,
        ranks: Ranks,
        weights: Callable[[], Tensors],
        expected: ExpectedWeights,
        transport: Callable[[LoopThread], Transport],
        *,
        bucket_bytes: int,
        checking_transport: Callable[[LoopThread], DiskTransport] | None = None,
    ) -> None:
        """weights: this stage's (Hugging Face name, full tensor), a collective of the stage. transport: made
        once. checking_transport: for a second copy to compare with after each sync; None compares nothing.
        """
        self._ranks = ranks
        self._weights = weights
        self._expected = expected
        self._bucket_bytes = bucket_bytes
        self._loop = LoopThread()
        self._transport = transport(self._loop)
        self._checking = checking_transport(self._loop) if checking_transport else None
        self._clients: dict[str, ServerClient] = {}
        self._checked = False

    def update(self, targets: Servers, version: int) -> None:
        """Give the servers the current weights and let them generate.

        targets: on the leader; the others' is ignored.
        Raises, on every rank alike, SyncFailed if servers did not answer or refused; RuntimeError, naming the
        tensor, if weights are not finite, are not those of the model, or did not arrive.
        """
        ranks = self._ranks
        listed = ranks.broadcast(json.dumps(list(targets)).encode() if ranks.is_leader else None)
        servers = [self._target(*entry) for entry in json.loads(listed)]
        if not self._checked:
            self._check_names(version)
            self._checked = True
        self._pass(servers, self._transport, version)
        if self._checking is not None:
            before = self._checksums(servers)
            self._pass(servers, self._checking, version)
            self._compare(before, self._checksums(servers), version)

    def close(self) -> None:
        self._transport.close()
        if self._checking is not None:
            self._checking.close()
        for client in self._clients.values():
            self._loop.run(client.close())
        self._loop.close()

    def _pass(self, servers: Sequence[Target], transport: Transport, version: int) -> None:
        """All weights once, over one transport."""
        if self._ranks.is_leader and isinstance(transport, DiskTransport):
            transport.start()
        self._on_servers(servers, lambda target: transport.prepare(target))
        for stage in range(self._ranks.stages):
            failure = self._send_stage(servers, transport, version) if stage == self._ranks.stage else None
            self._agree(failure, source=self._ranks.first_of_stage(stage))
        if self._ranks.is_leader and isinstance(transport, DiskTransport):
            transport.complete(str(version))
        self._on_servers(servers, lambda target: self._finish(transport, target, str(version)))

    async def _finish(self, transport: Transport, target: Target, version: str) -> None:
        await transport.finish(target, version)
        reported = await target.client.weight_version()
        if reported != version:
            raise ServerError(f"{target.client.url} reports the weights {reported} after a sync of {version}")

    def _send_stage(
        self, servers: Sequence[Target], transport: Transport, version: int
    ) -> dict[int, str] | None:
        """This stage's buckets, the next one gathered while one is sent. Reasons by server if some failed."""
        if not self._ranks.sends:
            for _ in self._weights():
                pass
            return None
        buckets = by_bytes(finite(self._weights(), version), self._bucket_bytes)
        error: ServerError | None = None
        with ThreadPoolExecutor(max_workers=1) as thread:
            sent: Future[None] | None = None
            for bucket in buckets:  # to its end in any case: other ranks gather along
                try:
                    if sent is not None:
                        sent.result()
                    sent = thread.submit(transport.send, servers, bucket) if error is None else None
                except ServerError as failed:
                    error, sent = failed, None
            try:
                if sent is not None:
                    sent.result()
            except ServerError as failed:
                error = failed
        return self._dead(dict.fromkeys(servers, error)) if error is not None else None

    def _dead(self, failed: Mapping[Target, ServerError]) -> dict[int, str]:
        """Which of these servers do not live any more, with what they failed with. Raises that if all do:
        another attempt would not help."""
        answers = {target: self._loop.start(target.client.answers(ALIVE_SECONDS)) for target in failed}
        dead = {t.number: str(error) for t, error in failed.items() if not answers[t].result()}
        if not dead:
            raise next(iter(failed.values()))
        return dead

    def _on_servers(
        self, servers: Sequence[Target], action: Callable[[Target], Coroutine[Any, Any, None]]
    ) -> None:
        """The leader does it with all servers at once; every rank learns which are dead. One that did not
        answer in time is, whatever it answers later."""
        dead: dict[int, str] = {}
        if self._ranks.is_leader:
            refused: dict[Target, ServerError] = {}
            futures = [(t, self._loop.start(action(t))) for t in servers]
            for target, future in futures:
                try:
                    future.result()
                except ServerGone as error:
                    dead[target.number] = str(error)
                except ServerError as error:
                    refused[target] = error
            if refused and not dead:
                dead = self._dead(refused)
        self._agree(dead, source=0)

    def _agree(self, failure: Mapping[int, str] | None, *, source: int) -> None:
        """Raise SyncFailed on every rank if rank `source` has a failure to tell."""
        told = self._ranks.broadcast(
            json.dumps(list((failure or {}).items())).encode() if self._is(source) else None, source
        )
        reasons = dict(json.loads(told))
        if reasons:
            raise SyncFailed({int(number): reason for number, reason in reasons.items()})

    def _is(self, rank: int) -> bool:
        return self._ranks.is_leader if rank == 0 else self._ranks.sends and self._own_first() == rank

    def _own_first(self) -> int:
        return self._ranks.first_of_stage(self._ranks.stage)

    def _check_names(self, version: int) -> None:
        """All stages together have each tensor of the model once: a server would take less without a word."""
        mine = [(name, list(t.shape), str(t.dtype)) for name, t in finite(self._weights(), version)]
        seen: dict[str, tuple[int, ...]] = {}
        for stage in range(self._ranks.stages):
            source = self._ranks.first_of_stage(stage)
            told = self._ranks.broadcast(json.dumps(mine).encode() if self._is(source) else None, source)
            for name, shape, dtype in json.loads(told):
                if name in seen:
                    raise RuntimeError(f"{name} comes from two pipeline stages")
                if dtype != str(self._expected.dtype):
                    raise RuntimeError(f"{name} is {dtype}, the model is {self._expected.dtype}")
                seen[name] = tuple(shape)
        wrong = sorted(
            name for name in seen.keys() | self._expected.shapes.keys() if self._differs(name, seen)
        )
        if wrong:
            name = wrong[0]
            raise RuntimeError(
                f"{name} is {seen.get(name, 'absent')} in the policy and "
                f"{self._expected.shapes.get(name, 'absent')} in the model ({len(wrong)} such tensors)"
            )

    def _differs(self, name: str, seen: Mapping[str, tuple[int, ...]]) -> bool:
        expected = self._expected.shapes.get(name)
        return expected is None or seen.get(name) != tuple(expected)

    def _checksums(self, servers: Sequence[Target]) -> list[list[dict[str, str]]]:
        if not self._ranks.is_leader:
            return []
        return [self._loop.run(target.client.checksums()) for target in servers]

    def _compare(
        self, sent: list[list[dict[str, str]]], read: list[list[dict[str, str]]], version: int
    ) -> None:
        """On the leader: what was sent against what was read from files."""
        for server, (mine, others) in enumerate(zip(sent, read, strict=True)):
            for rank, (a, b) in enumerate(zip(mine, others, strict=True)):
                wrong = sorted(name for name in a | b if a.get(name) != b.get(name))
                if wrong:
                    raise RuntimeError(
                        f"version {version} arrived damaged: {len(wrong)} tensors of server {server}, rank "
                        f"{rank}, differ from their copies on the disk, the first is {wrong[0]}"
                    )

    def _target(self, number: int, incarnation: int, ranks: int, url: str, key: str | None) -> Target:
        if url not in self._clients:
            self._clients[url] = ServerClient(url, key)
        return Target(number, incarnation, ranks, self._clients[url])

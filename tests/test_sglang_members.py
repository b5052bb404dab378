"""Servers that die, refuse or come back, as the sync and the hand-over of memory see them; without SGLang."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import pytest
import torch
from learner_steps import pair_config

from megatron_hacpo.rollout.sglang import setup
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError, ServerGone
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.members import Member, Members
from megatron_hacpo.rollout.sglang.server import ServerSpec, server_spec
from megatron_hacpo.rollout.sglang.sync import ExpectedWeights, SyncFailed, WeightSync
from megatron_hacpo.rollout.sglang.transports import DistributedTransport

WEIGHT = torch.ones(2, 2)


class Client:
    """Of a server that answers requests with what it is told."""

    def __init__(self, events: list[str], *, alive: bool = True, error: ServerError | None = None) -> None:
        self.url, self.key = "http://a:1", None
        self.events = events
        self.alive = alive
        self.error = error

    async def post(self, path: str, body: Any) -> None:
        self.events.append(path)
        if self.error is not None:
            raise self.error

    async def answers(self, seconds: float) -> bool:
        return self.alive

    async def weight_version(self) -> str:
        return "1"

    async def close(self) -> None: ...


class Server:
    """A process that takes a moment to start."""

    def __init__(self, events: list[str]) -> None:
        self.client = Client(events)
        self.events = events

    async def ready(self, seconds: float) -> None:
        await asyncio.sleep(0.05)
        self.events.append("ready")

    def kill(self) -> None:
        self.events.append("killed")

    def last_lines(self) -> str:
        return ""


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def members_of(events: list[str], client: Any) -> Members:
    place: Any = lambda tokens: Server(events)  # noqa: E731
    first: Any = Server(events)
    first.client = client
    member = Member(0, client, 1, server=first, start=place, restarts_left=1, state="serving")
    return Members([member], start_seconds=5.0, warn=events.append)


def test_memory_is_nobodys_before_a_server_that_is_starting_has_given_it_back(loop: LoopThread) -> None:
    events: list[str] = []
    members = members_of(events, Client(events))

    async def go() -> None:
        await members.fail(members.all[0], "died")
        await members.hold("kv_cache", False)

    loop.run(go())
    assert events[-2:] == ["ready", "/release_memory_occupation"]
    assert members.all[0].holds == {"weights"}


def test_one_that_dies_of_giving_back_is_waited_for_when_it_starts_again(loop: LoopThread) -> None:
    events: list[str] = []
    members = members_of(events, Client(events, error=ServerGone("no answer")))
    loop.run(members.hold("weights", False))
    assert events.count("/release_memory_occupation") == 2
    assert events[-2:] == ["ready", "/release_memory_occupation"]
    assert members.all[0].holds == {"kv_cache"}


class OneRank:
    is_leader, sends, stage, stages = True, True, 0, 1

    def barrier(self) -> None: ...

    def first_of_stage(self, stage: int) -> int:
        return 0

    def broadcast(self, data: bytes | None, source: int = 0) -> bytes:
        assert data is not None
        return data


class Posts:
    """A transport of one request."""

    async def prepare(self, target: Any) -> None:
        await target.client.post("/prepare", {})

    def send(self, targets: Any, bucket: Any) -> None: ...

    async def finish(self, target: Any, version: str) -> None: ...

    def close(self) -> None: ...


def update(clients: list[Client]) -> None:
    """A sync to these servers."""
    transport: Any = Posts()
    expected = ExpectedWeights({"w": (2, 2)}, torch.float32)
    sync = WeightSync(
        OneRank(), lambda: iter([("w", WEIGHT)]), expected, lambda loop: transport, bucket_bytes=64
    )
    for number, client in enumerate(clients):
        sync._clients[f"http://a:{number}"] = client  # type: ignore[assignment]
    try:
        sync.update([(n, 0, 1, f"http://a:{n}", None) for n in range(len(clients))], 1)
    finally:
        sync.close()


def test_a_server_that_refuses_and_lives_ends_the_sync_with_what_it_said() -> None:
    refusing = Client([], error=ServerError("400: the cache is not empty"))
    with pytest.raises(ServerError, match="the cache is not empty"):
        update([refusing, Client([])])


@pytest.mark.parametrize(
    ("error", "alive"), [(ServerGone("no answer in 300 s"), True), (ServerError("500: went down"), False)]
)
def test_a_server_that_is_gone_is_named(error: ServerError, alive: bool) -> None:
    with pytest.raises(SyncFailed) as failed:
        update([Client([]), Client([], error=error, alive=alive)])
    assert failed.value.reasons == {1: str(error)}


def test_what_only_refuses_because_another_died_is_not_blamed() -> None:
    refusing = Client([], error=ServerError("400: connection closed by peer"))
    with pytest.raises(SyncFailed) as failed:
        update([refusing, Client([], error=ServerGone("no answer"))])
    assert failed.value.reasons == {1: "no answer"}


def test_a_group_that_is_not_made_in_time_ends_the_waiting(loop: LoopThread) -> None:
    """As with NCCL, whose first broadcast waits for servers that cannot connect."""
    transport = DistributedTransport(loop, "g", torch.device("cpu"), timedelta(seconds=0.2))
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=r"not done within 0\.2 s"):
        transport._abandonable(lambda: time.sleep(2.0), [])
    refused: Future[Any] = Future()
    refused.set_exception(ServerError("400: no"))
    with pytest.raises(ServerError, match="400: no"):
        transport._abandonable(lambda: time.sleep(2.0), [refused])
    assert time.monotonic() - began < 1.5


@pytest.mark.parametrize(
    ("version", "colocated", "kind"),
    [
        ("9.9.9", "true", "disk"),
        ("9.9.9", "false", "disk"),
        (torch.__version__, "true", "tensor"),
        (torch.__version__.partition("+")[0], "false", "distributed"),
    ],
)
def test_auto_is_what_two_versions_of_torch_can_share(
    version: str, colocated: str, kind: str, tmp_path: Any
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    config = pair_config(
        f"agents.A.placement.colocated={colocated}",
        "rollout.engine=sglang",
        f"rollout.sglang.python={python}",
    )
    told: list[str] = []
    assert setup._kind(config.agents["A"], OneRank(), told.append) == kind
    assert bool(told) == (kind == "disk")


def on_a_gpu(dtype: str) -> ServerSpec:
    config = pair_config(f"agents.A.dtype={dtype}", "rollout.sglang.python=/opt/sglang/bin/python")
    return server_spec(config.agents["A"], context=64, host="127.0.0.1", first_gpu=2, seed=1, key="k")


def test_float32_on_a_gpu_is_not_left_to_attention_without_it() -> None:
    command = on_a_gpu("float32").command(30_000)
    assert command[command.index("--attention-backend") + 1] == "triton"
    assert "--attention-backend" not in on_a_gpu("bfloat16").command(30_000)


def test_servers_do_not_find_the_torch_of_the_trainers_container(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = "/usr/lib/python3/dist-packages/torch/lib:/opt/cuda/lib64:/x/torch/lib/:/opt/torch/library"
    monkeypatch.setenv("LD_LIBRARY_PATH", paths)
    assert on_a_gpu("bfloat16").environment()["LD_LIBRARY_PATH"] == "/opt/cuda/lib64:/opt/torch/library"


def test_half_an_answer_is_an_error_of_the_servers(loop: LoopThread) -> None:
    """Of one that dies while it writes."""

    async def half(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"text":')
        await writer.drain()

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(half, "127.0.0.1", 0)

    server = loop.run(serve())
    client = ServerClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
    with pytest.raises(ServerError, match="the answer is cut off or broken"):
        loop.run(client.get("/server_info"))
    loop.run(client.close())
    server.close()

"""How the leader is told of responses that servers complete, without real servers."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from megatron_hacpo.rollout.base import BrokenWeights, Response, Sampling
from megatron_hacpo.rollout.sglang.client import ServerClient, ServerError, ServerGone
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.members import Member, Members
from megatron_hacpo.rollout.sglang.rollout import SGLangRollout

SAMPLING = Sampling(responses_per_prompt=4, max_tokens=3)
PROMPTS = [[1], [2, 2], [3]]
COUNT = 12
STOP = 9


class Client:
    """A server whose answers to the n-th request for a response are `behave`'s."""

    url, key = "http://fake", None

    def __init__(self, behave: Callable[[int, int], Any]) -> None:
        self.behave = behave
        self.answers = 0
        self.alive = True
        self.log_prob: float | None = -0.5

    async def generate(self, rid: str, input_ids: list[int], request: dict[str, Any]) -> dict[str, Any]:
        _, index, attempt = rid.split("-")
        reason = await self.behave(int(index), int(attempt))
        self.answers += 1
        ids = [int(index) % 8, STOP]
        return {
            "output_ids": ids,
            "meta_info": {
                "finish_reason": {"type": reason},
                "output_token_logprobs": [[self.log_prob, token, None] for token in ids],
                "weight_versions": [{"version": "0"}],
                "weight_version": "0",
            },
        }

    async def unhealthy(self, seconds: float) -> str | None:
        return None if self.alive else "no answer"

    async def close(self) -> None:
        pass


class Restarted:
    """The process of a server that was started again."""

    pid = 0

    def __init__(self, client: Client) -> None:
        self.client = client

    async def ready(self, seconds: float) -> None:
        pass

    def kill(self) -> None:
        pass


class Alone:
    """The ranks of an agent of one process."""

    is_leader = True

    def broadcast(self, payload: bytes | None) -> bytes | None:
        return payload


class Sync:
    """Gives no weights, and writes down to whom."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def update(self, targets: list[tuple[Any, ...]], version: int) -> None:
        self.given += [target[0] for target in targets]


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    loop = LoopThread()
    yield loop
    loop.close()


def open_fake(loop: LoopThread, *members: Member, hang_seconds: float = 5.0) -> SGLangRollout:
    for member in members:
        member.state = "serving"
    return SGLangRollout(
        Alone(),
        Sync(),
        None,
        Members(members, start_seconds=1.0, warn=lambda text: None),
        loop,
        stop_ids=[STOP],
        max_concurrent=4,
        hang_seconds=hang_seconds,
    )


async def at_once(index: int, attempt: int) -> str:
    await asyncio.sleep(0)
    return "stop"


def test_each_response_is_reported_once_whatever_became_of_its_first_requests(loop: LoopThread) -> None:
    """A server that dies and comes back amid the batch, answers that are not complete, and errors."""
    deaths = []

    async def dying(index: int, attempt: int) -> str:
        await asyncio.sleep(0.01)
        if index > 2:
            deaths.append(index)
            first.client.alive = False
            raise ServerGone("dead")
        return "stop"

    async def trying(index: int, attempt: int) -> str:
        await asyncio.sleep(0.01)
        if attempt == 0 and index % 3 == 0:
            return "abort"
        if attempt == 0 and index % 3 == 1:
            raise ServerError("no")
        return "stop"

    first = Member(0, Client(dying), 1, start=lambda tokens: Restarted(Client(at_once)), restarts_left=1)
    rollout = open_fake(loop, first, Member(1, Client(trying), 1))
    reported: list[tuple[int, Response]] = []
    responses = rollout.generate(
        PROMPTS, SAMPLING, on_response=lambda index, response: reported.append((index, response))
    )
    assert deaths
    assert rollout._sync.given == [0]
    assert sorted(index for index, _ in reported) == list(range(COUNT))
    assert all(responses[index] is response for index, response in reported)


def test_the_waiting_thread_is_told_while_the_others_are_generated(loop: LoopThread) -> None:
    """It may take its time: requests go on meanwhile. And the rest waits for what it was told."""
    told = threading.Event()

    async def after_the_first_is_told(index: int, attempt: int) -> str:
        while index > 0 and not told.is_set():
            await asyncio.sleep(0.01)
        return "stop"

    client = Client(after_the_first_is_told)
    caller = threading.get_ident()

    def report(index: int, response: Response) -> None:
        assert threading.get_ident() == caller
        if not told.is_set():
            assert (index, client.answers) == (0, 1)
            told.set()
            loop.run(asyncio.wait_for(all_answers(client), 10.0))

    assert len(open_fake(loop, Member(0, client, 1)).generate(PROMPTS, SAMPLING, on_response=report)) == COUNT


def test_a_lost_connection_is_no_lost_server(loop: LoopThread) -> None:
    async def reset(index: int, attempt: int) -> str:
        await asyncio.sleep(0)
        if attempt == 0 and index % 4 == 0:
            raise ServerGone("server disconnected")
        return "stop"

    member = Member(0, Client(reset), 1)
    reported: list[int] = []
    open_fake(loop, member).generate(PROMPTS, SAMPLING, on_response=lambda index, _: reported.append(index))
    assert sorted(reported) == list(range(COUNT))
    assert member.state == "serving"


def test_a_request_that_always_loses_its_connection_ends_the_run(loop: LoopThread) -> None:
    async def reset(index: int, attempt: int) -> str:
        raise ServerGone("server disconnected")

    with pytest.raises(RuntimeError, match=r"server 0 .*, request .*: server disconnected"):
        open_fake(loop, Member(0, Client(reset), 1)).generate(PROMPTS, SAMPLING)


def test_a_server_that_hangs_is_replaced(loop: LoopThread) -> None:
    """Over a real connection that nobody answers: what waits for it learns of its end by the closing."""

    async def silent() -> asyncio.Server:
        async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        return await asyncio.start_server(never, "127.0.0.1", 0)

    server = loop.run(silent())
    port = server.sockets[0].getsockname()[1]
    hung = Member(0, ServerClient(f"http://127.0.0.1:{port}", None), 1)
    hung.start, hung.restarts_left = (lambda tokens: Restarted(Client(at_once))), 1
    rollout = open_fake(loop, hung, Member(1, Client(at_once), 1), hang_seconds=0.5)
    reported: list[int] = []
    responses = rollout.generate(PROMPTS, SAMPLING, on_response=lambda index, _: reported.append(index))
    assert sorted(reported) == list(range(COUNT)) == list(range(len(responses)))
    assert hung.incarnation == 1
    server.close()


async def all_answers(client: Client) -> None:
    while client.answers < COUNT:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("log_prob", [None, math.nan])
def test_weights_that_give_no_log_probs_are_told_with_the_response(
    loop: LoopThread, log_prob: float | None
) -> None:
    client = Client(at_once)
    client.log_prob = log_prob
    with pytest.raises(BrokenWeights, match=r"server 0 .*, request .*: log-prob \w+ of token 0;") as caught:
        open_fake(loop, Member(0, client, 1)).generate(PROMPTS, SAMPLING)
    assert f"-{caught.value.index:08d}-" in str(caught.value)


def test_requests_end_when_the_report_fails(loop: LoopThread) -> None:
    cancelled: list[int] = []

    async def only_the_first(index: int, attempt: int) -> str:
        if index > 0:
            try:
                await asyncio.sleep(60.0)
            except asyncio.CancelledError:
                cancelled.append(index)
                raise
        return "stop"

    def report(index: int, response: Response) -> None:
        raise RuntimeError("the reward supervisor ended")

    rollout = open_fake(loop, Member(0, Client(only_the_first), 1))
    with pytest.raises(RuntimeError, match="the reward supervisor ended"):
        rollout.generate(PROMPTS, SAMPLING, on_response=report)
    loop.run(asyncio.sleep(0.1))
    assert set(cancelled) >= {1, 2, 3}
    assert loop.run(others()) == 0


async def others() -> int:
    """Tasks that are still in the loop, this one aside."""
    return len(asyncio.all_tasks()) - 1

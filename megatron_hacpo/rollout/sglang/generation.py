"""A batch of prompts on its way through the servers, whatever happens to them meanwhile."""

import asyncio
import math
import secrets
from collections import Counter, deque
from collections.abc import Collection, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np

from megatron_hacpo.rollout.base import BrokenWeights, FinishReason, Response, RolloutLost, Sampling
from megatron_hacpo.rollout.sglang.client import ServerError, ServerGone
from megatron_hacpo.rollout.sglang.members import Member, Members

ATTEMPTS = 3
"""Times that a response is asked for of servers that live but answer with an error."""


class BadResponse(ServerError):  # noqa: N818 - reads as what happened
    """An answer that is not a complete response of the current weights."""


class Generation:
    """`responses_per_prompt` responses to each prompt, one request each.

    Requests wait here until a server has room for one more; the least busy one gets the next. A request whose
    server dies or hangs goes to another one. Each response is there exactly once at the end.

    completed: gets each of them as soon as it is there, with its place in the prompt-major order; for another
    thread to read.
    """

    def __init__(
        self,
        members: Members,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        stop_ids: Collection[int],
        version: int,
        max_concurrent: int,
        hang_seconds: float,
    ) -> None:
        self._members = members
        self._prompts = prompts
        self._sampling = sampling
        self._stop_ids = stop_ids
        self._version = str(version)
        self._room = max_concurrent
        self._hang_seconds = hang_seconds
        self._request = sampling_params(sampling, stop_ids)
        self._name = secrets.token_hex(4)
        count = len(prompts) * sampling.responses_per_prompt
        self.completed: SimpleQueue[tuple[int, Response] | None] = SimpleQueue()
        self._responses: list[Response | None] = [None] * count
        self._waiting = deque(range(count))
        self._attempts: Counter[int] = Counter()
        self._refusals: Counter[int] = Counter()
        self._in_flight: Counter[Member] = Counter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watched: dict[tuple[int, int], asyncio.Task[None]] = {}
        self._error: BaseException | None = None

    async def advance(self) -> list[Response] | None:
        """All responses, prompt-major; or None as soon as a server has come back that needs the weights.

        What was asked of the other servers goes on meanwhile; call again. Raises RolloutLost when all servers
        are lost, RuntimeError when one gives no usable answer.
        """
        members = self._members
        try:
            while True:
                members.changed.clear()
                if self._error is not None:
                    raise self._error
                if not self._waiting and not self._tasks:
                    responses = [r for r in self._responses if r is not None]
                    assert len(responses) == len(self._responses)
                    await self._stop()
                    return responses
                if members.of("stale"):
                    return None
                if not members.of("serving", "starting"):
                    raise RolloutLost(f"{members.describe_losses()}\nall SGLang servers are lost")
                self._fill()
                await members.changed.wait()
        except BaseException:
            await self._stop()
            raise

    def _fill(self) -> None:
        """Give waiting requests to the servers that have room."""
        serving = self._members.of("serving")
        for member in serving:
            place = member.number, member.incarnation
            if place not in self._watched:
                self._watched[place] = self._start(self._watch(member), counted=False)
        while self._waiting and serving:
            member = min(serving, key=self._in_flight.__getitem__)
            if self._in_flight[member] >= self._room:
                return
            self._in_flight[member] += 1
            self._start(self._ask(member, self._waiting.popleft()), counted=True)

    def _start(self, coroutine: Any, *, counted: bool) -> "asyncio.Task[None]":
        task = asyncio.ensure_future(coroutine)
        if counted:
            self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._error = self._error or task.exception()
        self._members.changed.set()

    async def _ask(self, member: Member, index: int) -> None:
        """One request. What comes back is a response, or the request waits again."""
        prompt = self._prompts[index // self._sampling.responses_per_prompt]
        incarnation = member.incarnation
        rid = f"{self._name}-{index:08d}-{self._attempts[index]:02d}"
        self._attempts[index] += 1
        try:
            answer = await member.client.generate(rid, list(prompt), self._request)
            response = response_of(answer, self._sampling, stop_ids=self._stop_ids, version=self._version)
            self._responses[index] = response
            self.completed.put((index, response))
        except ServerError as error:
            if isinstance(error, ServerGone) and await self._is_lost(member, incarnation):
                self._waiting.appendleft(index)
                await self._members.fail(member, str(error), incarnation)
                return
            self._waiting.append(index)
            self._refusals[index] += 1
            if self._refusals[index] == ATTEMPTS:
                raise RuntimeError(f"SGLang {member.name}, request {rid}: {error}") from error
        except BrokenWeights as error:
            raise BrokenWeights(f"SGLang {member.name}, request {rid}: {error}", index) from error
        except RuntimeError as error:
            raise RuntimeError(f"SGLang {member.name}, request {rid}: {error}") from error
        finally:
            self._in_flight[member] -= 1

    async def _is_lost(self, member: Member, incarnation: int) -> bool:
        """Whether a server did not answer because it is dead, and not because a connection was lost."""
        known = member.state != "serving" or member.incarnation != incarnation
        return known or await member.client.unhealthy(self._hang_seconds) is not None

    async def _watch(self, member: Member) -> None:
        """Find out when it hangs, which no request does: a response may take any time."""
        incarnation = member.incarnation
        while member.state == "serving" and member.incarnation == incarnation:
            if (why := await member.client.unhealthy(self._hang_seconds)) is not None:
                await self._members.fail(member, why, incarnation)
                return
            await asyncio.sleep(self._hang_seconds / 4)

    async def _stop(self) -> None:
        tasks = [*self._tasks, *self._watched.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def sampling_params(sampling: Sampling, stop_ids: Collection[int]) -> dict[str, Any]:
    """`Sampling` as SGLang's request has it; the seed is the server's own."""
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(stop_ids),
    }


def response_of(
    answer: dict[str, Any], sampling: Sampling, *, stop_ids: Collection[int], version: str
) -> Response:
    """The response in an answer of /generate, all of it under the weights `version`.

    Raises BadResponse for one that was aborted, is cut short, or was drawn from other weights; BrokenWeights
    for log-probs that are null or not finite, which no other server would do better.
    """
    meta, ids = answer["meta_info"], answer["output_ids"]
    reason = meta["finish_reason"]
    if reason["type"] not in ("stop", "length"):
        raise BadResponse(f"the response ended with {reason}; it is not complete")
    pairs = meta["output_token_logprobs"]
    if [pair[1] for pair in pairs] != ids:
        raise BadResponse(f"{len(ids)} tokens came with log-probs of {len(pairs)} tokens or of other ones")
    if any(pair[0] is None or not math.isfinite(pair[0]) for pair in pairs):
        place = next(i for i, pair in enumerate(pairs) if pair[0] is None or not math.isfinite(pair[0]))
        raise BrokenWeights(f"log-prob {pairs[place][0]} of token {place}; the weights are broken")
    if (
        any(span["version"] != version for span in meta["weight_versions"])
        or meta["weight_version"] != version
    ):
        raise BadResponse(f"drawn from the weights {meta['weight_versions']}, not from {version}")
    finish: FinishReason = "stop" if ids and ids[-1] in stop_ids else "length"
    if finish != reason["type"]:
        stopped = (
            f"stopped at token {ids[-1] if ids else None}, which is none of the stop ids {sorted(stop_ids)}"
        )
        raise BadResponse(
            f"{stopped}; put it into generation_config.json"
            if reason["type"] == "stop"
            else "cut at a stop id"
        )
    if finish == "length" and len(ids) != sampling.max_tokens:
        raise BadResponse(f"cut after {len(ids)} of {sampling.max_tokens} tokens")
    return Response(np.array(ids, np.int32), np.array([pair[0] for pair in pairs], np.float32), finish)

"""Rollouts by SGLang servers, as every rank of an agent takes part in them."""

from collections.abc import Collection, Sequence

from megatron_hacpo.rollout.base import OnResponse, Response, RolloutLost, Sampling, ignore
from megatron_hacpo.rollout.sglang.generation import Generation
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.members import Member, Members
from megatron_hacpo.rollout.sglang.sync import Ranks, Sync, SyncFailed
from megatron_hacpo.rollout.sglang.turns import Turns

_DONE, _SYNC = b"done", b"sync"


class SGLangRollout:
    """Implements `rollout.base.Rollout`. The leader holds the servers; the others follow its orders, one
    broadcast each: a server that came back amid a batch needs weights, and all ranks to send them.
    """

    def __init__(
        self,
        ranks: Ranks,
        sync: Sync,
        turns: Turns | None,
        members: Members | None,
        loop: LoopThread | None,
        *,
        stop_ids: Collection[int],
        max_concurrent: int,
        hang_seconds: float,
    ) -> None:
        """turns: of servers and trainer on the same GPUs, None where they are apart. members, loop: on the
        leader alone; the loop is where the servers' clients live."""
        self._ranks = ranks
        self._sync = sync
        self._turns = turns
        self._members = members
        self._loop = loop
        self._stop_ids = frozenset(stop_ids)
        self._max_concurrent = max_concurrent
        self._hang_seconds = hang_seconds
        self._version = 0

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse = ignore
    ) -> list[Response] | None:
        """Raises RolloutLost, on every rank, when all servers are lost; RuntimeError, on the leader, when one
        answers what cannot be used."""
        if self._members is None or self._loop is None:
            while (order := self._ranks.broadcast(None)) == _SYNC:
                self._give_weights([])
            if order != _DONE:
                raise RolloutLost(order.decode())
            return None
        for number, prompt in enumerate(prompts):
            if len(prompt) == 0:  # a server dies of it
                raise ValueError(f"prompt {number}: no tokens; give it some text")
        batch = Generation(
            self._members,
            prompts,
            sampling,
            stop_ids=self._stop_ids,
            version=self._version,
            max_concurrent=self._max_concurrent,
            hang_seconds=self._hang_seconds,
        )
        try:
            while (responses := _advance(batch, self._loop, on_response)) is None:
                self._ranks.broadcast(_SYNC)
                self._give_weights(self._members.of("stale"))
        except RolloutLost as error:
            self._ranks.broadcast(str(error).encode())
            raise
        self._ranks.broadcast(_DONE)
        return responses

    def sync_weights(self, version: int) -> None:
        """Servers that fail meanwhile are started again and get the weights when they are back."""
        self._version = version
        self._give_weights(self._members.of("stale", "serving") if self._members is not None else [])

    def release(self) -> None:
        """Colocated servers give their memory back until the next sync."""
        if self._turns is not None:
            self._turns.train()

    def close(self) -> None:
        self._sync.close()
        if self._members is not None and self._loop is not None:
            self._loop.run(self._members.close())
            self._loop.close()

    def _give_weights(self, to: Sequence[Member]) -> None:
        """All of these servers that live have the current weights afterwards. A collective."""
        if self._turns is not None:
            self._turns.send()
        left = list(to)
        while self._order(bool(left)):
            for member in left:
                member.state = "stale"
            try:
                self._sync.update([_target(member) for member in left], self._version)
            except SyncFailed as failed:
                self._bury(left, failed)
                left = [m for m in left if m.state == "stale"]
            else:
                for member in left:
                    member.state = "serving"
                left = []
        if self._turns is not None:
            self._turns.generate()

    def _order(self, going_on: bool) -> bool:
        """Whether the leader has servers to give weights to."""
        return self._ranks.broadcast(_SYNC if going_on else _DONE if self._ranks.is_leader else None) == _SYNC

    def _bury(self, tried: Sequence[Member], failed: SyncFailed) -> None:
        if self._members is None or self._loop is None:
            return
        for member in tried:
            if member.number in failed.reasons:
                self._loop.run(self._members.fail(member, failed.reasons[member.number]))


def _advance(batch: Generation, loop: LoopThread, on_response: OnResponse) -> list[Response] | None:
    """`Generation.advance` in the loop, while this thread hands out what is completed."""
    advanced = loop.start(batch.advance())
    advanced.add_done_callback(lambda _: batch.completed.put(None))
    try:
        while (item := batch.completed.get()) is not None:
            on_response(*item)
    finally:
        advanced.cancel()  # where `on_response` raised; one that is done stays as it is
    return advanced.result()


def _target(member: Member) -> tuple[int, int, int, str, str | None]:
    return member.number, member.incarnation, member.tensor, member.client.url, member.client.key

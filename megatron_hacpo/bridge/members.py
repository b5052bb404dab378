"""Who takes part in the exchange: the agents' leaders, generation after generation as agents are lost."""

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

START = -1
"""The step of a leader that has not exchanged anything yet."""

POLL_SECONDS = 0.05

CONNECT = timedelta(seconds=60)
"""For forming a group once all its members are there."""


def announce(store: dist.Store, generation: int, agents: Sequence[str]) -> None:
    """Tell the run that from `generation` (1, 2, ...) on its agents are `agents`; for the launcher."""
    store.set(_membership(generation), json.dumps(list(agents)))


def current(store: dist.Store, agents: Sequence[str]) -> list[str]:
    """The run's agents now, of those that it began with."""
    generation, members = 0, list(agents)
    while store.check([_membership(generation + 1)]):
        generation += 1
        members = json.loads(store.get(_membership(generation)))
    return members


def absence(step: int, absent: Sequence[str], seconds: float) -> RuntimeError:
    """The error of an exchange to which some did not come for so long."""
    return RuntimeError(
        f"{'' if step == START else f'step {step}: '}agents {', '.join(absent)} did not come to the "
        f"exchange, which ended after {seconds:.0f} s; dead, stopped, or slower than exchange.timeout_minutes"
    )


def _membership(generation: int) -> str:
    return f"membership/{generation}"


class Members:
    """The leaders of the current generation's agents, who meet in the run's store to form a gloo group.

    Generation 0 has all agents; the following ones are announced by the launcher after it has lost an agent.

    agents: in the order of the group's ranks. group: None until all have met, and for an agent alone. To be
    referred to from here alone, local variables included: its end is what closes its connections.
    """

    def __init__(
        self,
        store: dist.Store | None,
        agents: Sequence[str],
        me: str,
        *,
        timeout: timedelta,
        loss_seconds: float | None,
    ) -> None:
        """Nothing is waited for yet.

        timeout: of a meeting and of the group's collectives. loss_seconds: how long after an error the next
        generation may take to be announced; None: every error is final. store: None for an agent alone.
        """
        assert store is not None or len(agents) == 1, "several agents need the launcher's store"
        self.agents = list(agents)
        self.generation = 0
        self.group: Any = None  # torch's stubs lack the collectives of ProcessGroupGloo
        self._store = store
        self._me = me
        self._timeout = timeout
        self._loss_seconds = loss_seconds

    def meet(self, step: int) -> bool:
        """Form the group if there is none, with leaders that have all come to `step`.

        True, without a group, if another one has come further: it has completed `step`. Raises RuntimeError
        if somebody does not come within the timeout, and as `advance` does.
        """
        while self.group is None and len(self.agents) > 1:
            try:
                if self._await_all(step):
                    return True
                self._connect()
            except RuntimeError as error:
                self.advance(error)
        return False

    def advance(self, error: RuntimeError) -> None:
        """Leave the group after `error` of a collective, for the next generation.

        Raises `error` itself if none is announced in time, and RuntimeError if this agent is not in it.
        """
        self.group = None  # others may be waiting for this leader, not for the lost one
        if self._loss_seconds is None:
            raise error
        deadline = time.monotonic() + self._loss_seconds
        while not self._enter_next():
            if time.monotonic() > deadline:
                raise error
            time.sleep(POLL_SECONDS)

    def arrive(self, step: int) -> None:
        """Let the others know that this leader has come to the exchange of `step`."""
        if self._store is not None:
            self._store.set(self._arrival(self._me), str(step))

    def absent(self, step: int) -> list[str]:
        """Those who have not come to the exchange of `step`."""
        arrived = self._arrived()
        return [agent for agent in self.agents if arrived.get(agent, START - 1) < step]

    def leave(self, step: int) -> None:
        """Leave together with the others, at the end of a run that went well; `step` is past the last one.

        Raises RuntimeError if somebody does not come within the timeout.
        """
        if self._store is None:
            return
        if self._loss_seconds is None:
            if self.group is not None:
                self.group.barrier().wait()
            return
        # Not by a barrier: when it breaks, nobody can tell whether others have passed it and left.
        start = time.monotonic()
        self._store.set(f"exchange/end/{self._me}", "")
        while not self._store.check([f"exchange/end/{agent}" for agent in self.agents]):
            self._enter_next()
            self.arrive(step)  # who could not complete the last step learns that others have
            self._wait_a_little(step, start)

    def _await_all(self, step: int) -> bool:
        """Wait until all members have come to `step`; True as soon as one has come further."""
        start = time.monotonic()
        self.arrive(step)
        while True:
            arrived = self._arrived()
            if any(there > step for there in arrived.values()):
                return True
            if all(arrived.get(agent) == step for agent in self.agents):
                return False
            if self._loss_seconds is not None and self._enter_next():
                self.arrive(step)
            self._wait_a_little(step, start)

    def _wait_a_little(self, step: int, start: float) -> None:
        seconds = time.monotonic() - start
        if seconds > self._timeout.total_seconds():
            raise absence(step, self.absent(step), seconds)
        time.sleep(POLL_SECONDS)

    def _connect(self) -> None:
        if len(self.agents) == 1:
            return  # the last one left
        assert self._store is not None
        store = dist.PrefixStore(f"exchange/group/{self.generation}", self._store)
        group: Any = dist.ProcessGroupGloo(store, self.agents.index(self._me), len(self.agents), CONNECT)
        group._set_default_timeout(self._timeout)
        self.group = group

    def _enter_next(self) -> bool:
        """Go to the next generation if it has been announced."""
        assert self._store is not None
        key = _membership(self.generation + 1)
        if not self._store.check([key]):
            return False
        agents = json.loads(self._store.get(key))
        if self._me not in agents:
            raise RuntimeError(f"agent {self._me} is not in {key}: the launcher has given it up")
        self.agents = agents
        self.generation += 1
        self.group = None
        return True

    def _arrival(self, agent: str) -> str:
        return f"exchange/arrivals/{self.generation}/{agent}"

    def _arrived(self) -> dict[str, int]:
        """The steps that those members have come to who are there in this generation."""
        assert self._store is not None
        here = [agent for agent in self.agents if self._store.check([self._arrival(agent)])]
        return {agent: int(self._store.get(self._arrival(agent))) for agent in here}

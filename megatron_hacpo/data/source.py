"""Where a run's training prompts come from, and in which order: the same for every agent, by seed alone."""

import hashlib
import json
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.prompts import Prompt

RULE_ARITHMETIC = "rule_arithmetic"


class PromptSource(Protocol):
    """Training batches by step, counted from 1."""

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of one step: a function of the source's arguments and `step` alone."""
        ...

    @property
    def fingerprint(self) -> str:
        """Of all prompts, their answers and their order."""
        ...

    def epochs(self, step: int) -> float | None:
        """How often each prompt has been used after `step`, in the mean; None where they never repeat."""
        ...


class TaskSource:
    """The generated task `rule_arithmetic`."""

    def __init__(self, *, seed: int, batch_size: int, digits: int = rule_task.DIGITS) -> None:
        """digits: of an operand."""
        self._seed = seed
        self._batch_size = batch_size
        self._digits = digits

    def batch(self, step: int) -> list[Prompt]:
        """See `PromptSource`."""
        return rule_task.batch(self._seed, step, self._batch_size, digits=self._digits)

    @property
    def fingerprint(self) -> str:
        """See `PromptSource`: of the first batch, on whose arguments all others depend."""
        return _hash(self.batch(1))

    def epochs(self, step: int) -> float | None:
        """See `PromptSource`."""
        return None


class ListSource:
    """Prompts of a list, a new permutation each epoch.

    Epochs follow each other without a gap: a batch that one epoch cannot fill continues with the next, which
    then starts with prompts that the batch does not hold yet. So every prompt is used once an epoch, no batch
    holds a prompt twice, and there have to be as many prompts as a batch has.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, batch_size: int) -> None:
        assert len(prompts) >= batch_size
        self._prompts = prompts
        self._seed = seed
        self._batch_size = batch_size
        self._orders: list[np.ndarray] = []

    def batch(self, step: int) -> list[Prompt]:
        """See `PromptSource`."""
        first = (step - 1) * self._batch_size
        return [self._prompts[self._index(first + i)] for i in range(self._batch_size)]

    @property
    def fingerprint(self) -> str:
        """See `PromptSource`."""
        return _hash(self._prompts)

    def epochs(self, step: int) -> float | None:
        """See `PromptSource`."""
        return step * self._batch_size / len(self._prompts)

    def _index(self, position: int) -> int:
        """The prompt at `position` of the endless sequence of epochs."""
        epoch, offset = divmod(position, len(self._prompts))
        while len(self._orders) <= epoch:
            self._orders.append(self._next_order())
        return int(self._orders[epoch][offset])

    def _next_order(self) -> np.ndarray:
        epoch, size = len(self._orders), len(self._prompts)
        order = np.random.default_rng([self._seed, epoch]).permutation(size)
        begun = epoch * size % self._batch_size  # prompts that the last epoch left in an unfinished batch
        if begun:
            in_batch = np.isin(order, self._orders[-1][-begun:])
            order = np.concatenate([order[~in_batch], order[in_batch]])
        return order


def _hash(prompts: Sequence[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([prompt.id, prompt.messages, prompt.answer]).encode())
    return digest.hexdigest()

"""Where a run's prompts come from, and in which order: the same for every agent, by seed alone."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.jsonl import read_jsonl
from megatron_hacpo.data.prompts import Prompt

PromptLengths = Callable[[Sequence[Prompt]], Mapping[str, Sequence[int]]]
"""Token counts of the rendered prompts, per agent name: every agent's tokenizer counts every prompt."""

RULE_ARITHMETIC = "rule_arithmetic"


class PromptSource(Protocol):
    """Training batches by step, and the held-out prompts of the evaluation."""

    def batch(self, step: int) -> list[Prompt]:
        """The prompts of one step, counted from 1: a function of the source's arguments and `step` alone."""
        ...

    def held_out(self) -> list[Prompt]:
        """The fixed evaluation prompts; empty when there are none."""
        ...

    def dropped(self) -> dict[str, int]:
        """Prompts left out as too long for some agent, by the configuration key of their file."""
        ...


class TaskSource:
    """The generated task `rule_arithmetic`."""

    def __init__(
        self, *, seed: int, batch_size: int, digits: int = rule_task.DIGITS, eval_prompts: int = 1024
    ) -> None:
        """digits: of an operand. eval_prompts: number of held-out prompts, the same for every seed."""
        self._seed = seed
        self._batch_size = batch_size
        self._digits = digits
        self._eval_prompts = eval_prompts

    def batch(self, step: int) -> list[Prompt]:
        """See `PromptSource`."""
        return rule_task.batch(self._seed, step, self._batch_size, digits=self._digits)

    def held_out(self) -> list[Prompt]:
        """See `PromptSource`."""
        return rule_task.held_out(self._eval_prompts, digits=self._digits)

    def dropped(self) -> dict[str, int]:
        """See `PromptSource`; the task's prompts all have one length."""
        return {}


class JsonlSource:
    """Prompts of a JSON-lines file, a new permutation each epoch.

    Epochs follow each other without a gap: a batch that one epoch cannot fill continues with the next, which
    then starts with prompts that the batch does not hold yet. So every prompt is used once an epoch, no batch
    holds a prompt twice, and a file with fewer prompts than a batch is refused.

    """

    def __init__(
        self,
        path: str | Path,
        *,
        seed: int,
        batch_size: int,
        prompt_key: str = "prompt",
        answer_key: str = "answer",
        eval_path: str | Path | None = None,
        eval_prompts: int | None = None,
        lengths: PromptLengths | None = None,
        max_prompt_tokens: Mapping[str, int] | None = None,
    ) -> None:
        """Reads both files (row format and errors: `read_jsonl`).

        eval_prompts: at most so many of `eval_path`, the first ones; None: all of them.
        lengths: when given, prompts longer than an agent's `max_prompt_tokens` are left out for every agent.
        Raises ValueError when fewer than `batch_size` prompts remain.
        """
        prompts = read_jsonl(path, prompt_key=prompt_key, answer_key=answer_key)
        held_out = read_jsonl(eval_path, prompt_key=prompt_key, answer_key=answer_key) if eval_path else []
        dropped = dropped_held_out = 0
        if lengths is not None:
            assert max_prompt_tokens is not None
            prompts, dropped = filter_long(prompts, lengths(prompts), max_prompt_tokens)
            held_out, dropped_held_out = filter_long(held_out, lengths(held_out), max_prompt_tokens)
        self._dropped = {"data.path": dropped, "evaluation.path": dropped_held_out}
        if len(prompts) < batch_size:
            reason = f" ({dropped} longer than rollout.max_prompt_tokens dropped)" if dropped else ""
            raise ValueError(
                f"data.path: {path} has {len(prompts)} usable prompts{reason}, fewer than batch.prompts "
                f"{batch_size}; lower batch.prompts or add prompts"
            )
        if dropped_held_out and not held_out:
            raise ValueError(
                f"evaluation.path: {eval_path}: no prompt is within rollout.max_prompt_tokens; raise it"
            )
        self._prompts = prompts
        self._held_out = held_out[:eval_prompts]
        self._seed = seed
        self._batch_size = batch_size
        self._orders: list[np.ndarray] = []

    def batch(self, step: int) -> list[Prompt]:
        """See `PromptSource`."""
        first = (step - 1) * self._batch_size
        return [self._prompts[self._index(first + i)] for i in range(self._batch_size)]

    def held_out(self) -> list[Prompt]:
        """See `PromptSource`."""
        return self._held_out

    def dropped(self) -> dict[str, int]:
        """See `PromptSource`."""
        return self._dropped

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


def filter_long(
    prompts: Sequence[Prompt], lengths_per_agent: Mapping[str, Sequence[int]], limits: Mapping[str, int]
) -> tuple[list[Prompt], int]:
    """(prompts that are within the limit of every agent, number of the others).

    lengths_per_agent: agent name -> token count of each prompt. limits: agent name -> most tokens. Every
    agent computes this from the same counts, so all of them keep the same prompts.
    """
    keep = [True] * len(prompts)
    for agent, lengths in lengths_per_agent.items():
        keep = [kept and length <= limits[agent] for kept, length in zip(keep, lengths, strict=True)]
    kept_prompts = [prompt for prompt, kept in zip(prompts, keep, strict=True) if kept]
    return kept_prompts, len(prompts) - len(kept_prompts)


def open_source(
    *,
    seed: int,
    batch_size: int,
    lengths: PromptLengths,
    max_prompt_tokens: Mapping[str, int],
    task: str | None = None,
    digits: int = rule_task.DIGITS,
    path: str | Path | None = None,
    prompt_key: str = "prompt",
    answer_key: str = "answer",
    eval_prompts: int = 1024,
    eval_path: str | Path | None = None,
) -> PromptSource:
    """The source that the configuration's `data` section asks for: exactly one of a `task` and a file `path`.

    max_prompt_tokens: per agent. eval_prompts: number of held-out prompts, for a file the largest number.
    Raises ValueError for a task whose prompts exceed `max_prompt_tokens`, and for what `JsonlSource` refuses.
    """
    assert (task is None) != (path is None)
    if path is not None:
        return JsonlSource(
            path,
            seed=seed,
            batch_size=batch_size,
            prompt_key=prompt_key,
            answer_key=answer_key,
            eval_path=eval_path,
            eval_prompts=eval_prompts,
            lengths=lengths,
            max_prompt_tokens=max_prompt_tokens,
        )
    assert task == RULE_ARITHMETIC, task
    source = TaskSource(seed=seed, batch_size=batch_size, digits=digits, eval_prompts=eval_prompts)
    for agent, counts in lengths([*source.batch(1), *source.held_out()]).items():
        if max(counts) > max_prompt_tokens[agent]:
            raise ValueError(
                f"rollout.max_prompt_tokens: {max_prompt_tokens[agent]} is below the {max(counts)} tokens "
                f"of a {task} prompt for agent {agent}; raise it"
            )
    return source

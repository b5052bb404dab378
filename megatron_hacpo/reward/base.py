"""What a verifier is, and what becomes of everything that it can return.

A verification function takes `(text, answer)`: the response's text without its final stop token, and the
prompt's ground truth. It returns a number (bool counts) inside the run's declared reward range, or None when
it can give no valid reward; it may be a coroutine function. It must depend on its two arguments alone.

Whatever else it does is a failure of the verifier, which is not a wrong answer: failures are counted apart,
by reason, and a setting says whether such a response has no valid reward or the lowest one.
"""

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, SupportsFloat

import msgspec
import numpy as np

Check = Callable[[str, str], Any]

Reason = Literal[
    "timeout", "memory", "crash", "exception", "ground_truth", "wrong_type", "not_a_number", "out_of_range"
]
"""Why a verifier failed. `crash`: its process died; `ground_truth`: it cannot read the prompt's answer."""


class BadGroundTruth(ValueError):  # noqa: N818 - reads as what it is
    """A verifier cannot compare anything with this ground truth."""


@dataclass(frozen=True)
class Verifier:
    """A verification function and the name it was asked for by.

    needs_stop: a response that was cut at the token limit gets the lowest reward; `check` does not see it.
    warm_up: (text, answer) pairs that are checked once when a pool starts, to load what is loaded late.
    answer: the answer in a response's text, in one notation, or None without one. Responses with the same one
    vote together (maj@n); not all that `check` finds equal need be written alike.
    """

    name: str
    check: Check
    needs_stop: bool = False
    warm_up: tuple[tuple[str, str], ...] = ()
    answer: Callable[[str], str | None] | None = None


class Outcome(msgspec.Struct, frozen=True):
    """One response's verdict: a reward, or None with the reason; without a reason the verifier gave none.

    detail: for people, what went wrong. answer: the verifier's `answer` of it.
    """

    reward: float | None
    failure: Reason | None = None
    detail: str = ""
    answer: str | None = None


def check_one(verifier: Verifier, text: str, answer: object, reward_range: tuple[float, float]) -> Outcome:
    """The outcome of one response, whatever the verifier does short of hanging or ending the process.

    A number as ground truth becomes its shortest decimal text, as in JSONL files; None, lists and all else
    are failures. Raises MemoryError, after which the process is not to be trusted.
    """
    try:
        value = verifier.check(text, _ground_truth(answer))
        if inspect.isawaitable(value):
            value = asyncio.run(_wait_for(value))
        return msgspec.structs.replace(_judge(value, reward_range), answer=_answer(verifier, text))
    except MemoryError:
        raise
    except BadGroundTruth as error:
        return Outcome(None, "ground_truth", str(error))
    except (Exception, SystemExit) as error:
        return Outcome(None, "exception", _short(error))


async def _wait_for(value: Awaitable[Any]) -> Any:
    return await value


def _answer(verifier: Verifier, text: str) -> str | None:
    found = None if verifier.answer is None else verifier.answer(text)
    return None if found is None else found.encode(errors="backslashreplace").decode()


def _ground_truth(answer: object) -> str:
    if isinstance(answer, str):
        return answer
    if isinstance(answer, bool) or not isinstance(answer, int | float):
        raise BadGroundTruth(f"a ground truth is text or a number, not {_short(answer)}")
    return str(answer)


def _judge(value: object, reward_range: tuple[float, float]) -> Outcome:
    if value is None:
        return Outcome(None)
    try:
        reward = float(value) if isinstance(value, SupportsFloat) else None
    except (TypeError, ValueError):  # an array of several numbers
        reward = None
    if reward is None:
        return Outcome(None, "wrong_type", f"returned {_short(value)}, not a number")
    if math.isnan(reward):
        return Outcome(None, "not_a_number", "returned NaN")
    lowest, highest = reward_range
    slack = 1e-9 * (highest - lowest)  # of a sum of weights
    if lowest - slack <= reward <= highest + slack:
        reward = min(max(reward, lowest), highest)
    else:
        return Outcome(None, "out_of_range", f"returned {reward}, outside reward.range [{lowest}, {highest}]")
    return Outcome(reward)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:200] + "..."


@dataclass(frozen=True)
class Failure:
    """A response that the verifier failed on: its place in the batch, its prompt, and why."""

    index: int
    prompt: str
    reason: Reason
    detail: str


@dataclass(frozen=True)
class RewardResult:
    """A batch's rewards, in the order of its responses.

    rewards: float64 [responses], NaN where there is no valid reward. failures: in order; their responses have
    no valid reward or the lowest one, as the pool was told. answers: of each response, None without one.
    """

    rewards: np.ndarray
    failures: tuple[Failure, ...] = ()
    answers: tuple[str | None, ...] = ()

    @property
    def invalid(self) -> int:
        """Responses without a valid reward."""
        return int(np.isnan(self.rewards).sum())

    @property
    def valid(self) -> int:
        """Responses with one."""
        return len(self.rewards) - self.invalid

    def failed(self) -> dict[Reason, int]:
        """Failures by reason; reasons that did not occur are left out."""
        return dict(Counter(failure.reason for failure in self.failures))

    def complaint(self) -> str | None:
        """One line about the failures, with the first of each reason; None without any."""
        if not self.failures:
            return None
        first = {failure.reason: failure for failure in reversed(self.failures)}
        parts = "; ".join(
            f"{count} {reason} (first: prompt {first[reason].prompt}, {first[reason].detail})"
            for reason, count in sorted(self.failed().items())
        )
        return f"the verifier failed on {len(self.failures)} of {len(self.rewards)} responses: {parts}"

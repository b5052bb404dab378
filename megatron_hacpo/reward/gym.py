"""reasoning-gym's own scorers.

The ground truth is an entry of a reasoning-gym data set as JSON, `json.dumps(data_set[i])`; its metadata
names the data set. The answer stands in the response's last <answer>...</answer>, or else in its last box.

Some scorers evaluate the answer as Python. Theirs has to look like what they ask for, so that it cannot call
anything; other answers score 0.
"""

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import get_score_answer_fn

from megatron_hacpo.reward.answer import last_box
from megatron_hacpo.reward.base import BadGroundTruth, Verifier

EVALUATES_LISTS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
EVALUATES_EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorer evaluates what the model wrote."""

_EXPRESSION = re.compile(
    r"(?:\d+(?:\.\d*)?|\.\d+|[-+*/^(),\s]"
    r"|(?:a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|pi|[A-Za-z])(?![A-Za-z0-9_]))+"
)


def _score(text: str, answer: str) -> float:
    score, entry = _entry(answer)
    found = _answer(text)
    if not found or not _harmless(found, entry["metadata"]["source_dataset"]):
        return 0.0
    return score(found, entry)


def _answer(text: str) -> str | None:
    tagged = text.rpartition("</answer>")[0].rpartition("<answer>")
    return tagged[2].strip() if tagged[1] else last_box(text)


def _harmless(answer: str, data_set: str) -> bool:
    if data_set in EVALUATES_LISTS:
        return "(" not in answer
    return data_set not in EVALUATES_EXPRESSIONS or _EXPRESSION.fullmatch(answer) is not None


@lru_cache(maxsize=1024)
def _entry(answer: str) -> tuple[Callable[[str, dict[str, Any]], float], dict[str, Any]]:
    try:
        entry = json.loads(answer)
        score = get_score_answer_fn(entry["metadata"]["source_dataset"])
        known = entry["answer"]
        own = 1.0 if known is None else score(known, entry)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadGroundTruth(f"not an entry of reasoning-gym as JSON ({error!r})") from error
    if own != 1.0:
        raise BadGroundTruth(f"the entry's own answer scores {own}; as JSON this data set cannot be scored")
    return score, entry


REASONING_GYM = Verifier("reasoning_gym", _score, answer=_answer)
"""The score that the entry's data set gives the answer, from 0 to 1."""

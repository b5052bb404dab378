"""Comparisons of text as it stands."""

import unicodedata

from megatron_hacpo.reward.answer import last_box
from megatron_hacpo.reward.base import BadGroundTruth, Verifier


def _exact(text: str, answer: str) -> float:
    return float(text == answer)


def _match(text: str, answer: str) -> float:
    truth = _fold(answer)
    if not truth:
        raise BadGroundTruth(f"nothing is left of {answer[:80]!r}")
    return float(_answer(text) == truth)


def _answer(text: str) -> str:
    box = last_box(text)
    return _fold(text if box is None else box)


def _fold(text: str) -> str:
    """Compatible characters, case, white space, and what is no letter, digit or symbol at the ends."""
    words = unicodedata.normalize("NFKC", text).casefold().split()
    folded = " ".join(words)
    start, end = 0, len(folded)
    while start < end and _is_punctuation(folded[start]):
        start += 1
    while end > start and _is_punctuation(folded[end - 1]):
        end -= 1
    return folded[start:end]


def _is_punctuation(character: str) -> bool:
    return character.isspace() or (character not in "-+" and unicodedata.category(character)[0] == "P")


EXACT = Verifier("exact", _exact, needs_stop=True, answer=str)
"""1 when the response stopped and its text is the answer to the character, else 0."""

MATCH = Verifier("match", _match, answer=_answer)
"""1 when the last box, or without one the whole response, is the answer but for case, white space, and
punctuation at the ends; else 0."""

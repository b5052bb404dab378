"""Exact match of the whole response."""

from megatron_hacpo.reward.base import Verifier


def _exact(text: str, answer: str) -> float:
    return 1.0 if text == answer else 0.0


EXACT = Verifier("exact", _exact, needs_stop=True)
"""1 when the response stopped and its text is the answer to the character, else 0."""

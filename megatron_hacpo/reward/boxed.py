r"""The last box against the ground truth as strings, the rule that the paper was trained with.

Both are written in one way first, as the MATH data set's own grader does it: \dfrac as \frac, 1/2 as
\frac{1}{2}, x=5 as 5, without spaces, degrees, percent, dollars and what begins with "\text{ ". Nothing is
computed: 0.50 is not 0.5 here, and 2\sqrt{2} is not \sqrt{8}.
"""

import re

from megatron_hacpo.reward.answer import last_box
from megatron_hacpo.reward.base import BadGroundTruth, Verifier

_STEPS = [
    (re.compile(r"\n|\\!"), ""),
    (re.compile(r"\\\\"), r"\\"),
    (re.compile(r"\\[td]frac"), r"\\frac"),
    (re.compile(r"\\left|\\right|\^\{\\circ\}|\^\\circ|\\\$"), ""),
    (re.compile(r"\\text\{ .*", re.DOTALL), ""),
    (re.compile(r"\\%|%"), ""),
    (re.compile(r"(^|[ {])\."), r"\g<1>0."),
    (re.compile(r"^[^=]{1,2}=([^=]*)$"), r"\1"),
    (re.compile(r" "), ""),
    (re.compile(r"\\sqrt([^{])"), r"\\sqrt{\1}"),
    (re.compile(r"\\frac([^{])([^{])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac([^{])\{"), r"\\frac{\1}{"),
    (re.compile(r"^0\.5$"), r"\\frac{1}{2}"),
    (re.compile(r"^(-?\d+)/(-?\d+)$"), r"\\frac{\1}{\2}"),
]


def _boxed(text: str, answer: str) -> float:
    box = last_box(answer)
    truth = normalise(answer if box is None else box)
    if not truth:
        raise BadGroundTruth(f"nothing is left of {answer[:80]!r}")
    return float(_answer(text) == truth)


def _answer(text: str) -> str | None:
    box = last_box(text)
    return None if box is None else normalise(box)


def normalise(text: str) -> str:
    """An answer in one way of writing it."""
    text = text.strip()
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text


BOXED = Verifier("boxed", _boxed, answer=_answer)
"""1 when the last box is the ground truth as a normalised string, else 0; no box is no answer."""

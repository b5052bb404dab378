"""Multiple choice: the letter of the last box, or else of the last "answer is ...", against the right one."""

import re

from megatron_hacpo.reward.answer import last_box, to_ascii
from megatron_hacpo.reward.base import BadGroundTruth, Verifier

_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox) ?\{([^{}]*)\}|[$*]|\\[ ,()]")
_LETTER = re.compile(r"\(? ?([A-Za-z]) ?(?:\).*|[.:](?:\s.*)?)?", re.DOTALL)
_STATED = re.compile(r"(?i:\b(?:answer|choice|option)(?:\s+is\b)?)[\s:*$]*+\(?([A-Z])\b(?!['\u2019])")


def _choice(text: str, answer: str) -> float:
    right = letter(answer)
    if right is None:
        raise BadGroundTruth(f"{answer[:80]!r} is not a letter")
    return float(_answer(text) == right)


def _answer(text: str) -> str | None:
    box = last_box(text)
    if box is not None:
        return letter(box)
    stated = _STATED.findall(to_ascii(text))
    return stated[-1] if stated else None


def letter(text: str) -> str | None:
    """The capital letter of a choice such as B, (b), "B. seven" or \\text{(B)}; None for all else."""
    match = _LETTER.fullmatch(_STYLE.sub(r"\1", to_ascii(text)).strip())
    return match[1].upper() if match else None


CHOICE = Verifier("choice", _choice, answer=_answer)
"""1 when the chosen letter is the right one, else 0."""

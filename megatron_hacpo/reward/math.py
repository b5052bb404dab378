r"""Mathematical answers: the last box of the response against the ground truth, decided by math-verify.

What can be told without algebra is told by `notation.decide`. The rest is left to math-verify: latex2sympy's
grammar and sympy's algebra find equal expressions, sets, intervals, matrices and equations, and a decimal
equals what it gives to six places.

A response's text is never evaluated as code. Of math-verify only the LaTeX grammar is used, not its plain
expressions, which sympy evaluates as Python. An answer with an operator that sympy would have to carry out
(`_OPERATORS`) is wrong unless `notation.decide` finds it right: for an infinite sum sympy compiles a
function from what is summed. math-verify's own timeouts are off, as they need SIGALRM and the main thread: a
comparison may take any time and memory (9^{9^9}), and the process around it bounds both.
"""

import logging
import re
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from sympy import Rational

from megatron_hacpo.reward.answer import last_box, last_number
from megatron_hacpo.reward.base import BadGroundTruth, Verifier
from megatron_hacpo.reward.notation import clean, decide, number, words

LONGEST = 1000
"""Characters of the longest box that is an answer."""

_OPERATORS = re.compile(r"\\(?:sum|prod|i*int|oint|lim|operatorname|variable)(?![a-z])")

_JUXTAPOSED = re.compile(r"(?<![\w.^])\d(?:[\d.,]*\d)? \d")
"""Two numbers beside each other, which math-verify adds."""

_GRAMMAR = LatexExtractionConfig(
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, malformed_operators=True, units=False, nits=False, boxed="none"
    )
)

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off


def _boxed(text: str, answer: str) -> float:
    truth, parsed = _ground_truth(answer)
    return float(_equal(last_box(text), truth, parsed))


def _boxed_or_number(text: str, answer: str) -> float:
    truth, parsed = _ground_truth(answer)
    return float(_equal(_box_or_number(text), truth, parsed))


def _box_or_number(text: str) -> str | None:
    box = last_box(text)
    return last_number(text) if box is None else box


def _in_one_notation(answer: str | None) -> str | None:
    """Numbers as exact fractions, all else as cleaned text; None for what is no answer."""
    if answer is None or len(answer) > LONGEST or not (answer := clean(answer)):
        return None
    value = number(answer)
    return answer if value is None else f"{value}%" if answer.endswith("%") else str(value)


def _equal(answer: str | None, truth: str, parsed_truth: Any) -> bool:
    if answer is None or len(answer) > LONGEST or not (answer := clean(answer)):
        return False
    decided = decide(answer, truth)
    if decided is not None:
        return decided
    if parsed_truth is None or _OPERATORS.search(answer):
        return False
    parsed = _parse(answer)
    if parsed is None:
        return False
    return bool(verify(parsed_truth, parsed, allow_set_relation_comp=True, timeout_seconds=None))


@lru_cache(maxsize=1024)
def _ground_truth(answer: str) -> tuple[str, Any]:
    """The ground truth in one notation and as sympy has it, of a text with or without a box.

    Raises BadGroundTruth where nothing could equal it.
    """
    box = last_box(answer)
    text = clean(answer if box is None else box)
    parsed = _parse(text)
    if parsed is None and (value := number(text)) is not None:
        parsed = Rational(value.numerator, value.denominator)
    if parsed is None and words(text) is None:
        raise BadGroundTruth(f"math-verify cannot read {answer[:80]!r}")
    return text, parsed


def _parse(text: str) -> Any:
    """A sympy object, or None for what has no one reading."""
    if _JUXTAPOSED.search(text):
        return None
    found = parse(
        f"${text}$",
        [_GRAMMAR],
        fallback_mode="no_fallback",
        extraction_mode="first_match",
        parsing_timeout=None,
    )
    return found[0] if found else None


_USUAL = (
    (r"\frac{\sqrt{3}}{2} + x", r"x + \frac{\sqrt{12}}{4}"),
    (r"\frac{17}{24}", r"\frac{34}{49}"),
    (r"-\frac{3}{8}", r"-\frac{6}{17}"),
    (r"\frac{5\pi}{12}", r"5\pi / 13"),
    (r"\frac{a+b}{2c}", r"\frac{a}{2c} + \frac{b}{2c}"),
    (r"12\sqrt{35}", r"\sqrt{5042}"),
    (r"3\sqrt[3]{4}", r"\sqrt[3]{108}"),
    (r"2 + 4\sqrt{7}", r"4\sqrt{7} + 3"),
    (r"\sqrt{x^2 + 1}", r"(x^2 + 1)^{1/2}"),
    (r"\left(12, 35\right)", r"(12,36)"),
    (r"(-1, 2, 30)", r"(-1,2,31)"),
    (r"(\frac{1}{2}, x)", r"(0.5, x)"),
    (r"[1, 20)", r"(10, 2]"),
    (r"\left[-12, 35\right)", r"[-12,\infty)"),
    (r"(-\infty, 3) \cup (5, \infty)", r"(-\infty,3)\cup(5,\infty)"),
    (r"\{1, 30, 12\}", r"\{12, 20, 1\}"),
    (r"x \le 5", r"(-\infty, 5]"),
    (r"x = 12", r"13"),
    (r"12x^2 + 35x", r"x(12x + 36)"),
    (r"x^3 - 2x + 1", r"(x-1)(x^2+x-1)"),
    (r"(x + 3)(x - 2)", r"x^2 + x - 6"),
    (r"y = 2x + 3", r"2x - y + 3 = 0"),
    (r"2^{10}", r"1025"),
    (r"10^{-3}", r"0.002"),
    (r"e^{2x}", r"(e^x)^2"),
    (r"\sin^2 x", r"1 - \cos^2 x"),
    (r"\log_2 3", r"\frac{\ln 3}{\ln 2}"),
    (r"3 + 4i", r"4i + 3"),
    (r"\binom{10}{3}", r"121"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}"),
)
_WARM_UP = tuple((rf"\boxed{{{answer}}}", truth) for answer, truth in _USUAL)
"""What sympy loads late, and the usual paths of the grammar: without them a new worker takes a third more
time for its first hundred responses."""

MATH = Verifier("math", _boxed, warm_up=_WARM_UP, answer=lambda text: _in_one_notation(last_box(text)))
"""1 when the last box equals the ground truth, else 0; no box is no answer."""

MATH_NUMBER = Verifier(
    "math_number",
    _boxed_or_number,
    warm_up=_WARM_UP,
    answer=lambda text: _in_one_notation(_box_or_number(text)),
)
"""As `MATH`; without a box the last number of the response is the answer."""

r"""Mathematical answers in one notation, and what can be decided about two of them without algebra.

`clean` undoes what only sets an answer in type: spacing, \left and \right, a \text around all of it,
currency, units behind a number, spaces between thousands. It never looks up what a name means.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from megatron_hacpo.reward.answer import to_ascii

_REPLACED: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<!\\)\\[\[\]()!]|\\?[$\u20ac\u00a3\u00a5]"), ""),
    (re.compile(r"\\displaystyle(?![A-Za-z])|\\(?:left|right)(?![A-Za-z])\.?"), ""),
    (re.compile(r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![A-Za-z])|\s+"), " "),
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\frac ?(\d) ?(\d)(?!\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\mathbb ?([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset"),
    (re.compile(r"(?<![A-Za-z\\])infinity(?![A-Za-z])"), r"\\infty"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\*\*"), "^"),
    (re.compile(r"(?<![\w.,])(\d+) (\d+) ?/ ?(\d+)(?![\w.,])"), r"\1\\frac{\2}{\3}"),  # 1 1/2
    (re.compile(r"(?<![\w.,])(\d{1,3}(?: \d{3})+)(?![\w,])"), lambda match: match[1].replace(" ", "")),
]
_STYLED = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox) ?\{([^{}]*)\}")

_QUANTITY = re.compile(
    r"(?P<value>-?(?:\d[\d,]*(?:\.\d+)?|\.\d+|\\frac\{\d+\}\{\d+\})(?: ?/ ?\d+)?)"
    r"(?: ?\^ ?(?:\\circ|\{ ?\\circ ?\})(?:[CF]| [CF])?"
    r"| ?\\(?:text|textbf|textrm|mathrm|mbox) ?\{(?P<text>[^{}]*)\}"
    r"| ?(?:[mck]m|[mk]?g|ml|ft|lbs?|oz|hr|mph)(?![A-Za-z])"
    r"| (?P<words>[A-Za-z]{3,}(?: [A-Za-z]+)*))"
    r"(?: ?\^ ?(?:\d|\{\d\}))?"
)
"""A number with a unit. Two letters behind a number are a product (2xy), but for the usual short units."""

_NO_UNITS = re.compile(r"\s*(?:sin|cos|tan|log|sqrt|mod|and|or|percent|pct|choose|if)\b")


def clean(text: str) -> str:
    """An answer in one notation; cleaning it again changes nothing."""
    previous = None
    while previous != text:
        previous = text
        text = _clean_once(text)
    return text


def _clean_once(text: str) -> str:
    text = to_ascii(text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    if styled := _STYLED.fullmatch(text):
        return styled[1]
    quantity = _QUANTITY.fullmatch(text)
    if quantity and not _NO_UNITS.match(quantity["text"] or quantity["words"] or ""):
        return quantity["value"]
    return text


def decide(answer: str, truth: str) -> bool | None:
    """Whether two clean answers are equal, as far as that can be told without algebra; else None.

    The same text is equal. Numbers written out are equal if they are the same number; of a decimal and a
    fraction that no decimal writes in full this does not decide. A percent sign may be missing or carried
    out: 50% = 50 = 0.5. Numbers in a base (101_2) need the same digits, and the same base where both name
    one. An answer in words needs the same words, upper and lower case aside. A set in braces is no tuple in
    parentheses.
    """
    if answer.replace(" ", "") == truth.replace(" ", ""):
        return True
    if (same := _same_in_base(answer, truth)) is not None:
        return same
    if (same := _same_number(answer, truth)) is not None:
        return same
    if (wanted := words(truth)) is not None:
        return words(answer) == wanted
    if {_brackets(answer), _brackets(truth)} == {"()", r"\{\}"}:
        return False
    return None


def _same_number(answer: str, truth: str) -> bool | None:
    ours, theirs = number(answer), number(truth)
    if ours is None or theirs is None:
        return None
    if answer.endswith("%") != truth.endswith("%"):
        share, other = (ours, theirs) if answer.endswith("%") else (theirs, ours)
        return other in (share, share / 100)
    if ours == theirs:
        return True
    return False if _terminates(ours) == _terminates(theirs) else None


_BASED = re.compile(r"([0-9A-Z]+)(?:_(?:(\d)|\{(?:\\text\{)?(\w+)\}?\}))?")
"""A number such as 1011_2, 2F_{16} or 1011."""


def _same_in_base(answer: str, truth: str) -> bool | None:
    ours, theirs = (_BASED.fullmatch(text.replace(" ", "")) for text in (answer, truth))
    if ours is None or theirs is None:
        return None
    bases = {match[2] or match[3] for match in (ours, theirs)} - {None}
    return ours[1] == theirs[1] and len(bases) == 1 if bases else None


_DECIMAL = re.compile(
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)"
    r"(?:\\overline ?\{(?P<period>\d+)\})?"
    r"(?:e(?P<e>[-+]?\d{1,3})| ?\\(?:times|cdot) ?10 ?\^ ?(?:(?P<digit>\d)|\{ ?(?P<power>[-+]?\d{1,3}) ?\}))?"
)
_RATIO = re.compile(
    r"([-+]?)(?:(?P<whole>\d+)? ?\\frac ?\{ ?(-?\d+) ?\} ?\{ ?(\d+) ?\}|(?P<over>\d+) ?/ ?(?P<under>\d+))"
)
_LONGEST = 300
"""Characters of the longest answer that is read as a number here."""


def number(text: str) -> Fraction | None:
    r"""The exact value of a number written out; None for all else. A percent sign is left out of it.

    For example 1,234.5, 2e-3, 3 \times 10^{8}, 0.\overline{3}, 3/4, -\frac{3}{4}, 1\frac{1}{2}, 50\%.
    """
    text = re.sub(r" ?\\?%$", "", text)
    if len(text) > _LONGEST:
        return None
    if match := _DECIMAL.fullmatch(text):
        return _decimal(match)
    if match := _RATIO.fullmatch(text):
        over, under = int(match[3] or match["over"]), int(match[4] or match["under"])
        if under == 0:
            return None
        value = int(match["whole"] or 0) + Fraction(over, under)
        return -value if match[1] == "-" else value
    return None


def _decimal(match: re.Match[str]) -> Fraction | None:
    digits = match[1].replace(",", "")
    if not digits.strip("+-."):
        return None
    value = Fraction(digits.rstrip("."))
    if period := match["period"]:
        if "." not in digits:
            return None
        unit = Fraction(1, 10 ** len(digits.split(".")[1]))
        value += (-1 if digits[0] == "-" else 1) * unit * Fraction(int(period), 10 ** len(period) - 1)
    return value * Fraction(10) ** int(match["e"] or match["digit"] or match["power"] or 0)


def _terminates(value: Fraction) -> bool:
    """Whether finitely many decimals write the value in full."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


def _brackets(text: str) -> str:
    """The brackets around all of an answer that has no others of their kind."""
    for left, right in (("(", ")"), (r"\{", r"\}")):
        if text.startswith(left) and text.endswith(right) and text.count(left) == 1:
            return left + right
    return ""


_WORDS = re.compile(r"[^\W\d_]+(?:[ '-]+[^\W\d_]+)*")


def words(text: str) -> str | None:
    """An answer in words, folded; None where it may be mathematics, without a run of three letters."""
    if _WORDS.fullmatch(text) and re.search(r"[^\W\d_]{3}", text):
        return text.casefold()
    return None

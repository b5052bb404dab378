r"""What counts as the answer of a response, and one notation for it.

The answer stands in the response's last complete \boxed{...} or \fbox{...}. Braces are counted, without
escaped ones (`\{`). Of nested boxes the outer one ends last; a box that holds nothing but a box is that box.
A box that is never closed is none; a box with nothing in it holds an empty answer. Nothing here raises,
whatever the text, and all of it takes time linear in the text.
"""

import re
import unicodedata
from typing import NamedTuple

_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\\\(?!boxed|fbox)|\\[{}]|[{}]")
_NUMBER = re.compile(
    r"(?:(?<![\w)])-)?(?<!\w)(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:/[1-9]\d*)?|\.\d+)%?"
)


class _Box(NamedTuple):
    """Places in a text: of the command, of the content's start and end, and behind the closing brace."""

    command: int
    start: int
    end: int
    behind: int


def last_box(text: str) -> str | None:
    """The content of the last complete box, without surrounding white space; None without a box."""
    found = None
    groups: list[tuple[int, int]] = []  # open ones: start of a box's command and content, or (0, 0)
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "{":
            groups.append((0, 0))
        elif len(token) > 2:
            groups.append((match.start(), match.end()))
        elif token == "}" and groups:
            command, start = groups.pop()
            if start > 0:
                box = _Box(command, start, match.start(), match.end())
                found = _unwrap(text, box, found)
    return None if found is None else text[found.start : found.end].strip()


def _unwrap(text: str, box: _Box, last: _Box | None) -> _Box:
    """A box; with the content of the `last` one before it ended, if it holds nothing else."""
    if last is None or last.command < box.start:
        return box
    beside = text[box.start : last.command] + text[last.behind : box.end]
    return box if beside.strip() else box._replace(start=last.start, end=last.end)


def last_number(text: str) -> str | None:
    """The last number of a text: digits, perhaps with sign, thousands commas, decimals, denominator, %."""
    found = None
    for match in _NUMBER.finditer(to_ascii(text)):
        found = match.group()
    return found


_DASHES = "\u2010\u2011\u2012\u2013\u2212\ufe63"
_MARKS = {
    **dict.fromkeys(_DASHES, "-"),
    "\u00d7": r"\times ",
    "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ",
    "\u2217": "*",
    "\u00f7": r"\div ",
    "\u2044": "/",
    "\u2215": "/",
    "\u00b1": r"\pm ",
    "\u00b0": r"^\circ ",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u221a": r"\sqrt",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2208": r"\in ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2205": r"\emptyset ",
    "\u066b": ".",
    "\u066c": ",",
    "\u2018": "'",
    "\u2019": "'",
    "\u201c": '"',
    "\u201d": '"',
}
"""Signs that LaTeX and ASCII write otherwise."""

_SUPERSCRIPTS = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_ROOT = re.compile("\u221a\\s*(\\d+(?:\\.\\d+)?|[A-Za-z])")


def to_ascii(text: str) -> str:
    """Digits of every script, minus signs, full-width and mathematical characters in ASCII and LaTeX.

    What has no such form (letters of other alphabets) stays; invisible characters go.
    """
    if text.isascii():
        return text
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _SUPERSCRIPTS.sub(lambda match: "^{" + _compatible(match.group()) + "}", text)
    text = _FRACTION.sub(_latex_fraction, text)
    return "".join(map(_ascii_character, text))


def _latex_fraction(match: re.Match[str]) -> str:
    over, _, under = _compatible(match.group()).partition("/")
    return rf"\frac{{{over}}}{{{under}}}"


def _compatible(text: str) -> str:
    return "".join(_MARKS.get(c, c) for c in unicodedata.normalize("NFKC", text))


def _ascii_character(character: str) -> str:
    if character.isascii():
        return character
    if character in _MARKS:
        return _MARKS[character]
    if "\uff01" <= character <= "\uff5e":
        return chr(ord(character) - 0xFEE0)
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if character.isspace():
        return " "
    return "" if unicodedata.category(character) == "Cf" else character

"""The task `rule_arithmetic`: name the right rule, then execute it.

A prompt shows two operands, least significant digit first, behind one of four operation letters:
`C66048C76475=`. Its answer names the rule and executes it: `(+335141)`. `+` and `C` ask for addition, `-` and
`M` for subtraction. Choosing the rule and executing it are separate skills, so an agent can be made that
executes every rule and hardly ever chooses one of them: what it lacks, another agent's rollouts can show.
"""

import random

from megatron_hacpo.data.prompts import Prompt

LETTERS = "+-CM"
"""The operation letters; each is also a prompt's group."""

RULE_OF = {"+": "+", "C": "+", "-": "-", "M": "-"}
"""The right rule of each letter."""

DIGITS = 5
"""Digits of an operand."""

_OTHER_RULE = {"+": "-", "-": "+"}


def execute(rule: str, x_digits: str, y_digits: str) -> str:
    """x + y, or x - y modulo 10^n, of two n-digit operands as n digits and the carry or borrow digit.

    Operands and result are least significant digit first: execute("+", "66048", "76475") is "335141"
    (84066 + 57467 = 141533), execute("-", "66048", "76475") is "995620" (84066 - 57467 = 26599, no borrow).
    """
    assert rule in _OTHER_RULE, rule
    assert len(x_digits) == len(y_digits)
    sign = 1 if rule == "+" else -1
    carry = 0
    result = []
    for x, y in zip(x_digits, y_digits, strict=True):
        carry, digit = divmod(int(x) + sign * (int(y) + sign * carry), 10)
        result.append(digit)
    return "".join(map(str, [*result, abs(carry)]))


def make_prompt(letter: str, rng: random.Random, digits: int = DIGITS) -> Prompt:
    """A prompt with random operands, as one user message; its id is stable because it is its content."""
    x, y = _operand(rng, digits), _operand(rng, digits)
    text = _prompt_text(letter, x, y)
    return Prompt(
        id=f"rule_arithmetic/{text}",
        messages=({"role": "user", "content": text},),
        answer=_response_text(RULE_OF[letter], x, y),
        group=letter,
    )


def batch(seed: int, step: int, size: int, digits: int = DIGITS) -> list[Prompt]:
    """The training prompts of one step, letters drawn uniformly; a function of its arguments alone."""
    rng = random.Random(f"rule_arithmetic/train/{seed}/{step}")
    return [make_prompt(rng.choice(LETTERS), rng, digits) for _ in range(size)]


def held_out(size: int = 1024, digits: int = DIGITS) -> list[Prompt]:
    """Fixed evaluation prompts, the same for every run; the letters take turns, size / 4 prompts each.

    Raises ValueError if `size` is not a multiple of 4.
    """
    if size % len(LETTERS):
        raise ValueError(f"held-out size {size}: must be a multiple of {len(LETTERS)}, one share per letter")
    rng = random.Random("rule_arithmetic/held_out")
    return [make_prompt(LETTERS[i % len(LETTERS)], rng, digits) for i in range(size)]


def demonstration(
    letter: str, rng: random.Random, right_probability: float, digits: int = DIGITS
) -> tuple[str, str]:
    """(prompt text, response text) that names the right rule with `right_probability`, else the other one.

    The named rule is always executed correctly.
    """
    x, y = _operand(rng, digits), _operand(rng, digits)
    right = RULE_OF[letter]
    rule = right if rng.random() < right_probability else _OTHER_RULE[right]
    return _prompt_text(letter, x, y), _response_text(rule, x, y)


def answer_for(prompt_text: str, rule: str) -> str:
    """The response that names `rule` and executes it on the operands of `prompt_text`, right or not."""
    letter = prompt_text[0]
    x, y = prompt_text[1:-1].split(letter)
    return _response_text(rule, x, y)


def _operand(rng: random.Random, digits: int) -> str:
    return "".join(str(rng.randrange(10)) for _ in range(digits))


def _prompt_text(letter: str, x: str, y: str) -> str:
    return f"{letter}{x}{letter}{y}="


def _response_text(rule: str, x: str, y: str) -> str:
    return f"({rule}{execute(rule, x, y)})"

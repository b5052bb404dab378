r"""Answers and ground truths with the verdict that they should get.

A pair is (what the box holds, ground truth). Every pair is a box inside a sentence for the verifier `math`.
"""

import time
from fractions import Fraction

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_hacpo.reward import BadGroundTruth, get_verifier
from megatron_hacpo.reward.answer import last_box, last_number
from megatron_hacpo.reward.boxed import normalise
from megatron_hacpo.reward.choice import letter
from megatron_hacpo.reward.notation import clean, decide, number

MATH = get_verifier("math")

EQUAL = [
    # whole numbers
    ("5", "5"),
    (" 5 ", "5"),
    ("5.", "5"),
    ("+5", "5"),
    ("05", "5"),
    ("5.0", "5"),
    ("-0", "0"),
    ("-(-3)", "3"),
    ("$5$", "5"),
    (r"\(5\)", "5"),
    (r"\text{5}", "5"),
    (r"\mathbf{5}", "5"),
    (r"\displaystyle 5", "5"),
    (r"{5}", "5"),
    (r"5\,", "5"),
    # thousands
    ("1,000", "1000"),
    ("1{,}000", "1000"),
    (r"1\,000", "1000"),
    ("1 000", "1000"),
    ("12,345,678", "12345678"),
    (r"12\,345\,678", "12,345,678"),
    ("1,234.5", "1234.50"),
    # digits and signs of other scripts
    ("\u22125", "-5"),
    ("\u20135", "-5"),
    ("\uff15", "5"),
    ("\uff0d\uff11\uff12", "-12"),
    ("\u0661\u0662", "12"),
    ("\u0967\u0966", "10"),
    ("1\u202f000", "1000"),
    ("\u00bd", "0.5"),
    ("1\u00bd", r"\frac{3}{2}"),
    ("2\u221a3", r"2\sqrt{3}"),
    ("\u221a12", r"2\sqrt{3}"),
    ("\u03c0", r"\pi"),
    ("x\u00b2", "x^2"),
    ("10\u207b\u00b2", "0.01"),
    ("3\u00d74", "12"),
    ("6\u00f72", "3"),
    ("x\u22645", r"x \le 5"),
    ("5\u200b", "5"),
    # fractions
    (r"\frac{1}{2}", "1/2"),
    (r"\frac12", "1/2"),
    (r"\frac 1 2", "1/2"),
    (r"\dfrac{1}{2}", r"\tfrac{1}{2}"),
    (r"\frac{2}{4}", r"\frac{1}{2}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"\frac{1}{-2}", "-0.5"),
    ("-1/2", "-0.5"),
    ("1 / 2", "0.5"),
    (r"1\frac{1}{2}", "3/2"),
    ("1 1/2", "1.5"),
    ("1:2", "0.5"),
    (r"\left(\frac{1}{2}\right)", "0.5"),
    # decimals
    (".5", "0.5"),
    ("0.50", "0.5"),
    ("0.333333", r"\frac{1}{3}"),
    (r"0.\overline{3}", r"\frac{1}{3}"),
    (r"0.1\overline{6}", "1/6"),
    ("3.14159265", r"\pi"),
    ("1.414214", r"\sqrt{2}"),
    # powers of ten
    ("2^{10}", "1024"),
    ("10^{-3}", "0.001"),
    (r"3 \times 10^{5}", "300000"),
    (r"3 \cdot 10^5", "300,000"),
    (r"1.5 \times 10^{-2}", "0.015"),
    ("2e-3", "0.002"),
    (r"6.02\times10^{23}", r"602 \times 10^{21}"),
    # percent
    (r"50\%", "50%"),
    ("50%", "50"),
    ("50", r"50\%"),
    (r"50\%", "0.5"),
    ("0.5", "50%"),
    ("12.5%", r"\frac{1}{8}"),
    (r"12.5\%", "12.5"),
    # money and units
    (r"\$5", "5"),
    (r"\$1,250.00", "1250"),
    ("\u20ac20", "20"),
    ("5 dollars", "5"),
    (r"5\text{ cm}", "5"),
    (r"5 \text{ cm}^2", "5"),
    ("5 cm", r"5\text{ cm}"),
    ("5cm", "5"),
    (r"12\ \mathrm{m}", "12"),
    ("12 square units", "12"),
    (r"\frac{3}{4} \text{ cups}", "0.75"),
    ("3/4 cup", "3/4"),
    (r"90^\circ", "90"),
    (r"90^{\circ}", r"90^\circ"),
    ("90\u00b0", "90"),
    # roots and expressions
    (r"\sqrt{8}", r"2\sqrt{2}"),
    (r"\sqrt8", r"2\sqrt2"),
    ("sqrt(8)", r"2\sqrt{2}"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    (r"\sqrt[3]{8}", "2"),
    ("(x+1)^2", "x^2+2x+1"),
    ("1+x", "x + 1"),
    ("ab", "ba"),
    ("2*x", "2x"),
    ("x**2", "x^2"),
    (r"\frac{x}{2}", "0.5x"),
    (r"\sin^2 x + \cos^2 x", "1"),
    (r"\log_2 8", "3"),
    (r"\ln e", "1"),
    ("5!", "120"),
    (r"\binom{5}{2}", "10"),
    ("|-5|", "5"),
    ("e^{2}", "e^2"),
    ("2+3i", "3i+2"),
    (r"\infty", "infinity"),
    # tuples, sets, intervals
    ("(1,2)", "(1, 2)"),
    ("(1, 2, 3)", r"\left( 1,2,3 \right)"),
    (r"(0.5, 2)", r"\left(\frac12, 2\right)"),
    ("1, 2", "(1,2)"),
    (r"\{1,2,3\}", r"\{3,2,1\}"),
    ("1,2,3", r"\{3,2,1\}"),
    ("2, -2", r"\pm 2"),
    (r"x = \pm 2", "-2, 2"),
    (r"2 \text{ and } 3", "3, 2"),
    (r"2 \text{ or } 3", "2,3"),
    ("[1, 2)", r"\left[1, 2\right)"),
    (r"(-\infty, 5]", r"x \le 5"),
    (r"x \le 5", r"(-\infty, 5]"),
    (r"5 \ge x", r"x \leq 5"),
    ("1 < x < 2", "(1,2)"),
    (r"(-\infty,0) \cup (0,\infty)", r"(0,\infty) \cup (-\infty,0)"),
    (r"\mathbb R", r"(-\infty, \infty)"),
    (r"\varnothing", r"\emptyset"),
    # equations and matrices
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y = 2x + 1", "y = 1 + 2x"),
    ("2x - y + 1 = 0", "y = 2x + 1"),
    ("f(x) = x^2", "x^2"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{bmatrix}1\\2\end{bmatrix}"),
    (r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"\begin{pmatrix}1&2\\(3)&4\end{pmatrix}"),
    # bases
    ("1011_2", "1011_{2}"),
    ("1011", "1011_2"),
    (r"2F_{16}", r"2F_{\text{16}}"),
    # words and letters
    (r"\text{yes}", "Yes"),
    ("YES", r"\text{yes}"),
    (r"\textbf{Evelyn}", r"\text{Evelyn}"),
    (r"\text{(B)}", "B"),
    ("(B)", r"\text{B}"),
    (r"\text{x-axis}", "x-axis"),
    ("right  triangle", "right triangle"),
    ("\u00e9t\u00e9", "\u00c9t\u00e9"),
]

UNEQUAL = [
    ("6", "5"),
    ("-5", "5"),
    ("50", "5"),
    ("5.01", "5"),
    ("0.3333", r"\frac{1}{3}"),
    ("3.14", r"\pi"),
    ("0.0000001", "0.0000002"),
    ("10000000.5", "10000000"),
    ("1000", "1001"),
    (r"1\,000", "0"),
    ("1,000", "1"),
    (r"\frac{1}{2}", r"\frac{2}{1}"),
    (r"1\frac{1}{2}", "0.5"),
    (r"\frac{1}{0}", "5"),
    (r"\frac{0}{0}", "0"),
    ("1/0", "0"),
    (r"5\%", "50%"),
    ("0.5%", "50"),
    ("50", "0.5"),
    ("3t", "3"),
    ("2ab", "2"),
    ("2m", "2"),
    ("5 x", "5"),
    ("2xy", "2x"),
    (r"2\pi", "2"),
    (r"\sqrt{2}", "2"),
    ("x+1", "x+2"),
    ("(x+1)^2", "x^2+1"),
    ("10^{100}", "10^{100}+1"),
    (r"-\infty", r"\infty"),
    ("2+3i", "2-3i"),
    ("(1,2)", "(2,1)"),
    ("(1,2,3)", "(3,2,1)"),
    ("(1,2)", "(1,2,3)"),
    (r"\{1,2\}", "(1,2)"),
    (r"\{1,2,3\}", r"\{1,2\}"),
    ("1,2,3", "2"),
    (r"5 \text{ or } 6", "5"),
    ("[1,2)", "[1,2]"),
    ("[1,2]", "(1,2)"),
    ("x < 5", r"x \le 5"),
    ("x=5", "x=6"),
    ("x=5", "y=5"),
    ("y=2x", "y=3x"),
    (r"\begin{pmatrix}1 & 2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    ("1011_2", "1011_3"),
    ("1010_2", "1011_2"),
    ("11", "1011_2"),
    (r"\text{no}", r"\text{yes}"),
    ("five", "5"),
    (r"\text{(A)}", "B"),
    ("left triangle", "right triangle"),
    ("sey", "yes"),
]

MALFORMED = [
    ("", "5"),
    ("   ", "5"),
    (r"\ ", "5"),
    (r"\text{}", "5"),
    (".", "5"),
    ("...", "5"),
    (r"\frac{5}", "5"),
    (r"\frac{1}{2", "0.5"),
    (r"\sqrt{", "5"),
    (r"5 \right)", "6"),
    ("1 2", "3"),
    ("1 2", "2"),
    (r"\undefinedcommand{5}", "5"),
    ("5 = = 5", "6"),
    ("?", "5"),
    ("???5", "6"),
    ("(5", "6"),
    ("[1,2", "[1,2]"),
    (r"\begin{pmatrix} 1", r"\begin{pmatrix}1\end{pmatrix}"),
    ("\ud800", "5"),
    ("\x00", "5"),
    ("\U0001f600", "5"),
    ("5" * 2000, "5"),
    ("(" * 500 + "5" + ")" * 500, "6"),
    (r"\sum_{n=1}^{\infty} \frac{1}{n^2}", r"\frac{\pi^2}{6}"),
    (r"\int_0^1 2x\,dx", "1"),
    (r"\lim_{x \to 0} \frac{\sin x}{x}", "1"),
    (r"\operatorname{zeros}(2,2)", r"\begin{pmatrix}0&0\\0&0\end{pmatrix}"),
]
"""What no one can read as an answer, or sympy would have to carry out: wrong, and no failure."""


def _verdict(box: str, truth: str) -> float:
    return MATH.check(rf"So, after all, the answer is $\boxed{{{box}}}$.", truth)


def test_the_table_is_large_and_has_no_pair_twice() -> None:
    pairs = [*EQUAL, *UNEQUAL, *MALFORMED]
    assert len(pairs) >= 150
    assert len(set(pairs)) == len(pairs)


@pytest.mark.parametrize(("box", "truth"), EQUAL)
def test_equal(box: str, truth: str) -> None:
    assert _verdict(box, truth) == 1.0


@pytest.mark.parametrize(("box", "truth"), UNEQUAL)
def test_unequal(box: str, truth: str) -> None:
    assert _verdict(box, truth) == 0.0


@pytest.mark.parametrize(("box", "truth"), MALFORMED)
def test_malformed(box: str, truth: str) -> None:
    assert _verdict(box, truth) == 0.0


RESPONSES = [
    (r"First $\boxed{3}$, no: $\boxed{5}$.", 1.0),
    (r"First $\boxed{5}$, no: $\boxed{3}$.", 0.0),
    (r"$\boxed{5}$ and then \boxed{6", 1.0),
    (r"\boxed{6 and \boxed{5}", 1.0),
    (r"\boxed{\boxed{5}}", 1.0),
    (r"\boxed{ \fbox{ 5 } }", 1.0),
    (r"\boxed {5}", 1.0),
    ("\\boxed\n{5}", 1.0),
    (r"\fbox{5}", 1.0),
    (r"\\boxed{5}", 1.0),
    (r"**\boxed{5}**", 1.0),
    (r"\boxed{5}}", 1.0),
    (r"}{ \boxed{5}", 1.0),
    (r"\boxed{5} \boxed{}", 0.0),
    (r"\boxed{}", 0.0),
    (r"\boxed{5", 0.0),
    (r"\boxed 5", 0.0),
    (r"\boxed[5]", 0.0),
    (r"boxed{5}", 0.0),
    (r"\boxes{5}", 0.0),
    (r"\boxed{\text{the answer is } 5}", 0.0),
    ("The answer is 5.", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("response", "reward"), RESPONSES)
def test_which_box_counts(response: str, reward: float) -> None:
    assert MATH.check(response, "5") == reward


def test_without_a_box_the_last_number_may_count() -> None:
    check = get_verifier("math_number").check
    for response in ("so 3 + 2 = 5", "It is 5.", "x=-5+10 = 5%", "$5", r"\boxed{5} of 6", "\uff15"):
        assert check(response, "5") == 1.0, response
    for response in ("", "none", "v5", "5 of 6", r"5 \boxed{6}", r"5 \boxed{}"):
        assert check(response, "5") == 0.0, response
    assert check("about -1,234.50 dollars", "-1234.5") == 1.0
    assert check("that is 3/4", "0.75") == 1.0


def test_a_ground_truth_may_be_boxed_and_must_be_readable() -> None:
    assert MATH.check(r"\boxed{5}", r"Thus $x = \boxed{5}$.") == 1.0
    for truth in ("", "  ", r"\frac{1}{", "1 2", "5)(", "\ud800", r"\boxed{}"):
        with pytest.raises(BadGroundTruth, match="math-verify cannot read"):
            MATH.check("no box", truth)


STRINGS = [
    ("5", "5", 1.0),
    (" 5 ", "5", 1.0),
    (r"\dfrac{1}{2}", r"\frac{1}{2}", 1.0),
    (r"\frac12", "1/2", 1.0),
    ("0.5", r"\frac{1}{2}", 1.0),
    (".25", "0.25", 1.0),
    (r"\sqrt2", r"\sqrt{2}", 1.0),
    (r"\left(1, 2\right)", "(1,2)", 1.0),
    ("x=5", "5", 1.0),
    (r"50\%", "50", 1.0),
    (r"90^\circ", "90", 1.0),
    (r"\$5", "5", 1.0),
    (r"5\text{ cm}", "5", 1.0),
    ("0.50", "0.5", 0.0),
    (r"\sqrt{8}", r"2\sqrt{2}", 0.0),
    ("1+x", "x+1", 0.0),
    ("1,000", "1000", 0.0),
    ("abc=5", "5", 0.0),
]


@pytest.mark.parametrize(("box", "truth", "reward"), STRINGS)
def test_the_box_as_a_string(box: str, truth: str, reward: float) -> None:
    assert get_verifier("boxed").check(rf"\boxed{{1}} then \boxed{{{box}}}", truth) == reward


def test_the_box_as_a_string_needs_a_box_and_a_ground_truth() -> None:
    check = get_verifier("boxed").check
    assert check("5", "5") == 0.0
    assert check(r"\boxed{}", "5") == 0.0
    with pytest.raises(BadGroundTruth):
        check(r"\boxed{5}", r"\%")


def _spellings(n: int, power: int) -> list[str]:
    """n / 10^power in every notation that has only digits and marks."""
    sign, digits = ("-" if n < 0 else ""), str(abs(n)).zfill(power + 1)
    whole, decimals = digits[: len(digits) - power], digits[len(digits) - power :]
    tail = f".{decimals}" if decimals else ""
    groups = f"{int(whole):,}".split(",")
    arabic = whole.translate({ord("0") + i: 0x660 + i for i in range(10)})
    wide = (sign + whole + tail).translate({c: c + 0xFEE0 for c in range(0x21, 0x7F)})
    return [
        sign + whole + tail,
        sign + ",".join(groups) + tail,
        sign + r"{,}".join(groups) + tail,
        sign + r"\,".join(groups) + tail,
        sign + " ".join(groups) + tail,
        sign + "00" + whole + tail,
        sign + whole + (tail or ".") + "00",
        sign.replace("-", "\u2212") + arabic + tail,
        wide,
        rf"\frac{{{n}}}{{{10**power}}}",
        rf"{sign}\dfrac{{{abs(n)}}}{{{10**power}}}",
        f"{n}/{10**power}",
        rf"{n} \times 10^{{{-power}}}",
        rf"\text{{{sign}{whole}{tail}}}",
        f"${sign}{whole}{tail}$",
        rf"{sign}{whole}{tail} \text{{ cm}}",
        f"x = {sign}{whole}{tail}",
    ]


@settings(max_examples=25, deadline=None)
@given(st.integers(-(10**9), 10**9), st.integers(0, 4), st.data())
@example(1000, 0, None)
@example(-5, 3, None)
def test_a_number_equals_itself_in_every_notation_and_no_other(
    n: int, power: int, data: st.DataObject | None
) -> None:
    spellings, others = _spellings(n, power), _spellings(n + 1, power)
    truths = spellings if data is None else [data.draw(st.sampled_from(spellings))]
    for truth in truths:
        for spelling in spellings:
            assert _verdict(spelling, truth) == 1.0, (spelling, truth)
        for other in others:
            assert _verdict(other, truth) == 0.0, (other, truth)


@settings(max_examples=200, deadline=None)
@given(st.fractions(max_denominator=1000))
def test_fractions_have_their_value(value: Fraction) -> None:
    over, under = value.numerator, value.denominator
    whole, rest = divmod(abs(over), under)
    sign = "-" if over < 0 else ""
    for spelling in (
        f"{over}/{under}",
        rf"\frac{{{over}}}{{{under}}}",
        rf"{sign}{whole}\frac{{{rest}}}{{{under}}}",
        rf"{sign}{whole} {rest}/{under}",
    ):
        assert number(clean(spelling)) == value, spelling


FRAGMENTS = st.lists(
    st.sampled_from(
        [
            *r"{}\$%()[],.^_-+=/ 059ax",
            *(
                "\\boxed{",
                "\\fbox {",
                "\\text{",
                "\\frac",
                "\\left",
                "\\right.",
                "\\overline{",
                "\\{",
                "\\\\",
            ),
            *("\u221a", "\u00bd", "\u00b2", "1 1/2", "\n", "\ud800", "\\times 10^", "</answer>"),
        ]
    ),
    max_size=40,
).map("".join)
ANY_TEXT = st.text(st.characters(), max_size=60) | FRAGMENTS


@settings(max_examples=500, deadline=None)
@given(ANY_TEXT)
def test_no_text_makes_the_rules_raise(text: str) -> None:
    box = last_box(text)
    assert box is None or (box in text and box == box.strip())
    last_number(text)
    once = clean(text)
    assert clean(once) == once
    decide(once, "5")
    decide(once, r"\frac{1}{3}")
    normalise(text)
    letter(text)
    for name in ("match", "choice", "boxed"):
        assert get_verifier(name).check(text, "B") in (0.0, 1.0)


@settings(max_examples=60, deadline=None)
@given(FRAGMENTS)
def test_no_box_makes_math_raise(text: str) -> None:
    assert MATH.check(rf"\boxed{{{text}}}", r"\sqrt{7}") in (0.0, 1.0)


@pytest.mark.parametrize(
    "text", ["\\boxed{" * 50_000, "\\boxed{" * 50_000 + "}" * 50_000, "{" * 200_000, "1," * 200_000]
)
def test_extraction_takes_linear_time(text: str) -> None:
    began = time.process_time()
    last_box(text)
    last_number(text)
    assert time.process_time() - began < 3.0

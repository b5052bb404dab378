"""Verifiers by name, and what becomes of everything that they can return."""

import math
import re
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from megatron_hacpo.reward import BadGroundTruth, Verifier, get_verifier
from megatron_hacpo.reward.base import Outcome, check_one
from megatron_hacpo.reward.length import less_overlong, of_truncated

UNIT = (0.0, 1.0)


def outcome(value: object) -> Outcome:
    """Of a verifier that returns `value`."""
    return check_one(Verifier("fixed", lambda text, answer: value), "", "", UNIT)


@pytest.mark.parametrize(
    "value", [0.5, np.float32(0.5), np.float64(0.5), Decimal("0.5"), Fraction(1, 2), np.array(0.5)]
)
def test_every_kind_of_number_is_a_reward(value: object) -> None:
    assert outcome(value) == Outcome(0.5)


@pytest.mark.parametrize("value", [True, 1, np.True_, np.int64(1)])
def test_so_is_bool(value: object) -> None:
    assert outcome(value) == Outcome(1.0)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("1", "wrong_type"),
        ([1.0], "wrong_type"),
        ((0.5, 0.5), "wrong_type"),
        (np.ones(2), "wrong_type"),
        (1j, "wrong_type"),
        (object(), "wrong_type"),
        (math.nan, "not_a_number"),
        (np.nan, "not_a_number"),
        (math.inf, "out_of_range"),
        (1.5, "out_of_range"),
        (-0.1, "out_of_range"),
    ],
)
def test_what_is_no_reward_is_a_failure(value: object, reason: str) -> None:
    got = outcome(value)
    assert (got.reward, got.failure) == (None, reason)
    assert got.detail.startswith("returned ")
    assert len(got.detail) < 300


def test_none_is_no_reward_and_no_failure() -> None:
    assert outcome(None) == Outcome(None)


def test_exceptions_are_failures_but_for_the_last_memory() -> None:
    def check(text: str, answer: str) -> float:
        raise {"bad": BadGroundTruth, "exit": SystemExit, "memory": MemoryError}.get(text, ValueError)(answer)

    verifier = Verifier("raising", check)
    assert check_one(verifier, "bad", "why", UNIT) == Outcome(None, "ground_truth", "why")
    assert check_one(verifier, "exit", "why", UNIT) == Outcome(None, "exception", "SystemExit('why')")
    assert check_one(verifier, "", "why", UNIT) == Outcome(None, "exception", "ValueError('why')")
    with pytest.raises(MemoryError):
        check_one(verifier, "memory", "", UNIT)


@pytest.mark.parametrize(
    ("policy", "needs_stop", "expected"),
    [
        ("keep", False, None),
        ("keep", True, Outcome(-1.0)),
        ("zero", False, Outcome(-1.0)),
        ("zero", True, Outcome(-1.0)),
        ("mask", False, Outcome(None)),
        ("mask", True, Outcome(None)),
    ],
)
def test_truncated_responses(policy: str, needs_stop: bool, expected: Outcome | None) -> None:
    assert of_truncated(policy, needs_stop=needs_stop, lowest=-1.0) == expected


def test_overlong_responses_lose_more_the_nearer_the_limit_and_never_fall_below_the_lowest() -> None:
    lengths = np.array([0, 800, 850, 900, 1000, 5000, 850, 900, 1000], dtype=np.int32)
    rewards = np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.1, np.nan])
    shaped = less_overlong(rewards, lengths, limit=1000, buffer=200, penalty=0.5, lowest=0.0)
    assert shaped.dtype == np.float64
    assert shaped[:8].tolist() == pytest.approx([1.0, 1.0, 0.875, 0.75, 0.5, 0.5, 0.0, 0.0], abs=1e-12)
    assert np.isnan(shaped[8])


def test_a_sum_of_weights_may_be_a_little_off_the_range() -> None:
    weighted = Verifier("sum", lambda text, answer: float(text))
    assert 0.8 + 0.4 > 1.2
    assert check_one(weighted, str(0.8 + 0.4), "", (0.0, 1.2)).reward == 1.2
    assert check_one(weighted, "1.21", "", (0.0, 1.2)).failure == "out_of_range"


def test_the_stated_choice_is_found_in_linear_time() -> None:
    check = get_verifier("choice").check
    start = time.process_time()
    assert check("the answer is" + " " * 200_000 + "x", "B") == 0.0
    assert time.process_time() - start < 1.0


CHOICES = [
    (r"\boxed{B}", 1.0),
    (r"\boxed{b}", 1.0),
    (r"\boxed{(B)}", 1.0),
    (r"\boxed{\text{B}}", 1.0),
    (r"$\boxed{\textbf{(B)}\ 7}$", 1.0),
    (r"\boxed{B. seven}", 1.0),
    (r"\boxed{B: 7}", 1.0),
    (r"\boxed{B)}", 1.0),
    ("\\boxed{\uff22}", 1.0),
    (r"A? No. \boxed{A}, or \boxed{B}", 1.0),
    ("The answer is B.", 1.0),
    ("Answer: (B)", 1.0),
    ("**Answer:** **B**", 1.0),
    ("the answer is A, no: the correct choice is B", 1.0),
    (r"\boxed{A}", 0.0),
    (r"\boxed{AB}", 0.0),
    (r"\boxed{Be}", 0.0),
    (r"\boxed{A, B}", 0.0),
    (r"\boxed{}", 0.0),
    (r"the answer is B \boxed{A}", 0.0),
    (r"the answer is B \boxed{7}", 0.0),
    ("the answer is A", 0.0),
    ("the answer is Because", 0.0),
    ("the answer is b", 0.0),
    ("B", 0.0),
    ("", 0.0),
]


@pytest.mark.parametrize(("response", "reward"), CHOICES)
def test_multiple_choice(response: str, reward: float) -> None:
    check = get_verifier("choice").check
    assert check(response, "B") == reward
    assert check(response, "(b)") == reward


@pytest.mark.parametrize("truth", ["", "AB", "7", "B and C"])
def test_a_choice_needs_a_letter(truth: str) -> None:
    with pytest.raises(BadGroundTruth, match="not a letter"):
        get_verifier("choice").check("B", truth)


def test_normalised_match() -> None:
    check = get_verifier("match").check
    for response in (
        "Paris",
        " paris. ",
        "PARIS!",
        '"Paris"',
        r"So \boxed{paris}.",
        "\uff30aris",
        "**Paris**",
    ):
        assert check(response, "Paris") == 1.0, response
    for response in ("", "Par is", "It is Paris", r"Paris \boxed{London}", r"Paris \boxed{}"):
        assert check(response, "Paris") == 0.0, response
    assert check("new\n york", "New York") == 1.0
    assert check("5", "-5") == 0.0
    for truth in ("", " ", "..."):
        with pytest.raises(BadGroundTruth, match="nothing is left"):
            check("a", truth)


def test_custom_verifiers_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_checks.py").write_text(
        "from megatron_hacpo.reward import Verifier\n"
        "def longer(text: str, answer: str) -> float:\n    return float(len(text) > len(answer))\n"
        "STRICT = Verifier('strict', longer, needs_stop=True)\n"
        "LIMIT = 3\n"
    )
    (tmp_path / "my_broken.py").write_text("import module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    verifier = get_verifier("my_checks:longer")
    assert verifier.name == "my_checks:longer"
    assert verifier.check("aa", "a") == 1.0
    assert not verifier.needs_stop
    assert get_verifier("my_checks:STRICT").needs_stop
    for name, message in {
        "exactly": "'exactly' is unknown; use one of \\['boxed', 'choice', 'exact', 'match', 'math',",
        ":f": "unknown",
        "my_checks:": "unknown",
        "my_checks:shorter": "no function 'shorter'",
        "my_checks:LIMIT": "no function 'LIMIT'",
        "my_missing:f": "no module 'my_missing'",
    }.items():
        with pytest.raises(ValueError, match=f"reward.verifier: .*{message}"):
            get_verifier(name)
    with pytest.raises(
        ValueError, match=r"reward.verifier: importing my_broken failed .*module_that_is_not_there"
    ):
        get_verifier("my_broken:f")
    (tmp_path / "my_exit.py").write_text("raise SystemExit(5)\n")
    with pytest.raises(ValueError, match=r"reward.verifier: importing my_exit failed \(SystemExit"):
        get_verifier("my_exit:f")


def test_weights_are_numbers_of_verifiers_that_exist() -> None:
    both = get_verifier({"boxed": 0.75, "exact": 0.25})
    assert both.name == "0.75 boxed + 0.25 exact"
    assert both.needs_stop
    assert check_one(both, r"\boxed{5}", "5", UNIT) == Outcome(0.75, answer="5")
    assert check_one(both, "5", "5", UNIT) == Outcome(0.25)
    for spec, message in (
        ({}, "names no verifier"),
        ({"exact": 0.0}, r"exact: 0.0: not a weight"),
        ({"exact": math.nan}, r"exact: nan: not a weight"),
        ({"exact": 1.0, "maths": 1.0}, "'maths' is unknown"),
    ):
        with pytest.raises(ValueError, match=f"reward.verifier.*{message}"):
            get_verifier(spec)


def test_a_verifier_whose_package_is_missing_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("math", "math_verify"), ("reasoning_gym", "reasoning_gym")):
        with pytest.raises(
            ValueError, match=rf"{name}: needs the package {package}; install megatron-hacpo\[rew"
        ):
            get_verifier(name)


def test_the_example_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(# my_rewards.py.*?)```", text, re.DOTALL)
    assert source is not None
    (tmp_path / "my_rewards.py").write_text(source[1])
    monkeypatch.syspath_prepend(tmp_path)
    verifier = get_verifier({"my_rewards:brevity": 0.5})
    assert check_one(verifier, "5", "5", UNIT) == Outcome(0.25)
    assert check_one(verifier, "it is 6", "5", UNIT) == Outcome(0.0)
    assert check_one(verifier, "5", "", UNIT) == Outcome(None)

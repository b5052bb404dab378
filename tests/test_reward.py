"""Verifiers and what `score` makes of everything they can return."""

import math
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.reward import Verifier, get_verifier, score

PROMPTS = [Prompt(f"p{i}", ({"role": "user", "content": "?"},), answer=str(i)) for i in range(2)]
UNIT = (0.0, 1.0)


def test_exact_match_scores_prompt_major() -> None:
    texts = ["0", "1", "1", " 1"]
    result = score(PROMPTS, texts, ["stop"] * 4, get_verifier("exact"), reward_range=UNIT)
    assert result.rewards.dtype == np.float64
    assert result.rewards.tolist() == [1.0, 0.0, 1.0, 0.0]
    assert (result.valid, result.invalid) == (4, 0)


def test_a_truncated_response_scores_zero() -> None:
    result = score(PROMPTS, ["0", "1"], ["stop", "length"], get_verifier("exact"), reward_range=UNIT)
    assert result.rewards.tolist() == [1.0, 0.0]


def test_a_verifier_that_does_not_need_the_stop_sees_truncated_text() -> None:
    verifier = Verifier("contains", lambda text, answer: answer in text)
    result = score(PROMPTS, ["a0", "b0"], ["length", "stop"], verifier, reward_range=UNIT)
    assert result.rewards.tolist() == [1.0, 0.0]


def test_none_and_nan_are_counted_as_invalid() -> None:
    returns = {"none": None, "nan": math.nan, "numpy": np.float32(0.5), "bool": True}
    verifier = Verifier("table", lambda text, answer: returns[text])
    result = score(PROMPTS, list(returns), ["stop"] * 4, verifier, reward_range=UNIT)
    assert np.isnan(result.rewards[:2]).all()
    assert result.rewards[2:].tolist() == [0.5, 1.0]
    assert (result.valid, result.invalid) == (2, 2)


def test_no_responses() -> None:
    result = score([], [], [], get_verifier("exact"), reward_range=UNIT)
    assert result.rewards.shape == (0,)
    assert (result.valid, result.invalid) == (0, 0)


@pytest.mark.parametrize("value", [1.5, -0.1, math.inf, "1", [1.0], Decimal("0.5"), 1j])
def test_a_value_outside_the_contract_names_prompt_and_value(value: object) -> None:
    verifier = Verifier("odd", lambda text, answer: value if text == "bad" else 0.0)
    with pytest.raises(ValueError, match="verifier odd on prompt p1: returned") as caught:
        score(PROMPTS, ["fine", "bad"], ["stop"] * 2, verifier, reward_range=UNIT)
    assert repr(value).strip("'") in str(caught.value)


def test_a_wider_range_accepts_its_ends() -> None:
    verifier = Verifier("wide", lambda text, answer: float(text))
    result = score(PROMPTS, ["-1", "2"], ["stop"] * 2, verifier, reward_range=(-1.0, 2.0))
    assert result.rewards.tolist() == [-1.0, 2.0]


def test_an_exception_names_the_prompt() -> None:
    verifier = Verifier("number", lambda text, answer: float(text == answer) / float(text))
    with pytest.raises(
        ValueError, match=r"reward.verifier: number failed on prompt p1 \(ZeroDivisionError"
    ) as caught:
        score(PROMPTS, ["1", "0"], ["stop"] * 2, verifier, reward_range=UNIT)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


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
        "exactly": "'exactly' is unknown; use one of \\['exact'\\]",
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

"""reasoning-gym's scorers behind our rules."""

import inspect
import json
import re
import sys
from pathlib import Path

import pytest
import reasoning_gym
from reasoning_gym.factory import DATASETS

from megatron_hacpo.data.read import read_prompts
from megatron_hacpo.reward import BadGroundTruth, get_verifier
from megatron_hacpo.reward.gym import EVALUATES_EXPRESSIONS, EVALUATES_LISTS

pytestmark = pytest.mark.real
CHECK = get_verifier("reasoning_gym").check


def entry(name: str) -> dict[str, object]:
    return reasoning_gym.create_dataset(name, size=1, seed=1)[0]


@pytest.mark.parametrize("name", ["chain_sum", "countdown", "gsm_symbolic", "puzzle24", "simple_integration"])
def test_right_and_wrong_answers(name: str) -> None:
    row = entry(name)
    truth = json.dumps(row)
    assert CHECK(f"<answer>7 or so</answer> no: <answer> {row['answer']} </answer>.", truth) == 1.0
    assert CHECK(rf"So \boxed{{{row['answer']}}}", truth) == 1.0
    assert CHECK("<answer>12345678</answer>", truth) < 0.1
    for response in ("", str(row["answer"]), f"<answer>{row['answer']}", "<answer></answer>", r"\boxed{}"):
        assert CHECK(response, truth) == 0.0, response


def test_scores_between_0_and_1_stay() -> None:
    assert CHECK("<answer>1 + 1</answer>", json.dumps(entry("countdown"))) == 0.05


@pytest.mark.parametrize("name", sorted(EVALUATES_LISTS | EVALUATES_EXPRESSIONS))
def test_answers_that_would_be_evaluated_are_not(name: str, tmp_path: Path) -> None:
    row = entry(name)
    mark = tmp_path / "mark"
    code = f"__import__('pathlib').Path('{mark}').touch()"
    for answer in (code, f"[{code}]", f"5! + {code}", f"({code})*x", f"S('{code}')", f"x.__class__({code})"):
        assert CHECK(f"<answer>{answer}</answer>", json.dumps(row)) == 0.0
    assert not mark.exists()
    reasoning_gym.create_dataset(name, size=1, seed=1).score_answer(code, row)
    assert mark.exists()  # what would have been


def test_every_data_set_that_evaluates_an_answer_is_known() -> None:
    evaluates = re.compile(r"(?<![\w.])(?:eval|exec)\(answer|parse_expr\(\s*(?:user_)?answer|sympify\(")
    found = set()
    for name, (data_set, _) in DATASETS.items():
        source = inspect.getsource(sys.modules[data_set.__module__])
        if evaluates.search(source):
            found.add(name)
    assert found == EVALUATES_LISTS | EVALUATES_EXPRESSIONS


@pytest.mark.parametrize(
    "truth",
    ["", "5", "null", "[]", "{}", '{"metadata": {}}', '{"answer": "5", "metadata": {"source_dataset": "x"}}'],
)
def test_other_ground_truths_are_refused(truth: str) -> None:
    with pytest.raises(BadGroundTruth, match="not an entry of reasoning-gym as JSON"):
        CHECK("<answer>5</answer>", truth)


def test_an_entry_that_json_spoils_is_refused() -> None:
    with pytest.raises(BadGroundTruth, match=r"the entry's own answer scores 0.05"):
        CHECK("<answer>5</answer>", json.dumps(entry("arc_agi")))


def test_the_rows_of_the_documentation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (Path(__file__).parents[1] / "docs" / "rewards.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(import json, reasoning_gym.*?)```", text, re.DOTALL)
    assert source is not None
    monkeypatch.chdir(tmp_path)
    exec(source[1], {})
    prompts = read_prompts("train.jsonl").prompts
    assert len(prompts) == 1000
    right = json.loads(prompts[0].answer)["answer"]
    assert CHECK(f"<answer>{right}</answer>", prompts[0].answer) == 1.0

"""tools/prepare_math_data.py: every layout, what is left out, bad input. All problems are invented here."""

import json
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from megatron_hacpo.data.read import read_prompts
from megatron_hacpo.reward import get_verifier, registry

TOOL = Path(__file__).parents[1] / "tools" / "prepare_math_data.py"


class Tool:
    """Runs the tool in this process. out, err: what it printed the last time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
        self.folder, self.target = folder, folder / "out" / "target.jsonl"
        self.out, self.err = "", ""
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, layout: str, source: Path, *options: str) -> int:
        """The exit code."""
        arguments = [str(TOOL), layout, str(source), str(self.target), *options]
        self._monkeypatch.setattr(sys, "argv", arguments)
        code: Any = 0
        try:
            runpy.run_path(str(TOOL), run_name="__main__")
        except SystemExit as end:
            code = end.code
        self.out, self.err = self._capsys.readouterr()
        return code

    def source(self, *rows: object) -> Path:
        path = self.folder / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def converted(self, layout: str, *rows: object) -> list[tuple[str, str, str, str]]:
        """(id, prompt, answer, group) of each row that is written for these."""
        assert self(layout, self.source(*rows), "--overwrite") == 0, self.err
        return self.written()

    def written(self) -> list[tuple[str, str, str, str]]:
        prompts = read_prompts(self.target).prompts
        assert all(len(prompt.messages) == 1 for prompt in prompts)
        return [(p.id, p.messages[0]["content"], p.answer, p.group) for p in prompts]


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Tool:
    return Tool(tmp_path, monkeypatch, capsys)


def math_row(number: int, **other: object) -> dict[str, object]:
    solution = rf"At first $\boxed{{0}}$; no, it is $\boxed{{\frac{{{number}}}{{7}}}}$."
    return {"problem": f"Divide {number} by 7.", "solution": solution, "level": "Level 2", **other}


def test_math_rows(tool: Tool) -> None:
    assert tool.converted("math", math_row(3, type="Algebra"), math_row(4, level=5)) == [
        ("math/1", "Divide 3 by 7.", r"\frac{3}{7}", "Level 2"),
        ("math/2", "Divide 4 by 7.", r"\frac{4}{7}", "Level 5"),
    ]
    assert tool.out == "written: 2\n"


def test_math_folder_of_subjects(tool: Tool) -> None:
    for split, subject, number in [
        ("train", "algebra", 10),
        ("train", "algebra", 9),
        ("train", "number_theory", 1),
        ("test", "algebra", 2),
    ]:
        file = tool.folder / "MATH" / split / subject / f"{number}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(math_row(number), indent=4))
    assert tool("math", tool.folder / "MATH", "--split", "train") == 0
    assert [row[0] for row in tool.written()] == ["algebra/9", "algebra/10", "number_theory/1"]
    assert tool("math", tool.folder / "MATH" / "test", "--overwrite") == 0
    assert [row[0] for row in tool.written()] == ["algebra/2"]
    file.write_text("[1]")
    assert tool("math", tool.folder / "MATH" / "test", "--overwrite") == 2
    assert "test/algebra/2.json: not a JSON object" in tool.err


def test_math500(tool: Tool) -> None:
    row = {"problem": "What is 6 minus 8?", "answer": "-2", "subject": "Prealgebra", "level": 1}
    assert tool.converted("math500", {**row, "unique_id": "test/prealgebra/7.json", "solution": "-2"}) == [
        ("test/prealgebra/7.json", "What is 6 minus 8?", "-2", "Level 1")
    ]


def test_gsm8k(tool: Tool) -> None:
    source = tool.folder / "train.parquet"
    rows = [
        {"question": "A ton of sand is 1,000 kg. How much are 12 tons?", "answer": "12 tons\n#### 12,000"},
        {"question": "Half of 3 apples?", "answer": "3/2 = <<3/2=1.5>>1.5\n#### 1.5 "},
        {"question": "A loss of 4?", "answer": "#### -4"},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), source)
    assert tool("gsm8k", source) == 0
    assert [row[2:] for row in tool.written()] == [("12000", "gsm8k"), ("1.5", "gsm8k"), ("-4", "gsm8k")]
    assert [row[0] for row in tool.written()] == ["gsm8k/1", "gsm8k/2", "gsm8k/3"]


def test_aime_with_the_columns_of_every_copy(tool: Tool) -> None:
    assert tool.converted(
        "aime",
        {"id": 60, "problem": "Count to 33.", "answer": "033", "year": "2031", "url": "none"},
        {"ID": "2031-I-2", "Problem": "Count to 204.", "Solution": r"\boxed{5}", "Answer": 204},
        {"question": "Count to 70 degrees.", "answer": r"70^\circ"},
        {"id": "7", "problem": "Count to 0.", "solution": r"Thus \boxed{000}."},
    ) == [
        ("60", "Count to 33.", "33", "2031"),
        ("2031-I-2", "Count to 204.", "204", "aime"),
        ("aime/3", "Count to 70 degrees.", r"70^\circ", "aime"),
        ("7", "Count to 0.", "0", "aime"),
    ]


def test_amc(tool: Tool) -> None:
    rows = [
        {"id": 0, "question": "How old is the oak?", "answer": 27.0},
        {"id": 1, "problem": "How old is the ash?", "answer": "30.0"},
        {"id": 2, "problem": "How tall is the elm?", "answer": -0.25},
    ]
    assert [(row[0], row[2]) for row in tool.converted("amc", *rows)] == [
        ("0", "27"),
        ("1", "30"),
        ("2", "-0.25"),
    ]


def test_minerva(tool: Tool) -> None:
    rows = [
        {"problem": "How far is the lamp?", "solution": r"It is $\boxed{3e8}$ metres.", "type": "Optics"},
        {"question": "How far is the moth?", "answer": "0.5", "solution": r"Not \boxed{2}."},
    ]
    assert [row[2:] for row in tool.converted("minerva", *rows)] == [("3e8", "Optics"), ("0.5", "minerva")]


def olympiad_row(answers: object, **other: object) -> dict[str, object]:
    return {
        "question": "Which numbers?",
        "context": None,
        "final_answer": answers,
        "is_multiple_answer": False,
        "answer_type": "Numerical",
        "unit": None,
        "error": None,
        "subfield": "Algebra",
        "subject": "Math",
        "language": "English",
        "question_type": "Open-ended",
        "modality": "Text-only",
        "image_1": None,
        "images": [],
        **other,
    }


@pytest.mark.parametrize(
    ("answers", "truth", "right", "wrong"),
    [
        (["$2$", r"$-\frac{1}{2}$"], r"2, -\frac{1}{2}", ["-0.5, 2", r"\{2, -1/2\}"], ["2", "2, 0.5"]),
        (["1,3,4"], "1, 3, 4", ["4, 1, 3", r"\{3,4,1\}"], ["1, 3", "134"]),
        (["$101,127$"], "101, 127", ["127, 101", "101,127", r"101 \text{ and } 127"], ["101127", "101"]),
        (["$(1,2)$", "$(3,4)$"], "(1,2), (3,4)", ["(3, 4), (1, 2)"], ["(2,1), (3,4)", "(1,2)"]),
        (["$f(x)=0$", "$f(x)=x$"], "f(x)=0, f(x)=x", ["f(x)=x, f(x)=0"], ["f(x)=0"]),
        ([r"$\sqrt{2}$,$1$"], r"\sqrt{2},1", [r"1, \sqrt{2}"], [r"\sqrt{2}"]),
    ],
)
def test_several_answers_are_compared_by_the_verifier(
    tool: Tool, answers: list[str], truth: str, right: list[str], wrong: list[str]
) -> None:
    ((_, _, answer, group),) = tool.converted("olympiadbench", olympiad_row(answers, is_multiple_answer=True))
    assert (answer, group) == (truth, "Algebra")
    check = get_verifier("math").check
    assert [check(rf"\boxed{{{box}}}", answer) for box in right] == [1.0] * len(right)
    assert [check(rf"\boxed{{{box}}}", answer) for box in wrong] == [0.0] * len(wrong)


def test_olympiadbench_takes_what_can_be_scored(tool: Tool) -> None:
    first, second, third = tool.converted(
        "olympiadbench",
        olympiad_row([r"$\$5$"], context="Let $n=5$."),
        {"question": "And 7,000?", "final_answer": ["$7,000$"]},  # a copy without the other columns
        olympiad_row(["$(1,2)$"], question="A pair?", unit="cm", error="1e-1"),
        olympiad_row(["1"], subject="Physics"),
        olympiad_row(["1"], language="Chinese"),
        olympiad_row(["1"], question_type="Theorem proof"),
        olympiad_row(["1"], modality="Multimodal"),
        olympiad_row(["1"], image_1={"bytes": None, "path": "1.png"}),
        olympiad_row(["1"], question="See <image_1>."),
        olympiad_row(["1"], answer_type="Numerical,Need_human_evaluate"),
        olympiad_row(None),
        olympiad_row([]),
    )
    assert first[1:3] == ("Let $n=5$.\n\nWhich numbers?", r"\$5")
    assert second == ("olympiadbench/2", "And 7,000?", "7,000", "olympiadbench")
    assert third[2] == "(1,2)"
    assert re.findall("(.*): ([0-9]+)", tool.out) == [
        ("written", "3"),
        ("left out, subject is 'Physics'", "1"),
        ("left out, language is 'Chinese'", "1"),
        ("left out, question_type is 'Theorem proof'", "1"),
        ("left out, it has an image", "3"),
        ("left out, a human has to judge the answer", "1"),
        ("left out, it has no answer", "2"),
    ]
    assert f"Physics': 1 (first: {tool.folder / 'rows.jsonl'}:4)\n" in tool.out


BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def dapo_row(content: str, answer: str, index: str) -> dict[str, object]:
    return {
        "data_source": "invented",
        "prompt": [{"role": "user", "content": content}],
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_dapo_without_its_instructions_and_repeats(tool: Tool) -> None:
    problem = "Let $x = 3$.\n\nFind $x^2$."
    row = dapo_row(BEFORE + problem + AFTER, "9", "a-1")
    bare = {"prompt": "Find 2.", "reward_model": {"ground_truth": "2"}, "extra_info": None}
    other = dapo_row(BEFORE + problem + AFTER, "8", "a-2")
    source = tool.folder / "dapo.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row, row, other, row]), source)
    assert tool("dapo", source) == 0
    assert tool.written() == [("a-1", problem, "9", "dapo")]
    assert tool.out == (
        "written: 1\n"
        f"left out, the problem occurred before: 2 (first: {source}: row 2)\n"
        f"left out, the problem occurred before, with another answer: 1 (first: {source}: row 3)\n"
    )
    assert tool.converted("dapo", bare, {**bare, "prompt": BEFORE + "Find 3." + AFTER}) == [
        ("dapo/1", "Find 2.", "2", "dapo"),
        ("dapo/2", "Find 3.", "2", "dapo"),
    ]


GOOD = {"question": "1 and 1?", "answer": "#### 2"}


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("gsm8k", {"question": "?"}, "answer is missing or empty; the row has ['question']"),
        ("gsm8k", {"question": " ", "answer": "#### 2"}, "question is missing or empty"),
        ("gsm8k", {"question": "?", "answer": "It is 2"}, "the last line of 'answer' is 'It is 2'"),
        ("gsm8k", {"question": "?", "answer": "#### 2\nor 3"}, "the last line of 'answer' is 'or 3'"),
        ("gsm8k", {"question": "\ud800", "answer": "#### 2"}, "surrogates not allowed"),
        ("gsm8k", [1], "a JSON object is expected"),
        ("math", math_row(1, solution="It is 1."), r"solution has no \boxed answer"),
        ("math", math_row(1, solution=r"It is \boxed{ }."), r"solution has no \boxed answer"),
        ("math", math_row(1, level=None), "level is missing"),
        ("math500", math_row(1), "answer is missing"),
        ("aime", {"Frage": "?"}, "problem|Problem|question|Question is missing"),
        ("aime", {"problem": "?"}, "solution|Solution is missing"),
        ("amc", {"problem": "?", "answer": ["1"]}, "'answer' must be text or a number, not list"),
        ("amc", {"problem": "?", "answer": True}, "'answer' must be text or a number, not bool"),
        ("olympiadbench", olympiad_row("1"), "'final_answer' must be a list of text"),
        ("olympiadbench", olympiad_row([1]), "'final_answer' must be a list of text"),
        ("olympiadbench", olympiad_row(["1", "2"]), "2 answers without 'is_multiple_answer'"),
        ("dapo", dapo_row("Find 2.", "2", "a"), "not a problem inside the usual instructions"),
        ("dapo", dapo_row(BEFORE + AFTER, "2", "a"), "prompt is missing or empty"),
        ("dapo", {"prompt": [], "reward_model": {"ground_truth": "2"}}, "must be text or one user message"),
        ("dapo", {"prompt": "?", "reward_model": "2"}, "reward_model.ground_truth is missing"),
    ],
)
def test_a_bad_row_is_named_or_skipped(tool: Tool, layout: str, row: object, message: str) -> None:
    source = tool.source(row)
    assert tool(layout, source) == 2
    assert tool.err.startswith(f"error: {source}:1: ")
    assert message in tool.err
    assert tool.err.count("\n") == 1
    assert not tool.target.exists()
    assert tool(layout, source, "--skip-bad") == 2
    assert f"has no rows to write; left out, bad row: 1 (first: {source}:1: " in tool.err


def test_skipping_bad_rows(tool: Tool) -> None:
    source = tool.source({"question": "?"}, GOOD, {"question": "2 and 2?", "answer": ""})
    assert tool("gsm8k", source, "--skip-bad") == 0
    assert [row[0] for row in tool.written()] == ["gsm8k/2"]
    lines = tool.out.splitlines()
    assert lines[0] == "written: 1"
    assert lines[1].startswith(f"left out, bad row: 2 (first: {source}:1: answer is missing")
    twice = tool.source({"id": 1, "problem": "A?", "answer": 1}, {"id": 1, "problem": "B?", "answer": 2})
    assert tool("amc", twice, "--overwrite") == 2
    assert tool.err == f"error: {twice}:2: id '1' is already that of {twice}:1\n"


def test_answers_that_the_verifier_cannot_read(tool: Tool) -> None:
    rows = [math_row(n, solution=rf"\boxed{{{box}}}") for n, box in enumerate([r"\frac{1}{", "1 2", "5"])]
    rows[0]["solution"] = r"\boxed{5)(}"
    source = tool.source(*rows)
    assert tool("math", source) == 0
    assert [row[0] for row in tool.written()] == ["math/3"]
    example = f"2 (first: {source}:1: math-verify cannot read '5)(')"
    assert tool.out == f"written: 1\nleft out, unreadable answer: {example}\n"
    assert tool("math", source, "--overwrite", "--keep-unreadable") == 0
    assert [row[2] for row in tool.written()] == ["5)(", "1 2", "5"]
    assert tool.out == f"written: 3\nkept, unreadable answer: {example}\n"


def test_math_verify_is_needed(tool: Tool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert tool("gsm8k", tool.source(GOOD)) == 2
    assert "needs the package math_verify; install megatron-hacpo[rewards]" in tool.err
    assert not tool.target.exists()


def test_wrong_names_and_files(tool: Tool) -> None:
    source = tool.source(GOOD)
    missing, empty = tool.folder / "missing.jsonl", tool.folder / "empty.jsonl"
    empty.write_text("\n")
    for layout, path, options, message in [
        ("gsm9k", source, (), "no layout 'gsm9k'; there are math, math500, gsm8k, aime, amc,"),
        ("gsm8k", missing, ("--split", "train"), f"{missing} does not exist"),
        ("gsm8k", empty, (), f"{empty} has no rows to write"),
        ("gsm8k", source, ("--split", "train"), "is a file and has no split 'train'"),
    ]:
        assert tool(layout, path, *options) == 2
        assert tool.err.startswith("error: ")
        assert message in tool.err
        assert tool.err.count("\n") == 1
        assert not tool.target.exists()


def test_an_existing_target_is_kept(tool: Tool) -> None:
    source = tool.source(GOOD)
    tool.target.parent.mkdir()
    tool.target.write_text("mine")
    assert tool("gsm8k", source) == 2
    assert tool.err == f"error: {tool.target} exists; give --overwrite or another name\n"
    assert tool.target.read_text() == "mine"
    assert tool("gsm8k", source, "--overwrite") == 0
    assert tool.written() == [("gsm8k/1", "1 and 1?", "2", "gsm8k")]

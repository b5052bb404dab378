r"""Public sets of mathematical problems as prompts: `tools/prepare_math_data.py gsm8k SOURCE gsm8k.jsonl`.

SOURCE is JSON lines, a JSON array, parquet, or a folder with a data set. TARGET gets the bare problems, with
id, answer and group; what else a model is told is set by the run (`data.template`). The layouts:

math               problem, level, solution with the answer in its last \boxed; or files SUBJECT/NUMBER.json
math500            problem, answer, level, unique_id
gsm8k              question, answer with the last line "#### 72"
aime, amc, minerva problem or question, answer or else a box in solution, id, year or type; or with capitals
olympiadbench      question, context, final_answer (a list), is_multiple_answer, answer_type, subfield.
                   Text-only, open-ended, English mathematics is taken; subject, language, question_type,
                   modality and image... tell, and a copy without these columns should hold nothing else.
                   Tolerances of answers are not passed on: the verifiers have none
dapo               prompt (one message with instructions around the problem, or the problem as text),
                   reward_model.ground_truth, extra_info.index

Problems that occurred before are left out, and answers that the verifier `math` cannot read. A row without
what its layout needs is an error.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.read import write_jsonl
from megatron_hacpo.data.rows import Row, read_rows
from megatron_hacpo.reward import BadGroundTruth, get_verifier
from megatron_hacpo.reward.answer import last_box

Values = dict[str, Any]


class LeftOut(Exception):  # noqa: N818 - reads as what it is
    """A sound row that is not written, and why."""


class Fields(NamedTuple):
    """What a row says. Without a group it is the layout's name, without an id the row's number."""

    prompt: str
    answer: str
    group: str | None = None
    id: str | None = None


def _math(row: Values) -> Fields:
    return Fields(_text(row, "problem"), _box(row, "solution"), _level(row), _scalar(row, "unique_id"))


def _math500(row: Values) -> Fields:
    return Fields(_text(row, "problem"), _text(row, "answer"), _level(row), _scalar(row, "unique_id"))


def _gsm8k(row: Values) -> Fields:
    last_line = _text(row, "answer").splitlines()[-1]
    match = re.fullmatch(r"#### *(-?[\d,.]+)", last_line)
    if match is None:
        raise ValueError(f"the last line of 'answer' is {last_line[:80]!r}, not '#### NUMBER'")
    return Fields(_text(row, "question"), match[1].replace(",", ""))


def _contest(row: Values) -> Fields:
    problem = _text(row, "problem", "Problem", "question", "Question")
    answer = _scalar(row, "answer", "Answer") or _box(row, "solution", "Solution")
    answer = re.sub(r"^(-?)0*(\d+)(\.0*)?$", r"\1\2", answer)  # 27.0 as 27, 033 as 33
    return Fields(problem, answer, _scalar(row, "year", "Year", "type"), _scalar(row, "id", "ID"))


_WANTED = {"subject": "Math", "language": "English", "question_type": "Open-ended"}


def _olympiadbench(row: Values) -> Fields:
    for column, wanted in _WANTED.items():
        if row.get(column) not in (None, wanted):
            raise LeftOut(f"{column} is {row[column]!r}")
    question = _text(row, "question")
    images = [row[column] for column in row if column.startswith("image")]
    if row.get("modality") == "Multimodal" or "<image_" in question or any(images):
        raise LeftOut("it has an image")
    if "Need_human_evaluate" in (_scalar(row, "answer_type") or ""):
        raise LeftOut("a human has to judge the answer")
    answers = row.get("final_answer")
    if not answers:
        raise LeftOut("it has no answer")
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"'final_answer' must be a list of text, not {answers!r}")
    if len(answers) > 1 and not row.get("is_multiple_answer"):
        raise ValueError(f"'final_answer' has {len(answers)} answers without 'is_multiple_answer'")
    answer = ", ".join(re.sub(r"(?<!\\)\$", "", answer).strip() for answer in answers)
    if row.get("is_multiple_answer") and re.fullmatch(r"[\d,]+", answer):
        answer = answer.replace(",", ", ")  # the list 101,127 would be the number 101127
    context = _scalar(row, "context")
    return Fields(f"{context}\n\n{question}" if context else question, answer, _scalar(row, "subfield"))


_DAPO = re.compile(
    r"Solve the following math problem step by step\.[^\n]*\n(?s:(.+))\n"
    r'Remember to put your answer on its own line after "Answer:"\.'
)


def _dapo(row: Values) -> Fields:
    match prompt := row.get("prompt"):
        case str(text) | [{"role": "user", "content": str(text)}]:
            wrapped = _DAPO.fullmatch(text.strip())
        case _:
            raise ValueError("'prompt' must be text or one user message")
    if wrapped is None and not isinstance(prompt, str):
        raise ValueError("'prompt' is not a problem inside the usual instructions")
    problem = _text({"prompt": wrapped[1] if wrapped else text}, "prompt")
    return Fields(problem, _text(row, "reward_model.ground_truth"), id=_scalar(row, "extra_info.index"))


LAYOUTS: dict[str, Callable[[Values], Fields]] = {
    "math": _math,
    "math500": _math500,
    "gsm8k": _gsm8k,
    "aime": _contest,
    "amc": _contest,
    "minerva": _contest,
    "olympiadbench": _olympiadbench,
    "dapo": _dapo,
}


def _scalar(row: Values, *columns: str) -> str | None:
    """The first of the columns that is not null, as text; None for none, and for empty text."""
    for column in columns:
        value: Any = row
        for name in column.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise ValueError(f"{column!r} must be text or a number, not {type(value).__name__}")
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{column!r} is {value}")
            return str(value).strip() or None
    return None


def _text(row: Values, *columns: str) -> str:
    text = _scalar(row, *columns)
    if text is None:
        raise ValueError(f"{'|'.join(columns)} is missing or empty; the row has {sorted(row)}")
    return text


def _box(row: Values, *columns: str) -> str:
    box = last_box(_text(row, *columns))
    if not box:
        raise ValueError(f"{'|'.join(columns)} has no \\boxed answer")
    return box


def _level(row: Values) -> str:
    return "Level " + _text(row, "level").removeprefix("Level ")


def _rows(layout: str, source: Path, split: str | None) -> Iterator[Row]:
    """The rows of `read_rows`, or of a folder of SUBJECT/NUMBER.json, in which `math` was published."""
    files = (source / (split or "")).glob("*/[0-9]*.json") if layout == "math" else ()
    in_order = sorted(files, key=lambda file: (file.parent.name, len(file.stem), file.stem))
    if not in_order:
        yield from read_rows(source, split)
    for number, file in enumerate(in_order, 1):
        try:
            values = {**json.loads(file.read_bytes()), "unique_id": f"{file.parent.name}/{file.stem}"}
        except (ValueError, TypeError, RecursionError) as error:
            yield Row(number, str(file), None, f"not a JSON object ({error})")
        else:
            yield Row(number, str(file), values)


def _prompt(layout: str, row: Row) -> Prompt:
    if row.values is None:
        raise ValueError(row.problem)
    fields = LAYOUTS[layout](row.values)
    "".join(filter(None, fields)).encode("utf-8")  # a lone surrogate could not be written
    return Prompt(
        id=fields.id or f"{layout}/{row.number}",
        messages=({"role": "user", "content": fields.prompt},),
        answer=fields.answer,
        group=fields.group or layout,
    )


def convert(
    layout: str, rows: Iterable[Row], *, skip_bad: bool = False, keep_unreadable: bool = False
) -> tuple[list[Prompt], list[str]]:
    """The prompts of a layout's rows, and a line for each reason why others are left out.

    Raises ValueError for a bad row, naming it, and without math-verify.
    """
    check = get_verifier("math").check
    prompts: list[Prompt] = []
    answer_of: dict[str, str] = {}
    place_of: dict[str, str] = {}
    counts: Counter[str] = Counter()
    examples: dict[str, str] = {}

    def count(what: str, example: str) -> None:
        counts[what] += 1
        examples.setdefault(what, example)

    for row in rows:
        try:
            prompt = _prompt(layout, row)
            problem = prompt.messages[0]["content"]
            if problem in answer_of:
                same = answer_of[problem] == prompt.answer
                raise LeftOut("the problem occurred before" + ("" if same else ", with another answer"))
            if prompt.id in place_of:
                raise ValueError(f"id {prompt.id!r} is already that of {place_of[prompt.id]}")
            try:
                check("", prompt.answer)
            except BadGroundTruth as error:
                what = f"{'kept' if keep_unreadable else 'left out'}, unreadable answer"
                count(what, f"{row.place}: {error}")
                if not keep_unreadable:
                    continue  # and a later copy of the problem may do
            answer_of[problem], place_of[prompt.id] = prompt.answer, row.place
        except LeftOut as reason:
            count(f"left out, {reason}", row.place)
        except ValueError as error:
            if not skip_bad:
                raise ValueError(f"{row.place}: {error}") from error
            count("left out, bad row", f"{row.place}: {error}")
        else:
            prompts.append(prompt)
    return prompts, [f"{what}: {counts[what]} (first: {examples[what]})" for what in counts]


def prepare(options: argparse.Namespace) -> list[str]:
    """Writes the target; a line for each count. Raises ValueError and OSError that say what is wrong."""
    if options.layout not in LAYOUTS:
        raise ValueError(f"no layout {options.layout!r}; there are {', '.join(LAYOUTS)}")
    if not options.source.exists():
        raise ValueError(f"{options.source} does not exist")
    if options.target.exists() and not options.overwrite:
        raise ValueError(f"{options.target} exists; give --overwrite or another name")
    prompts, others = convert(
        options.layout,
        _rows(options.layout, options.source, options.split),
        skip_bad=options.skip_bad,
        keep_unreadable=options.keep_unreadable,
    )
    if not prompts:
        raise ValueError("; ".join([f"{options.source} has no rows to write", *others]))
    options.target.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(prompts, options.target)
    return [f"written: {len(prompts)}", *others]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("layout", metavar="LAYOUT", help=", ".join(LAYOUTS))
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a file or folder")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the JSONL file to write")
    parser.add_argument("--split", help="of a folder that has several")
    parser.add_argument("--skip-bad", action="store_true", help="leave bad rows out instead of ending")
    parser.add_argument(
        "--keep-unreadable", action="store_true", help="write answers that the verifier `math` cannot read"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace TARGET")
    options = parser.parse_args()
    try:
        print("\n".join(prepare(options)))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

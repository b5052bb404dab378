"""Prompt files and sources: order, epochs, over-long prompts, and every malformed row."""

import json
import runpy
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.jsonl import read_jsonl, write_jsonl
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.source import JsonlSource, TaskSource, filter_long, open_source


def write_rows(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps({"prompt": "q" * (i + 1), "answer": i}) + "\n" for i in range(count)))
    return path


def answers(prompts: Sequence[Prompt]) -> list[int]:
    return [int(prompt.answer) for prompt in prompts]


def character_counts(prompts: Sequence[Prompt]) -> Mapping[str, Sequence[int]]:
    counts = [len(prompt.messages[0]["content"]) for prompt in prompts]
    return {"short": [count // 2 for count in counts], "long": counts}


def test_rows_in_every_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    rows = [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": messages, "answer": 4, "group": "add", "id": "four", "other": None},
        {"prompt": "half", "answer": 0.5, "id": None},
    ]
    path.write_text(json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1]) + "\n" + json.dumps(rows[2]))
    assert read_jsonl(path) == [
        Prompt("rows.jsonl:1", ({"role": "user", "content": "1+1?"},), "2"),
        Prompt("four", tuple(messages), "4", "add"),
        Prompt("rows.jsonl:4", ({"role": "user", "content": "half"},), "0.5"),
    ]


def test_other_column_names(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "1+1?", "solution": 2}\n')
    (prompt,) = read_jsonl(path, prompt_key="question", answer_key="solution")
    assert prompt.answer == "2"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (b'{"prompt": "x", "answer"', "Expecting"),
        (b'["x", "y"]', "a JSON object is expected, not list"),
        (b'{"prompt": "x"}', "'answer' is missing; the row has \\['prompt'\\]"),
        (b'{"prompt": "x", "answer": null}', "'answer' is null"),
        (b'{"answer": "y"}', "'prompt' is missing"),
        (b'{"prompt": "x", "answer": true}', "'answer' must be a string or a number, not bool"),
        (b'{"prompt": "x", "answer": [1]}', "'answer' must be a string or a number, not list"),
        (b'{"prompt": "x", "answer": NaN}', "NaN is not JSON"),
        (b'{"prompt": "", "answer": 1}', "'prompt' must be a non-empty string"),
        (b'{"prompt": [], "answer": 1}', "'prompt' must be"),
        (b'{"prompt": 7, "answer": 1}', "'prompt' must be"),
        (b'{"prompt": [{"role": "user"}], "answer": 1}', "'prompt' must be"),
        (b'{"prompt": [{"role": "user", "content": null}], "answer": 1}', "'prompt' must be"),
        (b'{"prompt": "\xff", "answer": 1}', "utf-8"),
        (b'{"prompt": "\\ud800", "answer": 1}', "utf-8"),
        (b'{"prompt": "x", "answer": 1, "id": "first"}', "id 'first' is already used in line 1"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, row: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(b'{"prompt": "x", "answer": 1, "id": "first"}\n\n' + row + b"\n")
    with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{message}"):
        read_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl:1: the file has no prompts"):
        JsonlSource(path, seed=0, batch_size=1)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    prompts = [
        *rule_task.held_out(8),
        Prompt(
            "dialogue", ({"role": "system", "content": "a"}, {"role": "user", "content": "b\n\u00e9"}), "c"
        ),
        Prompt("assistant", ({"role": "assistant", "content": "a"},), "\u2028"),
    ]
    write_jsonl(prompts, tmp_path / "out.jsonl")
    assert read_jsonl(tmp_path / "out.jsonl") == prompts


@given(size=st.integers(1, 12), batch_size=st.integers(1, 12), seed=st.integers(0, 3))
def test_every_prompt_once_an_epoch_and_once_a_batch(
    tmp_path_factory: pytest.TempPathFactory, size: int, batch_size: int, seed: int
) -> None:
    path = write_rows(tmp_path_factory.getbasetemp() / f"{size}.jsonl", size)
    if size < batch_size:
        with pytest.raises(
            ValueError, match=f"has {size} usable prompts, fewer than batch.prompts {batch_size}"
        ):
            JsonlSource(path, seed=seed, batch_size=batch_size)
        return
    source = JsonlSource(path, seed=seed, batch_size=batch_size)
    batches = [answers(source.batch(step)) for step in range(1, size + 1)]  # batch_size epochs
    assert all(len(set(batch)) == batch_size for batch in batches)
    drawn = [answer for batch in batches for answer in batch]
    for epoch in range(batch_size):
        assert sorted(drawn[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_order_depends_on_the_seed_alone(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", 40)
    source = JsonlSource(path, seed=1, batch_size=16)
    forward = [answers(source.batch(step)) for step in range(1, 7)]
    again = JsonlSource(path, seed=1, batch_size=16)
    assert [answers(again.batch(step)) for step in reversed(range(1, 7))] == forward[
        ::-1
    ]  # as after a resume
    assert answers(JsonlSource(path, seed=2, batch_size=16).batch(1)) != forward[0]
    assert all(sorted(left) != sorted(right) for left, right in pairwise(forward))
    assert forward[0][:6] == [9, 23, 17, 28, 0, 7]  # on every machine


def test_held_out_prompts(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", 3)
    test = write_rows(tmp_path / "test.jsonl", 5)
    options = {"seed": 0, "batch_size": 1}
    assert JsonlSource(train, **options).held_out() == []
    assert answers(JsonlSource(train, **options, eval_path=test).held_out()) == list(range(5))
    assert answers(JsonlSource(train, **options, eval_path=test, eval_prompts=2).held_out()) == [0, 1]
    assert JsonlSource(train, **options, eval_path=test, eval_prompts=0).held_out() == []


def test_filter_long_needs_every_agent() -> None:
    prompts = rule_task.held_out(4)
    lengths = {"A": [3, 5, 6, 1], "B": [5, 2, 2, 6]}
    assert filter_long(prompts, lengths, {"A": 5, "B": 5}) == ([prompts[0], prompts[1]], 2)
    assert filter_long(prompts, lengths, {"A": 3, "B": 6}) == ([prompts[0], prompts[3]], 2)
    assert filter_long(prompts, lengths, {"A": 6, "B": 6}) == (prompts, 0)
    assert filter_long([], {"A": []}, {"A": 5}) == ([], 0)


def test_long_prompts_are_dropped_and_counted(tmp_path: Path) -> None:
    train = write_rows(tmp_path / "train.jsonl", 10)
    test = write_rows(tmp_path / "test.jsonl", 7)
    limits = {"short": 4, "long": 4}
    options = {"seed": 0, "lengths": character_counts, "max_prompt_tokens": limits, "eval_path": test}
    source = JsonlSource(train, batch_size=4, **options)
    assert source.dropped() == {"data.path": 6, "evaluation.path": 3}
    assert sorted(answers(source.batch(1))) == answers(source.held_out()) == [0, 1, 2, 3]
    with pytest.raises(
        ValueError, match=r"has 4 usable prompts \(6 longer than rollout.max_prompt_tokens dro"
    ):
        JsonlSource(train, batch_size=5, **options)


def test_open_source_picks_by_configuration(tmp_path: Path) -> None:
    limits = {"short": 13, "long": 13}
    common = {"seed": 3, "batch_size": 4, "max_prompt_tokens": limits, "lengths": character_counts}
    task = open_source(task="rule_arithmetic", eval_prompts=8, **common)
    assert isinstance(task, TaskSource)
    assert task.batch(5) == rule_task.batch(3, 5, 4)
    assert task.held_out() == rule_task.held_out(8)
    path = write_rows(tmp_path / "rows.jsonl", 20)
    file = open_source(path=path, eval_path=path, eval_prompts=2, **common)
    assert isinstance(file, JsonlSource)
    assert file.dropped()["data.path"] == 7
    assert answers(file.held_out()) == [0, 1]


@pytest.mark.parametrize("eval_prompts", [0, 8])
def test_a_task_beyond_an_agents_limit_is_refused(eval_prompts: int) -> None:
    with pytest.raises(ValueError, match=r"max_prompt_tokens: 12 is below the 13 tokens .* for agent long"):
        open_source(
            task="rule_arithmetic",
            seed=3,
            batch_size=4,
            lengths=character_counts,
            max_prompt_tokens={"short": 6, "long": 12},
            eval_prompts=eval_prompts,
        )


def test_the_writing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(__file__).parents[1] / "tools" / "write_prompts.py"
    for options, expected in {
        ("--count", "12", "--seed", "4"): Counter(rule_task.batch(4, 0, 12)[i].id for i in range(12)),
        ("--count", "8", "--held-out"): Counter(prompt.id for prompt in rule_task.held_out(8)),
    }.items():
        monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path / "out.jsonl"), *options])
        runpy.run_path(str(tool), run_name="__main__")
        assert Counter(prompt.id for prompt in read_jsonl(tmp_path / "out.jsonl")) == expected

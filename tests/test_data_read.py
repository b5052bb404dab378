"""Prompts out of every kind of file, and every row that is none."""

import json
import os
import runpy
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hacpo.data import rows, rule_task
from megatron_hacpo.data.prompts import Columns, Prompt
from megatron_hacpo.data.read import read_prompts, write_jsonl

USER = ({"role": "user", "content": "1+1?"},)


def lines(path: Path, *found: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in found))
    return path


def test_rows_in_every_shape(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    found = [
        {"prompt": "1+1?", "answer": "2"},
        {"prompt": messages, "answer": 4, "group": "add", "id": "four", "other": None},
        {"prompt": "half", "answer": 0.5, "id": None, "group": 0},
    ]
    path.write_text(
        "\ufeff" + json.dumps(found[0]) + "\n\n" + json.dumps(found[1]) + "\n" + json.dumps(found[2])
    )
    assert read_prompts(path).prompts == [
        Prompt("rows.jsonl:1", USER, "2"),
        Prompt("four", tuple(messages), "4", "add"),
        Prompt("rows.jsonl:4", ({"role": "user", "content": "half"},), "0.5", "0"),
    ]


def test_other_column_names_template_and_system(tmp_path: Path) -> None:
    row = {"q.text": "1+1?", "reward": {"truth": 2}, "extra": {"index": 7}, "level": "easy"}
    columns = Columns(
        prompt="q.text",
        answer="reward.truth",
        id="extra.index",
        group="level",
        template="{prompt} Answer in \\boxed{}.",
        system="Be brief.",
    )
    (prompt,) = read_prompts(lines(tmp_path / "rows.jsonl", row), columns).prompts
    system, user = prompt.messages
    assert (prompt.id, prompt.answer, prompt.group) == ("7", "2", "easy")
    assert system == {"role": "system", "content": "Be brief."}
    assert user == {"role": "user", "content": "1+1? Answer in \\boxed{}."}


def test_parts_of_text_and_keys_that_are_null(tmp_path: Path) -> None:
    """As tables have them, whose rows all have the same keys."""
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]
    row = {"prompt": [{"role": "user", "content": parts, "name": None}], "answer": 2}
    (prompt,) = read_prompts(lines(tmp_path / "rows.jsonl", row)).prompts
    assert prompt.messages == USER


ROWS = [{"prompt": f"{i}+1?", "answer": str(i + 1), "group": None} for i in range(3)]


def as_json(folder: Path) -> Path:
    path = folder / "rows.json"
    path.write_text(json.dumps(ROWS, indent=2))
    return path


def as_json_lines(folder: Path) -> Path:
    """Which hubs call .json too."""
    return lines(folder / "rows.json", *ROWS)


def as_parquet(folder: Path) -> Path:
    return dataset(folder).to_parquet(folder / "rows.parquet") and folder / "rows.parquet"


def as_saved_set(folder: Path) -> Path:
    dataset(folder).save_to_disk(folder / "rows")
    return folder / "rows"


def as_saved_splits(folder: Path) -> Path:
    import datasets

    datasets.DatasetDict(train=dataset(folder)).save_to_disk(folder / "rows")
    return folder / "rows"


def as_hub_folder(folder: Path) -> Path:
    (folder / "rows" / "data").mkdir(parents=True)
    (folder / "rows" / "README.md").write_text("# Rows\n")
    dataset(folder).to_parquet(folder / "rows" / "data" / "train-00000-of-00001.parquet")
    return folder / "rows"


def dataset(folder: Path) -> Any:
    import datasets

    datasets.disable_progress_bars()
    return datasets.Dataset.from_list(ROWS)


@pytest.mark.parametrize(
    "write", [as_json, as_json_lines, as_parquet, as_saved_set, as_saved_splits, as_hub_folder]
)
def test_every_kind_of_file(write: Callable[[Path], Path], tmp_path: Path) -> None:
    path = write(tmp_path)
    assert read_prompts(path).prompts == [
        Prompt(f"{path.name}:{i + 1}", ({"role": "user", "content": f"{i}+1?"},), str(i + 1))
        for i in range(3)
    ]


def test_numbers_of_tables_are_written_as_they_were(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    found = {"half": pyarrow.float16(), "single": pyarrow.float32(), "double": pyarrow.float64()}
    numbers = {name: pyarrow.array([0.1, 72.0], kind) for name, kind in found.items()}
    parquet.write_table(pyarrow.table({"prompt": ["a", "b"], **numbers}), tmp_path / "rows.parquet")
    for name in found:
        prompts = read_prompts(tmp_path / "rows.parquet", Columns(answer=name)).prompts
        assert [prompt.answer for prompt in prompts] == ["0.1", "72"]


def test_a_column_of_images_needs_no_decoding(tmp_path: Path) -> None:
    import datasets

    features = {
        "prompt": datasets.Value("string"),
        "answer": datasets.Value("int64"),
        "image": datasets.Image(),
    }
    found = {"prompt": ["1+1?"], "answer": [2], "image": [{"bytes": b"no image", "path": None}]}
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict(found, features=datasets.Features(features)).save_to_disk(tmp_path / "rows")
    assert read_prompts(tmp_path / "rows").prompts == [Prompt("rows:1", USER, "2")]


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (None, r"which split\? there are test, train; set split"),
        ("dev", "no split 'dev'; there are test, train"),
    ],
)
def test_a_split_must_be_there(split: str | None, message: str, tmp_path: Path) -> None:
    import datasets

    datasets.DatasetDict(train=dataset(tmp_path), test=dataset(tmp_path)).save_to_disk(tmp_path / "rows")
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "rows", split=split)
    assert len(read_prompts(tmp_path / "rows", split="test").prompts) == 3


def test_files_have_no_splits(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a file and has no split 'train'; leave split out"):
        read_prompts(as_json(tmp_path), split="train")
    with pytest.raises(ValueError, match="has no splits; leave split out"):
        read_prompts(as_saved_set(tmp_path), split="train")


BAD_ROWS = [
    (b'{"prompt": "x", "answer"', "Expecting ':' delimiter at column 25"),
    (b'["x", "y"]', "a JSON object is expected, not list"),
    (b'{"prompt": "x"}', "'answer' is missing; the row has \\['prompt'\\]"),
    (b'{"prompt": "x", "answer": null}', "'answer' is null"),
    (b'{"answer": "y"}', "'prompt' is missing"),
    (b'{"prompt": "x", "answer": true}', "'answer' must be text or a number, not bool"),
    (b'{"prompt": "x", "answer": [1]}', "'answer' must be text or a number, not list"),
    (b'{"prompt": "x", "answer": NaN}', "NaN is not JSON"),
    (b'{"prompt": "x", "answer": 1e999}', "'answer' is inf"),
    (b'{"prompt": "", "answer": 1}', "'prompt' must be a non-empty string"),
    (b'{"prompt": [], "answer": 1}', "'prompt' must be"),
    (b'{"prompt": 7, "answer": 1}', "'prompt' must be"),
    (b'{"prompt": [{"role": "user"}], "answer": 1}', "'prompt' must be"),
    (b'{"prompt": [{"role": "user", "content": null}], "answer": 1}', "'prompt' must be"),
    (b'{"prompt": ["x"], "answer": 1}', "'prompt' must be"),
    (b'{"prompt": [{"role": "user", "content": [{"type": "text", "text": null}]}], "answer": 1}', "must be"),
    (b'{"prompt": [{"role": "banana", "content": "x"}], "answer": 1}', "'prompt' has the role 'banana'"),
    (
        b'{"prompt": [{"role": "assistant", "content": "x"}], "answer": 1}',
        "ends with a message of the assistant",
    ),
    (b'{"prompt": "x", "answer": 1, "id": "a\\nb"}', "the id 'a\\\\nb' has characters that cannot be shown"),
    (
        b'{"prompt": [{"role": "user", "content": [{"type": "image", "image": "x.png"}]}], "answer": 1}',
        "'prompt' has image in a message; only text can be trained on",
    ),
    (b'{"prompt": "\xff", "answer": 1}', "utf-8"),
    (b'{"prompt": "\\ud800", "answer": 1}', "utf-8"),
    (b'{"prompt": "x", "answer": 1, "id": "first"}', "id 'first' is already that of .*bad.jsonl:1"),
    (b"[" * 100_000, "recursion"),
    (
        b'{"prompt": "x", "answer": "' + b"1" * rows.LONGEST_LINE + b'"}',
        "a line of more than 16 MiB is not a row",
    ),
]


@pytest.mark.parametrize(("row", "message"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_names_file_and_line_or_is_skipped(tmp_path: Path, row: bytes, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    good = b'{"prompt": "x", "answer": 1, "id": "first"}\n'
    path.write_bytes(good + b"\n" + row + b"\n" + good.replace(b"first", b"last"))
    with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{message}"):
        read_prompts(path)
    file = read_prompts(path, bad_rows="skip")
    assert [prompt.id for prompt in file.prompts] == ["first", "last"]
    assert len(file.skipped) == 1
    assert f"{path}:3: " in file.skipped[0]


def test_a_hundred_megabyte_line_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    with path.open("wb") as file:
        file.write(b'{"prompt": "x", "answer": 1}\n')
        for _ in range(100):
            file.write(b"x" * 2**20)
        file.write(b'\n{"prompt": "y", "answer": 1}\n')
    tracemalloc.start()
    file_read = read_prompts(path, bad_rows="skip")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [prompt.id for prompt in file_read.prompts] == ["long.jsonl:1", "long.jsonl:3"]
    assert peak < 4 * rows.LONGEST_LINE


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[\n {"prompt": "x", "answer": 1},\n {"prompt": "x"}\n]', "rows.json:3: 'answer' is missing"),
        ('[\n {"prompt": "x", "answer": 1},\n\n {"prompt":\n x}]', "rows.json:5: Expecting value"),
        ('[\n {"prompt": "x", "answer": 1},\n', "rows.json:3: Expecting value"),
        ('[\n {"prompt": "x", "answer": 1}', "rows.json:2: no JSON array"),
        ("[]", "rows.json: holds no prompts"),
        ('[{"prompt": "x", "answer": 1}]\n[{"prompt": "y", "answer": 1}]', "rows.json:1: no JSON array"),
        ('[{"prompt": "x", "answer": 1}\n{"prompt": "y", "answer": 1}]', "rows.json:2: no JSON array"),
        ('[{"prompt": "x", "answer": 1},\n]', "rows.json:2: Expecting value"),
        ('[{"prompt": "x", "answer": "\\ud800"}]', "rows.json:1: .*utf-8"),
        ('[{"prompt": "x", "answer": Infinity}]', "rows.json:1: Infinity is not JSON"),
    ],
)
def test_bad_json_names_its_line(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        read_prompts(path)


def test_a_bad_row_of_a_table_is_numbered(tmp_path: Path) -> None:
    import datasets

    path = tmp_path / "rows.parquet"
    datasets.disable_progress_bars()
    datasets.Dataset.from_list([*ROWS, {"prompt": "x", "answer": None}]).to_parquet(path)
    with pytest.raises(ValueError, match=r"rows.parquet: row 4: 'answer' is null"):
        read_prompts(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "empty.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no prompts"):
        read_prompts(path)


def test_what_is_no_data_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_text("text")
    with pytest.raises(ValueError, match=r"rows.parquet: no parquet file, or a damaged one"):
        read_prompts(tmp_path / "rows.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="folder: no data set"):
        read_prompts(tmp_path / "folder")
    lines(tmp_path / "folder" / "train.jsonl", *ROWS)
    with pytest.raises(ValueError, match=r"folder: no data set: no parquet files.*give .jsonl, .json, "):
        read_prompts(tmp_path / "folder")
    as_hub_folder(tmp_path)
    damaged = tmp_path / "rows" / "data" / "train-00000-of-00001.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-40] + b"x" * 40)
    with pytest.raises(ValueError, match=r"train-00000-of-00001.parquet: no parquet file, or a damaged one"):
        read_prompts(tmp_path / "rows")
    for name in ("rows.csv", "rows.jsonl.gz", "rows"):
        (tmp_path / "kinds").mkdir(exist_ok=True)
        (tmp_path / "kinds" / name).write_text("prompt,answer\n")
        with pytest.raises(
            ValueError, match=r"none of the names that are read; give .jsonl, .json, .parquet"
        ):
            read_prompts(tmp_path / "kinds" / name)
    os.mkfifo(tmp_path / "fifo.jsonl")
    with pytest.raises(ValueError, match=r"fifo.jsonl is neither a file nor a folder"):
        read_prompts(tmp_path / "fifo.jsonl")
    path = lines(tmp_path / "bad.jsonl", {"prompt": 1})
    with pytest.raises(ValueError, match=r"holds no prompts \(1 bad rows, the first: .*bad.jsonl:1"):
        read_prompts(path, bad_rows="skip")


def test_a_template_is_for_single_messages(tmp_path: Path) -> None:
    dialogue = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    path = lines(tmp_path / "rows.jsonl", {"prompt": dialogue, "answer": 1})
    with pytest.raises(ValueError, match=r"rows.jsonl:1: template and system are for single user messages"):
        read_prompts(path, Columns(template="{prompt}!"))


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    system, user = {"role": "system", "content": "a"}, {"role": "user", "content": "b\n\u00e9"}
    prompts = [
        *rule_task.held_out(8),
        Prompt("dialogue", (system, user), "c"),
        Prompt("after", ({"role": "assistant", "content": "a"}, user), "\u2028"),
    ]
    write_jsonl(prompts, tmp_path / "out.jsonl")
    assert read_prompts(tmp_path / "out.jsonl").prompts == prompts


def test_the_writing_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = Path(__file__).parents[1] / "tools" / "write_prompts.py"
    for options, expected in {
        ("--count", "12", "--seed", "4"): Counter(rule_task.batch(4, 0, 12)[i].id for i in range(12)),
        ("--count", "8", "--held-out"): Counter(prompt.id for prompt in rule_task.held_out(8)),
    }.items():
        monkeypatch.setattr(sys, "argv", [str(tool), str(tmp_path / "out.jsonl"), *options])
        runpy.run_path(str(tool), run_name="__main__")
        assert Counter(prompt.id for prompt in read_prompts(tmp_path / "out.jsonl").prompts) == expected

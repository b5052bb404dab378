"""Rows out of files: JSON lines, JSON, parquet, and folders with a data set."""

import json
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LONGEST_LINE = 16 * 2**20
"""Bytes of a line. What is longer is no row, but a file that has lost its line ends."""

_KINDS = "give .jsonl, .json, .parquet, or a data set's folder"
_PART = re.compile(r"-\d+-of-\d+$")

_TABLE_ROWS = 1000
"""Rows of a table that are turned into Python values at a time."""


class Row(NamedTuple):
    """number: from 1, of the line or else of the row. place: for people. values: None where `problem` says
    why there are none."""

    number: int
    place: str
    values: dict[str, Any] | None
    problem: str = ""


def read_rows(path: str | Path, split: str | None = None) -> Iterator[Row]:
    """The rows of a file, or of a folder with a data set, in their order; blank lines are left out.

    path: `.jsonl`; `.json`, an array of objects or lines as well; `.parquet`; or a folder: what
    `Dataset.save_to_disk` wrote, or parquet files SPLIT.parquet or SPLIT-00000-of-00001.parquet, in it or in
    its folder data/, as hubs have them. split: of a folder's; may be left out where there is only one.
    Raises ValueError for what is none of these or not what its name says, for a folder without such a split,
    and for a package that is not installed; OSError for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return _tables(path, _saved(path, split) if _is_saved(path) else _parquet_files(path, split))
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is neither a file nor a folder; {_KINDS}")
    if split is not None and path.is_file():
        raise ValueError(f"{path} is a file and has no split {split!r}; leave split out")
    match path.suffix.lower():
        case ".parquet":
            return _tables(path, _parquet(path))
        case ".json" if _first_character(path) == b"[":
            return _array(path)
        case ".json" | ".jsonl":
            return _lines(path)
    raise ValueError(f"{path} has none of the names that are read; {_KINDS}")


def _lines(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        number = 0
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            too_long = len(line) > LONGEST_LINE
            while too_long and line and not line.endswith(b"\n"):  # the rest of it
                line = file.readline(LONGEST_LINE)
            place = f"{path}:{number}"
            if too_long:
                yield Row(number, place, None, f"a line of more than {LONGEST_LINE >> 20} MiB is not a row")
            elif line.strip():
                yield _row(number, place, line)


def _row(number: int, place: str, line: bytes) -> Row:
    try:
        text = line.decode("utf-8-sig").rstrip()
        return Row(number, place, _object(json.loads(text, parse_constant=_refuse_constant)))
    except json.JSONDecodeError as error:  # without its own idea of the line
        return Row(number, place, None, f"{error.msg} at column {error.colno}")
    except (ValueError, RecursionError) as error:
        return Row(number, place, None, str(error))


def _array(path: Path) -> Iterator[Row]:
    """A JSON array element by element, so that each has its line."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: {error}") from None
    decoder = json.JSONDecoder(parse_constant=_refuse_constant)
    position, number = text.index("["), 0
    counted, line = 0, 1
    while True:
        number += 1
        start = _skip(text, position + 1)
        line += text.count("\n", counted, start)
        counted = start
        place = f"{path}:{line}"
        if number == 1 and text[start : start + 1] == "]":
            break
        try:
            value, end = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            line += text.count("\n", start, error.pos)
            raise ValueError(f"{path}:{line}: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: {error}") from None
        try:
            yield Row(number, place, _object(value))
        except ValueError as error:
            yield Row(number, place, None, str(error))
        position = start = _skip(text, end)
        if text[start : start + 1] != ",":
            break
    line += text.count("\n", counted, start)
    if text[start : start + 1] != "]" or text[start + 1 :].strip():
        raise ValueError(f"{path}:{line}: no JSON array: ',' or a last ']' is missing before or behind here")


def _skip(text: str, position: int) -> int:
    """The place behind white space."""
    while text[position : position + 1].isspace():
        position += 1
    return position


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a JSON object is expected, not {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _first_character(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1]


def _tables(path: Path, tables: Iterator[Any]) -> Iterator[Row]:
    number = 0
    for table in tables:
        try:
            rows = _python_rows(table)
        except (UnicodeDecodeError, OverflowError) as error:
            raise ValueError(f"{path}: rows {number + 1} to {number + len(table)}: {error}") from None
        for values in rows:
            number += 1
            yield Row(number, f"{path}: row {number}", values)


def _python_rows(table: Any) -> list[dict[str, Any]]:
    """A table's rows. Numbers of 16 and 32 bits as they are written, not as the nearest of 64 bits."""
    rows: list[dict[str, Any]] = table.to_pylist()
    for field in table.schema:
        if str(field.type) in ("float", "halffloat"):
            narrow = np.float32 if str(field.type) == "float" else np.float16
            for row in rows:
                if row[field.name] is not None:
                    row[field.name] = float(str(narrow(row[field.name])))
    return rows


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise _missing(path) from None
    try:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(_TABLE_ROWS)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system, not of the format
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: no parquet file, or a damaged one ({reason[:300]})") from None


def _parquet_files(folder: Path, split: str | None) -> Iterator[Any]:
    files: dict[str, list[Path]] = {}
    for file in sorted([*folder.glob("*.parquet"), *folder.glob("data/*.parquet")]):
        files.setdefault(_PART.sub("", file.stem), []).append(file)
    if not files:
        raise ValueError(f"{folder}: no data set: no parquet files, and not from save_to_disk; {_KINDS}")
    for file in files[_split(folder, files, split)]:
        yield from _parquet(file)


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _saved(folder: Path, split: str | None) -> Iterator[Any]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise _missing(folder) from None
    try:
        found = datasets.load_from_disk(str(folder))
    except (ValueError, TypeError, KeyError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{folder}: a damaged data set ({reason[:300]})") from None
    if isinstance(found, dict):
        found = found[_split(folder, found, split)]
    elif split is not None:
        raise ValueError(f"{folder} has no splits; leave split out")
    yield from found.with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _split(folder: Path, found: Collection[str], split: str | None) -> str:
    """The split that is asked for, or the only one."""
    if split is None and len(found) == 1:
        return next(iter(found))
    if split is None or split not in found:
        wanted = "which split?" if split is None else f"no split {split!r};"
        raise ValueError(f"{folder}: {wanted} there are {', '.join(sorted(found))}; set split")
    return split


def _missing(path: Path) -> ValueError:
    return ValueError(f"{path} needs the package datasets; install megatron-hacpo[data]")

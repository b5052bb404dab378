"""Rows out of files: JSON lines, JSON, parquet, and folders as Hugging Face's datasets library has them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_LINE = 16 * 2**20
"""Bytes of a line. What is longer is no row, but a file that has lost its line ends."""

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

    path: a JSON array of objects (`.json`), JSON lines (whatever else the file is called), `.parquet`, or a
    folder: what `Dataset.save_to_disk` wrote, or data files as they come from a hub. split: of a folder's;
    may be left out where there is only one.
    Raises ValueError for a file that is not what its name says, for a folder without such a split, and for a
    package that is not installed; OSError for what cannot be read.
    """
    path = Path(path)
    if path.is_dir():
        return _tables(path, _folder_tables(path, split))
    if split is not None and path.is_file():
        raise ValueError(f"{path} is a file and has no split {split!r}; leave split out")
    if path.suffix == ".parquet":
        return _tables(path, _parquet_tables(path))
    if path.suffix == ".json" and _first_character(path) == b"[":
        return _array(path)
    return _lines(path)


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
        for values in table.to_pylist():
            number += 1
            yield Row(number, f"{path}: row {number}", values)


def _parquet_tables(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise _missing(path) from None
    try:
        yield from pyarrow.parquet.ParquetFile(path).iter_batches(_TABLE_ROWS)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({' '.join(str(error).split())})") from None


def _folder_tables(path: Path, split: str | None) -> Iterator[Any]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise _missing(path) from None
    saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
    try:
        # Streaming: nothing is copied into a cache.
        found = (
            datasets.load_from_disk(str(path)) if saved else datasets.load_dataset(str(path), streaming=True)
        )
        chosen = _chosen(path, found, split) if isinstance(found, dict) else found
        yield from chosen.with_format("arrow").iter(batch_size=_TABLE_ROWS)
    except _NoSplit:
        raise
    except (ValueError, TypeError, OSError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path}: no data set, or a file in it is damaged ({reason[:300]})") from None
    if split is not None and not isinstance(found, dict):
        raise ValueError(f"{path} has no splits; leave split out")


class _NoSplit(ValueError):  # noqa: N818 - reads as what happened
    """A folder has several splits, and not the one that was asked for."""


def _chosen(path: Path, found: Any, split: str | None) -> Any:
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        wanted = "which split?" if split is None else f"no split {split!r};"
        raise _NoSplit(f"{path}: {wanted} there are {', '.join(sorted(map(str, found)))}; set split")
    return found[split]


def _missing(path: Path) -> ValueError:
    return ValueError(f"{path} needs the package datasets; install megatron-hacpo[data]")

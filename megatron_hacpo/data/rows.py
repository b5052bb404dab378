"""Rows out of files: JSON lines, JSON, parquet, and folders as Hugging Face's datasets library has them."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LONGEST_LINE = 16 * 2**20
"""Bytes of a line. What is longer is no row, but a file that has lost its line ends."""

_BETWEEN = re.compile(r"[\s,]*")
"""What may stand between the elements of an array."""

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
    position, line, number = text.index("[") + 1, 1, 0
    counted = 0
    while True:
        start = position + len(_BETWEEN.match(text, position).group())  # type: ignore[union-attr]
        line += text.count("\n", counted, start)
        counted = start
        if text[start : start + 1] == "]":
            return
        number += 1
        place = f"{path}:{line}"
        try:
            value, position = decoder.raw_decode(text, start)
        except json.JSONDecodeError as error:
            line += text.count("\n", start, error.pos)
            raise ValueError(f"{path}:{line}: {error.msg} at column {error.colno}") from None
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{place}: {error}") from None
        try:
            yield Row(number, place, _object(value))
        except ValueError as error:
            yield Row(number, place, None, str(error))


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
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(f"{path}: no data set ({' '.join(str(error).split())})") from None
    if isinstance(found, dict):
        if split is None and len(found) == 1:
            split = next(iter(found))
        if split not in found:
            wanted = "which split?" if split is None else f"no split {split!r};"
            raise ValueError(f"{path}: {wanted} there are {', '.join(sorted(map(str, found)))}; set split")
        found = found[split]
    elif split is not None:
        raise ValueError(f"{path} has no splits; leave split out")
    yield from found.with_format("arrow").iter(batch_size=_TABLE_ROWS)


def _missing(path: Path) -> ValueError:
    return ValueError(f"{path} needs the package datasets; install megatron-hacpo[data]")

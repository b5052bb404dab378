"""The files that an agent leaves in its folder of the run, one JSON object a line."""

import json
import math
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from megatron_hacpo.config.schema import HELD_OUT

METRICS = "metrics.jsonl"
"""One row a step."""
EVALUATION = "eval.jsonl"
"""One row an evaluation: `step` (0 before training), and the metrics of docs/evaluation.md."""
SAMPLES = "samples.jsonl"
"""Some responses of each step."""


_HEADLINE = re.compile(rf"{'|'.join(HELD_OUT)}|[^/]+/avg@\d+")


def headlines(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The accuracies among the metrics of evaluations: of held-out prompts, and one for each benchmark."""
    return list(dict.fromkeys(key for row in rows for key in row if _HEADLINE.fullmatch(key)))


def plain(value: Any) -> Any:
    """`value` as JSON has it: numbers out of numpy and torch scalars, null for NaN and infinities."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_row(file: TextIO, row: Mapping[str, Any]) -> None:
    """Append one line and hand it to the operating system, so that a later death loses nothing."""
    file.write(json.dumps(plain(row), ensure_ascii=False, allow_nan=False) + "\n")
    file.flush()


def keep_until(folder: Path, step: int) -> None:
    """Cut an agent's files after `step`: rows and single problems of later steps, and with step 0 all, as
    evaluations of step 0 are made again; a last line without its end too."""
    for name in (METRICS, EVALUATION, SAMPLES):
        path = folder / name
        if not path.is_file():
            continue
        with path.open("rb+") as file:
            kept = 0
            for line in file:
                if not line.endswith(b"\n") or step == 0 or _row(line, path)["step"] > step:
                    break
                kept += len(line)
            file.truncate(kept)
    for problems in folder.glob("eval/step_*"):
        if step == 0 or int(problems.name.removeprefix("step_")) > step:
            shutil.rmtree(problems)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows; none if there is no such file."""
    return list(Tail(path).new_rows())


def _row(line: bytes, path: Path) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}: {line[:60]!r} is not a row ({error}); remove the line") from None
    if not isinstance(row, dict) or "step" not in row:
        raise ValueError(f"{path}: {line[:60]!r} is not a row with a step; remove the line")
    return row


class Tail:
    """Follows a growing file of rows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """The rows completed since the last call; a line without its newline waits."""
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield _row(line, self._path)

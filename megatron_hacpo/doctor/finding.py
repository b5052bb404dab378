"""What the doctor says: one line each, `ok`, `warning` or `error`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Level = Literal["ok", "warning", "error"]
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "error": "bold red"}
_WIDTH = max(map(len, _STYLES))


@dataclass(frozen=True)
class Finding:
    """subject: what was looked at, as short as `torch` or `agents.A.model`. text: what is the case; of a
    warning or an error the value and, after a semicolon, the fix."""

    level: Level
    subject: str
    text: str

    def __str__(self) -> str:
        return f"{self.level:{_WIDTH}} {self.subject}: {self.text}"


def show(findings: Sequence[Finding], console: Console) -> None:
    """Print them: one line each where nobody looks, else with the text wrapped beside its level."""
    if not console.is_terminal:
        for finding in findings:
            console.print(Text(str(finding)), soft_wrap=True)
        return
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(min_width=_WIDTH)
    table.add_column()
    for finding in findings:
        text = Text.assemble((finding.subject, "bold"), f": {finding.text}")
        table.add_row(Text(finding.level, _STYLES[finding.level]), text)
    console.print(table)


def has_error(findings: Iterable[Finding]) -> bool:
    """Whether a run would fail."""
    return any(finding.level == "error" for finding in findings)

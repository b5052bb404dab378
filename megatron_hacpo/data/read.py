"""Prompts out of rows, by the names that a file gives its columns."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron_hacpo.data.prompts import PLACEHOLDER, Columns, Prompt
from megatron_hacpo.data.rows import Row, read_rows

ROLES = ("system", "developer", "user", "assistant", "tool")

BadRows = Literal["refuse", "skip"]


USUAL = Columns()


@dataclass(frozen=True)
class PromptFile:
    """What a file or folder holds. skipped: one line for each row that is none."""

    prompts: list[Prompt]
    skipped: list[str] = field(default_factory=list)


def read_prompts(
    path: str | Path,
    columns: Columns = USUAL,
    *,
    split: str | None = None,
    bad_rows: BadRows = "refuse",
) -> PromptFile:
    """The prompts of `rows.read_rows` in their order; a row without an id is named FILE:NUMBER.

    A number as answer becomes its shortest decimal text (write "72.50" as a string to keep the zero).
    Raises ValueError, naming file and line or row, for a file without prompts, and for a bad row unless they
    are to be skipped: malformed JSON, bytes that are not UTF-8, a line of 16 MiB, a missing, null or wrongly
    typed value, an image, text that UTF-8 cannot hold, an id that occurs twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    skipped: list[str] = []
    place_of: dict[str, str] = {}
    for row in read_rows(path, split):
        try:
            prompt = _prompt(row, f"{path.name}:{row.number}", columns)
            if prompt.id in place_of:
                raise ValueError(f"id {prompt.id!r} is already that of {place_of[prompt.id]}")
        except ValueError as error:
            if bad_rows == "refuse":
                raise ValueError(f"{row.place}: {error}") from error
            skipped.append(f"{row.place}: {error}")
            continue
        place_of[prompt.id] = row.place
        prompts.append(prompt)
    if not prompts:
        bad = f" ({len(skipped)} bad rows, the first: {skipped[0]})" if skipped else ""
        raise ValueError(f"{path}: holds no prompts{bad}")
    return PromptFile(prompts, skipped)


def write_jsonl(prompts: Iterable[Prompt], path: str | Path) -> None:
    """Writes prompts so that `read_prompts` gives equal ones back."""
    with Path(path).open("w", encoding="utf-8") as file:
        for prompt in prompts:
            first = prompt.messages[0]
            plain = len(prompt.messages) == 1 and first["role"] == "user" and len(first) == 2
            row = {
                "id": prompt.id,
                "prompt": first["content"] if plain else list(prompt.messages),
                "answer": prompt.answer,
                "group": prompt.group,
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _prompt(row: Row, default_id: str, columns: Columns) -> Prompt:
    if row.values is None:
        raise ValueError(row.problem)
    messages = _messages(_required(row.values, columns.prompt), columns.prompt)
    answer = _required(row.values, columns.answer)
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{columns.answer!r} must be text or a number, not {type(answer).__name__}")
    if isinstance(answer, float) and not math.isfinite(answer):
        raise ValueError(f"{columns.answer!r} is {answer}")
    own_id, group = _value(row.values, columns.id), _value(row.values, columns.group)
    prompt = Prompt(
        id=default_id if own_id is None else str(own_id),
        messages=_dressed(messages, columns),
        answer=_text(answer),
        group="" if group is None else str(group),
    )
    for name, text in (("id", prompt.id), ("group", prompt.group)):
        if not text.isprintable():
            raise ValueError(f"the {name} {text!r} has characters that cannot be shown")
    for text in (prompt.id, prompt.answer, prompt.group, *(m["content"] for m in prompt.messages)):
        text.encode("utf-8")  # a lone surrogate such as "\ud800" would fail in the middle of the run
    return prompt


def _text(answer: str | int | float) -> str:
    """A number as its shortest decimal text: a table may have 72 as 72.0."""
    if isinstance(answer, float) and answer.is_integer() and abs(answer) < 2**53:
        answer = int(answer)
    return str(answer)


def _value(values: dict[str, Any], key: str) -> Any:
    """A row's value by name; None where it has none."""
    if key in values:
        return values[key]
    first, dot, rest = key.partition(".")
    inner = values.get(first) if dot else None
    return _value(inner, rest) if isinstance(inner, dict) else None


def _required(values: dict[str, Any], key: str) -> Any:
    value = _value(values, key)
    if value is None:
        raise ValueError(f"{key!r} is {'null' if key in values else 'missing'}; the row has {sorted(values)}")
    return value


def _messages(value: Any, key: str) -> tuple[dict[str, str], ...]:
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    messages = [_message(message, key) for message in value] if isinstance(value, list) else []
    if not messages or None in messages:
        raise ValueError(
            f"{key!r} must be a non-empty string or a list of messages of text, which have the keys role and "
            "content and no other"
        )
    known = tuple(message for message in messages if message is not None)
    for message in known:
        if message["role"] not in ROLES:
            raise ValueError(f"{key!r} has the role {message['role']!r}; the roles are {', '.join(ROLES)}")
    if known[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"{key!r} ends with a message of the {known[-1]['role']}; nothing is asked")
    return known


def _message(message: Any, key: str) -> dict[str, str] | None:
    """Without what is null, which tables have where other rows have something; None for no message."""
    if not isinstance(message, dict):
        return None
    message = {name: value for name, value in message.items() if value is not None}
    content = message.get("content")
    if isinstance(content, list):
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
        if kinds - {"text"}:
            other = ", ".join(sorted(str(kind) for kind in kinds - {"text"}))
            raise ValueError(f"{key!r} has {other} in a message; only text can be trained on")
        parts = [part.get("text") for part in content]
        if not all(isinstance(part, str) for part in parts):
            return None
        message["content"] = "".join(parts)
    good = message.keys() == {"role", "content"} and all(isinstance(v, str) for v in message.values())
    return message if good else None


def _dressed(messages: tuple[dict[str, str], ...], columns: Columns) -> tuple[dict[str, str], ...]:
    """The messages in the columns' template and behind its system message."""
    if columns.template is None and columns.system is None:
        return messages
    if len(messages) > 1 or messages[0]["role"] != "user":
        raise ValueError("template and system are for single user messages; this row has a dialogue")
    content = messages[0]["content"]
    if columns.template is not None:
        content = columns.template.replace(PLACEHOLDER, content)
    system = [] if columns.system is None else [{"role": "system", "content": columns.system}]
    return (*system, {"role": "user", "content": content})

"""Prompts as JSON lines.

A row holds the prompt (a string, which becomes one user message, or a list of {"role", "content"} messages),
its answer (a string or a number), and optionally "id" and "group".
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_hacpo.data.prompts import Prompt


def read_jsonl(path: str | Path, *, prompt_key: str = "prompt", answer_key: str = "answer") -> list[Prompt]:
    """The file's prompts in file order; blank lines are skipped, a row without "id" is named FILE:LINE.

    A number as answer becomes its shortest decimal text (write "72.50" as a string to keep the zero).
    Raises ValueError, naming file and line, for an empty file, bytes that are not UTF-8, malformed JSON, a
    missing, null or wrongly typed value, text that UTF-8 cannot hold, and an id that occurs twice.
    """
    path = Path(path)
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                prompt = _parse(line, f"{path.name}:{number}", prompt_key, answer_key)
                if prompt.id in line_of:
                    raise ValueError(f"id {prompt.id!r} is already used in line {line_of[prompt.id]}")
            except ValueError as error:  # also JSONDecodeError and UnicodeError
                raise ValueError(f"{path}:{number}: {error}") from error
            line_of[prompt.id] = number
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path}:1: the file has no prompts")
    return prompts


def write_jsonl(prompts: Iterable[Prompt], path: str | Path) -> None:
    """Writes prompts so that `read_jsonl` gives equal ones back."""
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


def _parse(line: bytes, default_id: str, prompt_key: str, answer_key: str) -> Prompt:
    row = json.loads(line.decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is expected, not {type(row).__name__}")
    for key in (prompt_key, answer_key):
        if row.get(key) is None:
            raise ValueError(f"{key!r} is {'null' if key in row else 'missing'}; the row has {sorted(row)}")
    answer = row[answer_key]
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise ValueError(f"{answer_key!r} must be a string or a number, not {type(answer).__name__}")
    prompt = Prompt(
        id=default_id if row.get("id") is None else str(row["id"]),
        messages=_messages(row[prompt_key], prompt_key),
        answer=str(answer),
        group=str(row.get("group") or ""),
    )
    for text in (prompt.id, prompt.answer, prompt.group, *(m["content"] for m in prompt.messages)):
        text.encode("utf-8")  # a lone surrogate such as "\ud800" would fail in the middle of the run
    return prompt


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _messages(value: Any, key: str) -> tuple[dict[str, str], ...]:
    if isinstance(value, str) and value:
        return ({"role": "user", "content": value},)
    messages = value if isinstance(value, list) else []
    good = all(
        isinstance(message, dict)
        and message.keys() == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    if not messages or not good:
        raise ValueError(
            f"{key!r} must be a non-empty string or a list of {{'role', 'content'}} messages of text"
        )
    return tuple(messages)

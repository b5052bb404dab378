"""Mistakes in one line each: `key: value: what is wrong; the fix`."""

import difflib
import json
from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megatron_hacpo.config.schema import INHERITED, RunConfig
from megatron_hacpo.config.section import Section

Keys = tuple[int | str, ...]
"""Keys from the top of the file, such as ("agents", "A", "model")."""


class ConfigError(ValueError):
    """Everything that is wrong with a configuration, one line each in `lines`."""

    def __init__(self, lines: Sequence[str]) -> None:
        assert lines
        super().__init__("\n".join(lines))
        self.lines = list(lines)


def line(key: Keys | str, value: object, wrong: str) -> str:
    """One mistake; `value` as the user would write it, shortened."""
    name = key if isinstance(key, str) else dotted(key)
    shown = json.dumps(value, ensure_ascii=False, default=str)
    return f"{name}: {shown if len(shown) <= 80 else shown[:77] + '...'}: {wrong}"


def dotted(path: Keys) -> str:
    """`agents.A.model`; a list's element as `betas[1]`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def unknown_key(path: Keys) -> str:
    """What to say about a key that no section has: the nearest one here, or the same one elsewhere."""
    key, here = str(path[-1]), known_keys(path[:-1])
    near = difflib.get_close_matches(key, here, n=1, cutoff=0.5)
    elsewhere = [f"{section}.{key}" for section in known_keys(()) if key in known_keys((section,))]
    if near or elsewhere:
        return (
            f"unknown key; did you mean {dotted((*path[:-1], near[0])) if near else ' or '.join(elsewhere)}?"
        )
    return f"unknown key; known here are {', '.join(here)}"


def known_keys(path: Keys) -> list[str]:
    """The keys that the section at `path` may hold; empty where the schema has no section."""
    kind = kind_at(path)
    return list(kind.model_fields) if isinstance(kind, type) and issubclass(kind, Section) else []


def kind_at(path: Keys) -> Any:
    """The schema's type at `path`; None where it has none. Any agent's name is a key of `agents`."""
    kind: Any = RunConfig
    for key in path:
        if isinstance(kind, type) and issubclass(kind, Section):
            field = kind.model_fields.get(str(key))
            kind = field.annotation if field else None
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return None
    return kind


def explain(error: ValidationError, raw: Any) -> list[str]:
    """pydantic's findings about the file `raw`, one line each, without echoes of one mistake."""
    return [_explain(found) for found in error.errors(include_url=False) if not _is_echo(found["loc"], raw)]


def _is_echo(path: Keys, raw: Any) -> bool:
    """True for an agent's inherited value: the mistake stands in the run's section and is told there."""
    if len(path) < 3 or path[0] != "agents" or path[2] not in INHERITED:
        return False
    value = raw
    for key in path[:4]:
        if not isinstance(value, dict) or key not in value:
            return True
        value = value[key]
    return False


def _explain(found: ErrorDetails) -> str:
    path, value, kind, context = found["loc"], found["input"], found["type"], found.get("ctx", {})
    if kind == "missing" and not isinstance(path[-1], int):
        return f"{dotted(path)}: missing; add it"
    if kind == "tuple_type":
        return line(path, value, "not a list; write [a, b]")
    if kind in ("missing", "too_long"):
        return line(
            path[:-1] if kind == "missing" else path, value, "not a list of two numbers; write [a, b]"
        )
    if kind == "too_short":
        return line(path, value, "empty; name at least one agent")
    if kind == "extra_forbidden":
        return line(path, value, unknown_key(path))
    if kind == "literal_error":
        return line(path, value, _not_one_of(value, get_args(_without_none(kind_at(path)))))
    if kind == "value_error":
        wrong = str(context["error"])
        return f"{dotted(path)}: {wrong}" if isinstance(value, dict) else line(path, value, wrong)
    if path[-1] == "[key]":
        path = path[:-1]
    if kind in _MESSAGES:
        return line(path, value, _MESSAGES[kind].format(**context))
    return line(path, value, found["msg"])


_MESSAGES = {
    "int_type": "not a whole number; write it plainly, such as 8",
    "float_type": "not a number; write it plainly, such as 1e-6",
    "finite_number": "not a finite number; write a finite one",
    "bool_type": "not a truth value; write true or false",
    "invalid_key": "the key is not text; put it in quotes",
    "string_type": "not text; put it in quotes",
    "model_type": "not a section; write its keys below it, indented",
    "dict_type": "not a section; write its keys below it, indented",
    "greater_than": "must be above {gt:g}; raise it",
    "greater_than_equal": "must be at least {ge:g}; raise it",
    "less_than": "must be below {lt:g}; lower it",
    "less_than_equal": "must be at most {le:g}; lower it",
    "string_pattern_mismatch": "not a safe folder name; use letters, digits, `_`, `-` and inner dots",
}


def _not_one_of(value: object, choices: Iterable[Any]) -> str:
    names = [str(choice) for choice in choices]
    near = difflib.get_close_matches(str(value).lower(), names, n=1, cutoff=0.6)
    listed = f"not one of {', '.join(names)}"
    return f"{listed}; did you mean {near[0]}?" if near else f"{listed}; choose one"


def _without_none(kind: Any) -> Any:
    """The literal in `Literal[...] | None`."""
    members = [member for member in get_args(kind) if member is not type(None)]
    return members[0] if members and type(None) in get_args(kind) else kind

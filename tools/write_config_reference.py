"""Write docs/configuration.md from the configuration models: `write_config_reference.py [--check]`."""

import json
import sys
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from megatron_hacpo.config import RunConfig
from megatron_hacpo.config.schema import AgentConfig, BenchmarkConfig
from megatron_hacpo.config.section import Section

TARGET = Path(__file__).parents[1] / "docs" / "configuration.md"
HEAD = """# Configuration

A run is one YAML file (read by YAML 1.2's rules: `1e-6` is a number, `on` is text). Any value can be set on
the command line: `--set algorithm.alpha=2 --set agents.A.parallel.tensor=2`; `--set 'agents.C={model: DIR}'`
adds an agent and `--set agents.B=null` takes one out. Defaults are the paper's where it states one. This page
is written by `tools/write_config_reference.py` from the models in `megatron_hacpo/config/`.
"""


def reference() -> str:
    """The page's text."""
    parts = [HEAD]
    for name, field in RunConfig.model_fields.items():
        if name == "agents":
            parts.append(_section("agents.NAME", AgentConfig))
        else:
            parts.append(_section(name, field.annotation))
        if name == "evaluation":
            parts.append(_section("evaluation.benchmarks.NAME", BenchmarkConfig))
    return "\n".join(parts)


def _section(prefix: str, model: Any) -> str:
    summary = " ".join((model.__doc__ or "").split("\n\n")[0].split())
    head = [
        f"## {prefix}",
        "",
        summary,
        "",
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *_rows("", model)]) + "\n"


def _rows(prefix: str, model: Any) -> list[str]:
    rows = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            if name in ("optimizer", "rollout"):
                text = f"as in `{name}`; a key that is set here wins for this agent"
                rows.append(f"| `{prefix}{name}` | section | inherited | {text} |")
            else:
                rows += _rows(f"{prefix}{name}.", field.annotation)
        else:
            meaning = " ".join((field.description or "").split()).replace("|", "\\|")
            rows.append(f"| `{prefix}{name}` | {_type(field)} | {_default(field)} | {meaning} |")
    return rows


def _type(field: FieldInfo) -> str:
    literals = [value for value in get_args(field.annotation) if isinstance(value, str)]
    if literals:
        return " or ".join(f"`{value}`" for value in literals)
    names = {"NoneType": "null", "tuple": "list", "str": "text", "int": "whole number", "float": "number"}
    kinds = [getattr(kind, "__name__", str(kind)) for kind in _alternatives(field.annotation)]
    return " or ".join(names.get(kind, kind) for kind in kinds)


def _alternatives(annotation: Any) -> list[Any]:
    """The plain types of an annotation, without constraints."""
    if hasattr(annotation, "__metadata__"):
        return _alternatives(get_args(annotation)[0])
    if type(annotation).__name__ in ("UnionType", "_UnionGenericAlias", "Union"):
        flat = []
        for part in get_args(annotation):
            literals = [value for value in get_args(part) if isinstance(value, str)]
            flat += [f"`{value}`" for value in literals] if literals else _alternatives(part)
        return flat
    return [getattr(annotation, "__origin__", annotation)]


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    return f"`{json.dumps(value)}`"


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        TARGET.write_text(reference(), encoding="utf-8")
    elif TARGET.read_text(encoding="utf-8") != reference():
        sys.exit(f"{TARGET} is out of date; run python tools/write_config_reference.py")

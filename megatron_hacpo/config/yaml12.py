"""YAML as people expect it: scalars by the YAML 1.2 core schema, and a key written twice is an error.

PyYAML reads YAML 1.1, where `1e-6` is text, `on` a boolean, `010` eight and `1:30` ninety.
"""

import re
from typing import Any

import yaml

_SCALARS: list[tuple[str, str, list[str | None]]] = [
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "tag:yaml.org,2002:float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:merge", r"<<", ["<"]),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[Any]] = {}  # noqa: RUF012 - PyYAML's own class attribute

    def construct_mapping(self, node: yaml.Node, deep: bool = False) -> dict[Any, Any]:
        if isinstance(node, yaml.MappingNode):
            _refuse_repeated_keys(node)
        return super().construct_mapping(node, deep)  # type: ignore[arg-type]

    def construct_number(self, node: yaml.ScalarNode) -> int:
        text = self.construct_scalar(node)
        return int(text, 0) if text.startswith(("0o", "0x")) else int(text)


class _Dumper(yaml.SafeDumper):
    """Quotes whatever either YAML version would read as something else than text."""


for _tag, _pattern, _first in _SCALARS:
    _compiled = re.compile(f"^(?:{_pattern})$")
    _Loader.add_implicit_resolver(_tag, _compiled, _first)
    _Dumper.add_implicit_resolver(_tag, _compiled, _first)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


def parse(text: str) -> Any:
    """The document in `text`; raises yaml.YAMLError, also for a key that a mapping holds twice."""
    return yaml.load(text, Loader=_Loader)


def write(value: Any) -> str:
    """`value`, plain dicts, lists and scalars, as block YAML that `parse` reads back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, allow_unicode=True)


def _refuse_repeated_keys(node: yaml.MappingNode) -> None:
    seen: set[str] = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.value in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key.value!r} stands here for the second time", key.start_mark
            )
        if isinstance(key, yaml.ScalarNode):
            seen.add(key.value)

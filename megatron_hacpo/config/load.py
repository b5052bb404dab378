"""From a YAML file and `--set` overrides to a `RunConfig`, and back to YAML."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_hacpo.config import yaml12
from megatron_hacpo.config.errors import ConfigError, dotted, explain, kind_at, known_keys, unknown_key
from megatron_hacpo.config.method import method_value
from megatron_hacpo.config.schema import INHERITED, RunConfig


def load(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that `path` describes, after `overrides` such as "algorithm.name=gspo".

    An override's value is YAML. `agents.C={model: ...}` adds an agent and `agents.B=null` takes one out.
    Raises ConfigError with a line for every mistake; models and data are looked at by `check`.
    """
    return resolve(_read(Path(path)), overrides)


def resolve(raw: Any, overrides: Sequence[str] = ()) -> RunConfig:
    """As `load`, from parsed YAML; `raw` is not changed."""
    if not isinstance(raw, dict):
        raise ConfigError(["config: holds no keys; write sections such as run, agents and data"])
    for override in overrides:
        raw = _override(raw, override)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(explain(error, raw)) from None


def dump(config: RunConfig) -> str:
    """The resolved configuration as YAML that `load` reads back.

    Agents' sections are cut to their overrides and `algorithm` to what its method does not imply, so that an
    override of a shared key or of the method's name still takes effect.
    """
    values = config.model_dump(mode="json")
    name = config.algorithm.name
    departures = {k: v for k, v in values["algorithm"].items() if v != method_value(name, k)}
    values["algorithm"] = {"name": name, **departures}
    for agent in values["agents"].values():
        for section in INHERITED:
            own = {key: value for key, value in agent[section].items() if value != values[section][key]}
            agent[section] = own
            if not own:
                del agent[section]
    return yaml12.write(values)


def _read(path: Path) -> Any:
    try:
        return yaml12.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"config: {path}: no such file; give the path of a YAML file"]) from None
    except IsADirectoryError:
        raise ConfigError([f"config: {path}: is a folder; give the YAML file in it"]) from None
    except OSError as error:
        raise ConfigError([f"config: {path}: cannot be read ({error.strerror}); check the file"]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            [f"config: {path}: not UTF-8 at byte {error.start}; save it as UTF-8 text"]
        ) from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
        raise ConfigError([f"config: {place}: {error.problem}; correct the YAML"]) from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise ConfigError([f"config: {path}: {problem}; correct the YAML"]) from None


def _override(raw: dict[str, Any], override: str) -> dict[str, Any]:
    """`raw` with one `a.b.c=value` put in."""
    name, equals, text = override.partition("=")
    keys = tuple(name.strip().split("."))
    if not equals or not all(keys):
        raise ConfigError(
            [f"--set: {override}: not of the form key.path=value; write e.g. optimizer.lr=1e-6"]
        )
    try:
        value = yaml12.parse(text)
    except yaml.YAMLError:
        raise ConfigError([f"--set {name}: {text}: not a YAML value; put it in quotes"]) from None
    _check_keys(keys)
    if keys[0] == "agents" and len(keys) > 1:
        _check_agent(keys, value, raw.get("agents"))
    if keys[0] == "agents" and len(keys) == 2 and value is None:
        return {**raw, "agents": {agent: v for agent, v in raw["agents"].items() if agent != keys[1]}}
    return _with_value(raw, keys, value)


def _check_keys(keys: tuple[str, ...]) -> None:
    """ConfigError if the schema has no such key."""
    for depth in range(1, len(keys) + 1):
        path = keys[:depth]
        if kind_at(path) is None:
            known = known_keys(path[:-1])
            wrong = unknown_key(path) if known else f"{dotted(path[:-1])} holds no keys; cut the path there"
            raise ConfigError([f"--set {dotted(keys)}: {wrong}"])


def _check_agent(keys: tuple[str, ...], value: Any, agents: Any) -> None:
    """ConfigError if the override changes or takes out an agent that does not exist."""
    names = [str(name) for name in agents] if isinstance(agents, dict) else []
    if keys[1] in names or (len(keys) == 2 and value is not None):
        return
    near = difflib.get_close_matches(keys[1], names, n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else f"the agents are {', '.join(names) or 'none'}"
    raise ConfigError([f"--set {dotted(keys)}: no agent {keys[1]}; {hint}"])


def _with_value(section: Any, keys: tuple[str, ...], value: Any) -> dict[str, Any]:
    if not isinstance(section, dict):
        section = {}
    inner = value if len(keys) == 1 else _with_value(section.get(keys[0]), keys[1:], value)
    return {**section, keys[0]: inner}

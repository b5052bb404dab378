"""Which run a checkpoint belongs to, and in what another configuration differs from it."""

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from megatron_hacpo.config import RunConfig

PACKAGES = ("megatron-hacpo", "megatron-core", "torch", "transformers")

_SAMPLES, _SAMPLE_BYTES = 64, 2**16
"""Of a weight file, spread evenly: a model of hundreds of gigabytes is recognised in a second."""

_ANYTHING = r"(?:agents\.[^.]+\.)?"
_FREE = re.compile(
    r"run\.(?:name|dir)|data\.path"  # the data are compared themselves
    r"|agents\.[^.]+\.(?:model|recompute|parallel\..*|placement\..*)"  # as the models are
    rf"|{_ANYTHING}rollout\.(?:engine|max_logprob_gap|sglang\..*)"
    rf"|{_ANYTHING}optimizer\.(?:distributed|cpu_offload)"
    r"|reward\.(?:workers|deadline_seconds|memory_mb)"
    r"|batch\.microbatch_tokens|exchange\.(?:keep_steps|timeout_minutes)"
    r"|(?:evaluation|checks|report|checkpoint)\..*"
)
"""What a resumed run may have otherwise: where it computes, what it measures, how it is watched."""


class AgentIdentity(msgspec.Struct, frozen=True):
    """model: of the folder that training started from, which is also the KL's reference. tokenizer: with its
    templates and stop tokens, as `AgentTokenizer.identity`."""

    model: str
    tokenizer: str


class Identity(msgspec.Struct, frozen=True):
    """config: the resolved configuration, as JSON has it. data: hash of the training prompts in their order.
    versions: of `PACKAGES`."""

    config: dict[str, Any]
    data: str
    agents: dict[str, AgentIdentity]
    versions: dict[str, str]

    def of(self, names: Sequence[str]) -> "Identity":
        """Of the run as it goes on with these agents alone."""
        return msgspec.structs.replace(
            self,
            config={**self.config, "agents": {name: self.config["agents"][name] for name in names}},
            agents={name: self.agents[name] for name in names},
        )


@dataclass(frozen=True)
class Difference:
    """key: dotted, as in the configuration. text: what it was and what it is now."""

    key: str
    text: str


def identify(config: RunConfig, tokenizers: Mapping[str, str], data: str) -> Identity:
    """tokenizers: identities by agent. Reads a part of every model's weights."""
    return Identity(
        config=config.model_dump(mode="json"),
        data=data,
        agents={
            name: AgentIdentity(hash_model(Path(agent.model)), tokenizers[name])
            for name, agent in config.agents.items()
        },
        versions={package: version(package) for package in PACKAGES},
    )


def hash_model(folder: Path) -> str:
    """Of a model's configuration in full, and of its weight files by name, size and samples."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".safetensors", ".bin", ".distcp"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for number in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * number // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def differences(saved: Identity, now: Identity) -> Iterator[Difference]:
    """In what a run would go on otherwise than it was, but for what may be otherwise."""
    before, after = saved.config["agents"], now.config["agents"]
    for name in (*before, *(name for name in after if name not in before)):
        if name not in after:
            yield Difference(f"agents.{name}", "is in the checkpoint and not in the configuration")
        elif name not in before:
            yield Difference(f"agents.{name}", "is in the configuration and not in the checkpoint")
        else:
            was, is_ = saved.agents[name], now.agents[name]
            if was.model != is_.model:
                yield Difference(f"agents.{name}.model", "has other weights than the run started from")
            if was.tokenizer != is_.tokenizer:
                yield Difference(f"agents.{name}.tokenizer", "has another vocabulary, template or stop token")
    if saved.data != now.data:
        yield Difference("data.path", "has other prompts than the run had")
    fixed = _fixed_rates(saved.config) and _fixed_rates(now.config)
    old, new = (dict(_flat(_comparable(identity.config))) for identity in (saved, now))
    common = [name for name in before if name in after]
    for key in dict.fromkeys((*old, *new)):
        parts = key.split(".")
        if parts[0] == "agents" and parts[1] not in common:
            continue
        free = _FREE.fullmatch(key) or (fixed and key == "run.steps")
        if old.get(key) != new.get(key) and not free:
            yield Difference(key, f"was {_short(old.get(key))} and is {_short(new.get(key))}")


def version_changes(saved: Identity, now: Identity) -> list[str]:
    """For people: packages of other versions, with which a run goes on but perhaps not to the bit."""
    return [
        f"{name} was {saved.versions.get(name)} and is {now.versions[name]}"
        for name in now.versions
        if saved.versions.get(name) != now.versions[name]
    ]


def not_allowed(found: Sequence[Difference], allow: Sequence[str]) -> list[Difference]:
    """The differences that no key of `allow` names, itself or its section."""
    return [d for d in found if not any(d.key == key or d.key.startswith(f"{key}.") for key in allow)]


def _fixed_rates(config: Mapping[str, Any]) -> bool:
    """Whether no learning rate depends on the number of steps."""
    return all(agent["optimizer"]["schedule"] == "constant" for agent in config["agents"].values())


def _comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """Without the run's own optimizer and rollout sections, which only tell what the agents' are."""
    return {key: value for key, value in config.items() if key not in ("optimizer", "rollout")}


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _short(value: Any) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else f"{text[:57]}..."

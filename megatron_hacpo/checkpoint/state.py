"""What a checkpoint holds beside tensors: an agent's counters, the manifest of its files, and the marker."""

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from megatron_hacpo.checkpoint.files import FileEntry
from megatron_hacpo.checkpoint.identity import Identity

SCHEMA = 1
"""Of all of them; a later one may be read by no earlier version."""

STATE, MANIFEST, RANDOM = "training/state.json", "training/manifest.json", "training/random"
"""In an agent's folder, apart from what makes it a model's."""


class AgentState(msgspec.Struct, frozen=True, kw_only=True):
    """An agent after `step`, without its tensors.

    updates: optimizer steps made. capability: `CapabilityTracker.state_dict`. warned: sources that the window
    was told too narrow for. nonfinite_updates, wide_gap_steps: in a row, up to now. layout: the agent's
    `parallel` section, with which random states have a rank.
    """

    schema: int = SCHEMA
    agent: str
    step: int
    updates: int
    capability: dict[str, Any]
    warned: list[str]
    nonfinite_updates: int
    wide_gap_steps: int
    layout: dict[str, Any]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """files: relative to the agent's folder; all but the manifest."""

    schema: int = SCHEMA
    agent: str
    step: int
    files: dict[str, FileEntry]


class Marker(msgspec.Struct, frozen=True, kw_only=True):
    """That all agents have finished. manifests: SHA-256 of each agent's."""

    schema: int = SCHEMA
    step: int
    manifests: dict[str, FileEntry]
    identity: Identity


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """identity: of whoever sampled the responses that are in the run's folder."""

    schema: int = SCHEMA
    identity: Identity


class _Header(msgspec.Struct):
    schema: int


T = TypeVar("T", AgentState, Manifest, Marker, Attempt)


def encode(value: AgentState | Manifest | Marker | Attempt) -> bytes:
    """As JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def read(path: Path, kind: type[T]) -> T:
    """Raises ValueError, naming the file, if it is not there, damaged, or of a newer version."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
        if schema > SCHEMA:
            raise ValueError(
                f"{path} was written by a newer version (schema {schema}, here {SCHEMA}); install that one"
            )
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(f"{path} is damaged: {error}") from None

"""What agents tell each other: schema'd bytes, no tokenizer needed to read them."""

import hashlib
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np

SCHEMA = 2


class Trajectory(msgspec.Struct, frozen=True, kw_only=True):
    """One scored response of one agent.

    prompt: index in the step's prompt batch.
    text: the response after the prompt, special tokens as text, without its stop token.
    valid_text: False if `text` is not what was sampled (bytes cut inside a character).
    reward: the verifier's score, None if there is no valid one.
    finish_reason: "stop" exactly if the last sampled id is a stop token. Every other end, a stop string
        included, is "length".
    token_count: number of sampled tokens in the source's own tokens, a stop token included.
    mean_log_prob: mean old log-prob, unrounded, of the tokens that the source trains on: all of them, or
        (with `exchange.keep_stop: false`) all but the stop token; 0.0 where that leaves none.
    token_ids: int32 little-endian bytes of the sampled ids, None when ids do not travel.
    """

    prompt: int
    text: str
    valid_text: bool
    reward: float | None
    finish_reason: Literal["stop", "length"]
    token_count: int
    mean_log_prob: float
    token_ids: bytes | None = None

    def __post_init__(self) -> None:
        if self.prompt < 0:
            raise ValueError(f"prompt {self.prompt} is negative")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward {self.reward} is not finite: send None")
        if not math.isfinite(self.mean_log_prob):
            raise ValueError(f"mean_log_prob {self.mean_log_prob} is not finite")
        if self.token_count < 0:
            raise ValueError(f"token_count {self.token_count} is negative")
        if self.token_count == 0 and self.finish_reason == "stop":
            raise ValueError("token_count 0 with finish_reason 'stop': a stop token counts")
        if self.token_ids is not None and len(self.token_ids) != 4 * self.token_count:
            raise ValueError(f"token_ids has {len(self.token_ids)} bytes for token_count {self.token_count}")


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """All of one agent's responses in one step.

    generation: counts the memberships of the run. tokenizer: the agent's `AgentTokenizer.fingerprint`.
    prompts: `hash_prompts` of the step's batch. stop: its agent was asked to end the run after this step.
    """

    schema: int = SCHEMA
    generation: int
    step: int
    agent: str
    tokenizer: str
    prompts: str
    trajectories: list[Trajectory]
    stop: bool = False


class _Header(msgspec.Struct):
    schema: int


def pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids [L] as they travel: int32, little-endian."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """int32 ids [L] of `pack_ids`."""
    return np.frombuffer(data, dtype="<i4").astype(np.int32)


def hash_prompts(prompt_ids: Sequence[str]) -> str:
    """Hash of the ids of a step's prompts, in batch order."""
    return hashlib.sha256(msgspec.json.encode(list(prompt_ids))).hexdigest()


def encode(contribution: Contribution) -> bytes:
    """A contribution as msgpack."""
    return msgspec.msgpack.encode(contribution)


def decode(data: bytes | bytearray) -> Contribution:
    """The contribution in msgpack bytes. Raises ValueError, naming what is wrong with them."""
    try:
        schema = msgspec.msgpack.decode(data, type=_Header).schema
        if schema != SCHEMA:
            raise ValueError(
                f"contribution has schema {schema}, not {SCHEMA}: run one version of this package"
            )
        return msgspec.msgpack.decode(data, type=Contribution)
    except msgspec.MsgspecError as error:
        raise ValueError(f"contribution of {len(data)} bytes cannot be read: {error}") from error


def save_atomically(path: Path, data: bytes) -> None:
    """Write a file that is either complete or absent, also after a crash; makes its folder."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with _open_in_new_folder(beside) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _open_in_new_folder(path: Path) -> BinaryIO:
    """Open for writing, making the folder. Agents that share nothing do not wait for each other, so another
    one may remove the folder while it is still empty.
    """
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            return path.open("wb")


def load(path: Path) -> Contribution:
    """The contribution in a file. Raises ValueError, naming the file and what is wrong with it."""
    try:
        return decode(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error

"""A worker process: one response after the other through the verifier, until nobody asks any more."""

import json
import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from megatron_hacpo.reward.base import Outcome, Verifier, check_one

_HARD_FACTOR = 2
"""The kernel refuses memory from this many times the cap on, so no request outruns those who watch."""


def encode_job(text: str, answer: object) -> bytes:
    """A response and its ground truth for `serve`. JSON in ASCII: any text passes, lone surrogates too."""
    return json.dumps([text, answer]).encode()


def serve(
    connection: Connection, verifier: Verifier, reward_range: tuple[float, float], memory: int, used: int
) -> None:
    """Answer jobs until the other side closes the connection, or until this process has grown too much.

    A reply is a byte, 1 if this worker ends with it, and the outcome as JSON. memory: bytes of resident
    memory that no response may pass; one that did so has failed, whatever the verifier made of it (sympy
    turns a MemoryError into "not equal"). used: bytes that were resident before the first response; a worker
    that has come half-way from there to `memory` ends, so that no response pays for those before it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_DATA, (_private_bytes() + _HARD_FACTOR * memory,) * 2)
    retire_at = (used + memory) // 2
    ends = False
    while not ends:
        try:
            text, answer = json.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            outcome = check_one(verifier, text, answer, reward_range)
        except MemoryError:
            outcome = Outcome(None, "memory", "no more memory")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if peak > memory:
            outcome = Outcome(None, "memory", f"took {peak >> 20} MiB")
        ends = outcome.failure == "memory" or peak > retire_at
        connection.send_bytes(bytes([ends]) + msgspec.json.encode(outcome))


def _private_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory, touched or not."""
    return int(Path("/proc/self/statm").read_bytes().split()[5]) * os.sysconf("SC_PAGE_SIZE")

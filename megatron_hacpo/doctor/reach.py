"""Whether the nodes of a job reach each other: each one listens, and each one calls all others."""

import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from megatron_hacpo.process.network import joined, separated

if TYPE_CHECKING:
    from torch.distributed import Store

_KEY = "doctor/reach"
_POLL_SECONDS = 0.05
_CALLS = 32
"""At the same time."""


def meet(store: "Store", node: str, nodes: Sequence[str], address: str, seconds: float) -> dict[str, str]:
    """By name of every other node: "" where this one reaches it, else why not. All nodes call it together,
    once per store.

    store: the launcher's. node: this one's name, of `nodes`. address: on which this node listens and the
    others call it, a host name or an IPv4 or IPv6 address. seconds: how long to wait for the others to
    listen, for each call, and for the others to be done with theirs.
    """
    others = [name for name in nodes if name != node]
    server: _Server | None = None
    try:
        server = _listen(node, address)
        said = server.place
    except OSError as error:
        said = f"cannot listen on {address} ({error.strerror or error})"
    _say(store, node, "listens", said)
    try:
        heard = _hear(store, others, "listens", seconds)
        with ThreadPoolExecutor(_CALLS) as pool:
            results = list(pool.map(partial(_call, node=node, seconds=seconds), others, heard))
        _say(store, node, "done", "")
        # The others may be calling this one still.
        _hear(store, [o for o, place in zip(others, heard, strict=True) if place], "done", seconds)
    finally:
        if server is not None:
            server.shutdown()
            server.server_close()
    return dict(zip(others, results, strict=True))


class _Server(socketserver.ThreadingTCPServer):
    """Answers every call with this node's name."""

    daemon_threads = True

    def __init__(self, node: str, family: int, place: tuple[str, int]) -> None:
        self.node = node
        self.address_family = family
        super().__init__(place, _Answer)

    @property
    def place(self) -> str:
        """HOST:PORT, an IPv6 address in brackets."""
        host, port = self.socket.getsockname()[:2]
        return joined(host, port)


class _Answer(socketserver.StreamRequestHandler):
    timeout = 10.0

    def handle(self) -> None:
        self.rfile.readline(1000)
        assert isinstance(self.server, _Server)
        self.wfile.write(f"{self.server.node}\n".encode())


def _listen(node: str, address: str) -> _Server:
    """On a free port. Raises OSError for an address that is not this node's."""
    family, _, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    server = _Server(node, family, (str(place[0]), 0))
    threading.Thread(target=server.serve_forever, args=(_POLL_SECONDS,), daemon=True).start()
    return server


def _call(other: str, place: str | None, *, node: str, seconds: float) -> str:
    """ "" if the node `other` answers at `place`, which is what it said of itself; None: nothing yet."""
    if place is None:
        return f"does not say within {seconds:g} s where it listens"
    address = separated(place)
    if address is None:
        return place
    try:
        with socket.create_connection(address, timeout=seconds) as connection:
            connection.sendall(f"{node}\n".encode())
            answer = connection.makefile(encoding="utf-8").readline().strip()
    except OSError as error:
        return f"{place} cannot be reached ({error.strerror or error})"
    return "" if answer == other else f"{place} is answered by {answer or 'nobody'}"


def _say(store: "Store", node: str, what: str, text: str) -> None:
    store.set(f"{_KEY}/{what}/{node}", text)


def _hear(store: "Store", others: Iterable[str], what: str, seconds: float) -> list[str | None]:
    """What each of the others says; None of those that say nothing in time."""
    deadline = time.monotonic() + seconds
    heard: list[str | None] = []
    for name in others:
        key = f"{_KEY}/{what}/{name}"
        while not (known := store.check([key])) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        heard.append(store.get(key).decode() if known else None)
    return heard

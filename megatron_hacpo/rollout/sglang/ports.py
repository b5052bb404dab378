"""Ports of this machine that no other run takes at the same time."""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TextIO

FIRST, LAST = 20_000, 32_000
"""Below the ports that Linux gives to outgoing connections, which could take one away unasked."""


class Ports:
    """`count` neighbouring ports from `first` on, free when they were reserved.

    The reservation is a lock that ends with this process or `release`; every user of this class heeds it,
    so servers of several agents and runs cannot meet. Another program still can, between the look and the
    server's start: then that start fails and takes other ports.
    """

    def __init__(self, host: str, count: int) -> None:
        """Raises RuntimeError if all are taken."""
        blocks = list(range(FIRST, LAST, count))
        random.SystemRandom().shuffle(blocks)
        for first in blocks:
            lock = _locked(first, count)
            if lock is None:
                continue
            if all(_free(host, first + i) for i in range(count)):
                self.first = first
                self._lock = lock
                return
            lock.close()
        raise RuntimeError(f"no {count} free ports between {FIRST} and {LAST} on {host}")

    def release(self) -> None:
        """Let others have them."""
        self._lock.close()


def _locked(first: int, count: int) -> TextIO | None:
    folder = Path(tempfile.gettempdir()) / f"hacpo-ports-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    file = (folder / f"{first}-{count}").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # ignore the remains of old connections
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True

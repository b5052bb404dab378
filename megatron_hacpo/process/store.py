"""The run's store, where all its processes meet: the launcher serves it."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from megatron_hacpo.process.network import separated

if TYPE_CHECKING:
    from torch.distributed import TCPStore

STORE_VARIABLE = "HACPO_STORE"
"""Environment variable: HOST:PORT of the store."""


def store_address() -> tuple[str, int] | None:
    """Where the store of this process's run listens; None for a process without one."""
    text = os.environ.get(STORE_VARIABLE)
    if text is None:
        return None
    address = separated(text)
    if address is None:
        raise ValueError(
            f"{STORE_VARIABLE}: {text!r} is not HOST:PORT; set it to where the run's store listens"
        )
    return address


def connect(address: tuple[str, int], timeout: timedelta = timedelta(minutes=5)) -> "TCPStore":
    """A connection of one's own. It does one call at a time, so a call that waits holds up the others."""
    from torch.distributed import TCPStore

    return TCPStore(*address, is_master=False, timeout=timeout)

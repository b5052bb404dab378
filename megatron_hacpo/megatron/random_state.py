"""The states of all random number generators of a process."""

import random
from typing import Any

import msgspec
import numpy as np
import torch
from megatron.core.tensor_parallel import get_cuda_rng_tracker


def random_states() -> bytes:
    """Of Python, numpy, torch (host and, where there is one, device) and Megatron's tracker."""
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    return msgspec.msgpack.encode(
        {
            "python": random.getstate(),
            "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
            "torch": _bytes(torch.get_rng_state()),
            "device": _bytes(torch.cuda.get_rng_state()) if torch.cuda.is_available() else None,
            "tracker": {name: _bytes(state) for name, state in get_cuda_rng_tracker().get_states().items()},
        }
    )


def set_random_states(data: bytes) -> None:
    """Go on with the numbers that would have followed `random_states`."""
    states: dict[str, Any] = msgspec.msgpack.decode(data)
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    numpy = states["numpy"]
    np.random.set_state({**numpy, "state": {**numpy["state"], "key": np.array(numpy["state"]["key"], "u4")}})
    torch.set_rng_state(_tensor(states["torch"]))
    if states["device"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(states["device"]))
    get_cuda_rng_tracker().set_states({name: _tensor(state) for name, state in states["tracker"].items()})


def _bytes(state: torch.Tensor) -> bytes:
    return state.cpu().numpy().tobytes()


def _tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)

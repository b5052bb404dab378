"""Fixtures that several test modules share."""

import os
from collections.abc import Iterator
from datetime import timedelta
from importlib.util import find_spec

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Of `make test-real` alone, which installs it: one of its dependencies needs a C compiler.
collect_ignore = [] if find_spec("reasoning_gym") else ["test_reward_gym.py"]


@pytest.fixture(scope="module")
def world() -> Iterator[object]:
    """An agent's world of this one process; there is one at a time."""
    import torch
    import torch.distributed as dist

    from megatron_hacpo.megatron import runtime

    torch.set_num_threads(1)
    world = runtime.start(
        store=dist.HashStore(), rank=0, layout=runtime.Layout(), seed=1, timeout=timedelta(minutes=5)
    )
    yield world
    world.close()

"""Whether an agent's rollout servers can be started or reached as its configuration says."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_hacpo.config.errors import line
from megatron_hacpo.config.schema import AgentConfig

_LOOK_SECONDS = 60
_VERSION = "from importlib.metadata import version; print(version('sglang'))"


def rollout_problems(name: str, agent: AgentConfig, here: bool = True) -> Iterator[str]:
    """What is wrong with `rollout` of agent `name`, one line each. here: whether servers see the files that
    this process sees."""
    rollout, sglang, placement = agent.rollout, agent.rollout.sglang, agent.placement
    place = ("agents", name, "placement")
    if placement.offload != "none" and not placement.colocated:
        yield line(
            (*place, "offload"), placement.offload, "is for colocated servers; write colocated: true too"
        )
    if rollout.engine != "sglang":
        if placement.colocated:
            yield line(
                (*place, "colocated"), True, "is for servers; write rollout.engine: sglang, or leave it out"
            )
        return
    key = ("agents", name, "rollout", "sglang")
    if sglang.python is None and not sglang.addresses:
        yield line((*key, "python"), None, "which SGLang? name its environment's Python, or give addresses")
    elif sglang.python is not None and here:
        yield from _python_problems((*key, "python"), sglang.python)
    if "--enable-hierarchical-cache" in sglang.arguments:
        wrong = "--enable-hierarchical-cache keeps what old weights have computed; leave it out"
        yield line((*key, "arguments"), sglang.arguments, wrong)
    if placement.colocated:
        yield from _colocation_problems(name, agent)
    if rollout.top_k == 1:
        wrong = "SGLang then gives log-probs at temperature 1; leave it out or use 2 or more"
        yield line(("agents", name, "rollout", "top_k"), 1, wrong)


def _colocation_problems(name: str, agent: AgentConfig) -> Iterator[str]:
    sglang, ranks = agent.rollout.sglang, agent.parallel.world_size
    key = ("agents", name, "rollout", "sglang")
    if sglang.addresses:
        wrong = "servers of somebody else share no GPU with the trainer; leave placement.colocated out"
        yield line((*key, "addresses"), sglang.addresses, wrong)
    if sglang.transport == "distributed":
        wrong = "NCCL allows no two processes on one GPU; use tensor or disk for colocated servers"
        yield line((*key, "transport"), "distributed", wrong)
    if sglang.servers * sglang.tensor > ranks:
        wrong = f"with tensor {sglang.tensor} more GPUs than the agent's {ranks} processes have; lower one"
        yield line((*key, "servers"), sglang.servers, wrong)


def _python_problems(key: tuple[str, ...], python: str) -> Iterator[str]:
    if not os.access(python, os.X_OK) or not Path(python).is_file():
        yield line(key, python, "no such program; give the interpreter of SGLang's environment")
        return
    command = [python, "-I", "-c", _VERSION]
    looked = subprocess.run(command, capture_output=True, text=True, timeout=_LOOK_SECONDS, check=False)
    if looked.returncode != 0:
        yield line(key, python, "has no SGLang; install sglang there or name another interpreter")
        return
    from megatron_hacpo.rollout.sglang.versions import unsupported

    if wrong := unsupported(looked.stdout.strip()):
        yield line(key, python, wrong)

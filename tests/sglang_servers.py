"""Real SGLang servers for tests, and what they think of a sequence."""

import os
from pathlib import Path
from typing import Any

import torch

from megatron_hacpo.config import AgentConfig
from megatron_hacpo.megatron.packing import TokenSequence
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.rollout.sglang.client import ServerClient
from megatron_hacpo.rollout.sglang.loop import LoopThread
from megatron_hacpo.rollout.sglang.server import ManagedServer, ServerSpec

ROOT = Path(__file__).parents[1]
START_SECONDS = 240.0
KEY = "the tests' key"


def sglang_python() -> str:
    """The interpreter that `make sglang-cpu` prepares."""
    python = os.environ.get("SGLANG_PYTHON", str(ROOT / ".venv-sglang/bin/python"))
    assert Path(python).is_file(), f"{python} is not there; run `make sglang-cpu`"
    return python


def spec_of(agent: AgentConfig, **changes: Any) -> ServerSpec:
    """A server for a tiny agent."""
    return ServerSpec(
        **{
            "python": sglang_python(),
            "model": Path(agent.model),
            "dtype": agent.dtype,
            "tensor": 1,
            "host": "127.0.0.1",
            "context": 128,
            "max_concurrent": 32,
            "cache_tokens": 8192,
            "memory_fraction": None,
            "first_gpu": None,
            "seed": 1,
            "key": KEY,
            **changes,
        }
    )


def started(spec: ServerSpec, log: Path, loop: LoopThread) -> ManagedServer:
    server = ManagedServer(spec, log)
    loop.run(server.ready(START_SECONDS))
    return server


def server_log_probs(loop: LoopThread, client: ServerClient, sequence: TokenSequence) -> torch.Tensor:
    """Of the response's tokens, float32 [l], as the server computes them now."""
    prompt = len(sequence.prompt_ids)
    request = {
        "input_ids": [*sequence.prompt_ids.tolist(), *sequence.response_ids.tolist()],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
        "return_logprob": True,
        "logprob_start_len": prompt - 1,
    }
    answer = loop.run(client.post("/generate", request))
    return torch.tensor([entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]])


def policy_log_probs(policy: Policy, sequence: TokenSequence) -> torch.Tensor:
    return policy.log_probs([sequence], policy.plan([sequence])).tokens[0]


def change_weights(policy: Policy, scale: float = 0.005) -> None:
    """Other weights everywhere, as an update would leave them."""
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * torch.randn_like(parameter))

"""Two ranks that run the same HACPO steps in several layouts: `python parity_worker.py RANK PORT OUT`.

One process pair serves all layouts, since importing Megatron is what takes time.
"""

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_steps import make_policy, pair_config, run_steps

from megatron_hacpo.algorithm.segments import segment_sum
from megatron_hacpo.config import RunConfig
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.packing import PackedMicroBatch, TokenSequence
from megatron_hacpo.megatron.policy import Gradient, Policy

LAYOUTS = {"tp2": {"tensor": 2}, "pp2": {"pipeline": 2}, "dp2": {"data": 2}}
STEPS = 3
# Adam divides by |gradient| + eps: with its default eps the rounding of a vanishing gradient would be scaled
# up to a whole step of the learning rate.
SETTINGS = ("algorithm.kl_coef=0.01", "optimizer.eps=1.0e-4")


def steps_of(config: RunConfig, name: str, world: runtime.World) -> dict[str, Any]:
    """What a layout must not change: every update's figures and the weights after `STEPS` steps."""
    policy = make_policy(config, name, world, microbatch_tokens=128)
    records = run_steps(config, name, policy, STEPS)
    weights = {key: value.clone() for key, value in policy.export()}
    lonely, gradient = lonely_update(policy)
    return {
        "norms": [r.grad_norm for r in records],
        "tallies": [dict(r.tallies) for r in records],
        "ratios": [r.ratios for r in records],
        "weights": weights,
        "lonely": lonely,
        "cosine": policy.gradient_cosine(gradient, lonely_update(policy)[1]),
    }


def lonely_update(policy: Policy) -> tuple[tuple[float, float], Gradient]:
    """(gradient norm, log-prob sum) of one sequence: the other data-parallel rank has nothing to say."""
    sequence = TokenSequence(np.array([2, 3, 4], np.int32), np.array([5, 6, 1], np.int32))
    plan = policy.plan([sequence])

    def loss(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return segment_sum(log_probs, micro.segments, len(micro.rows)).sum(), None

    log_prob = float(policy.log_probs([sequence], plan).sums)
    result = policy.update([sequence], plan, loss, keep_gradient=True)
    assert result.gradient is not None
    return (result.grad_norm, log_prob), result.gradient


def main(rank: int, port: int, out: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    results = {}
    for layout, sizes in LAYOUTS.items():
        world = runtime.start(
            store=dist.PrefixStore(layout, store),
            rank=rank,
            layout=runtime.Layout(**sizes),
            seed=1,
            timeout=timedelta(minutes=5),
        )
        assert world.broadcast(b"from the leader" if world.is_leader else None) == b"from the leader"
        for name in "AB":
            results[layout, name] = steps_of(pair_config(*SETTINGS), name, world)
            half = steps_of(pair_config(f"agents.{name}.dtype=bfloat16"), name, world)
            results[layout, name, "bf16"] = half
        world.close()
    if rank == 0:
        torch.save(results, out)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

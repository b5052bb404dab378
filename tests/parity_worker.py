"""Four ranks that run the same HACPO steps in many layouts: `python parity_worker.py RANK PORT FOLDER
[all]`. Without `all` each layout runs one model, so that all layouts and all models have their turn.

Layouts of two ranks are shared between the pairs (0, 1) and (2, 3); then all four run those of four. One
group of processes serves all, since importing Megatron is what takes time. FOLDER holds the models; ranks 0
and 2 write FOLDER/results-RANK.pt.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from learner_steps import make_policy, pair_config, run_steps
from parity_models import TOKENIZER_OF
from ranks import join_world

from megatron_hacpo.algorithm.segments import segment_sum
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.batching import MicroBatchPlan
from megatron_hacpo.megatron.packing import PackedMicroBatch, TokenSequence
from megatron_hacpo.megatron.policy import Gradient, Policy

TWO_RANKS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor": 2, "sequence": False},
    "tp2 sp": {"tensor": 2},
    "pp2": {"pipeline": 2},
    "pp2 vpp2": {"pipeline": 2, "virtual_pipeline": 2},
    "dp2": {"data": 2},
    "dp2 distributed optimizer": {"data": 2, "distributed": True},
    "cp2": {"context": 2},
    "dp2 ep2": {"data": 2, "expert": 2},
    "dp2 full recompute": {"data": 2, "recompute": "full"},
    "dp2 selective recompute": {"data": 2, "recompute": "selective"},
}
FOUR_RANKS: dict[str, dict[str, Any]] = {
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "tp2 cp2": {"tensor": 2, "context": 2},
    "tp2 cp2 ep2": {"tensor": 2, "context": 2, "expert": 2},
    "tp2 ep2 dp2": {"tensor": 2, "data": 2, "expert": 2},
    "cp2 pp2 distributed optimizer": {"context": 2, "pipeline": 2, "distributed": True},
}
LAYOUTS = TWO_RANKS | FOUR_RANKS
STEPS = 3
# Adam divides by |gradient| + eps: with its default eps the rounding of a vanishing gradient would be scaled
# up to a whole step of the learning rate.
SETTINGS = ("algorithm.kl_coef=0.01", "optimizer.eps=1.0e-4")


def cases(*, every_model: bool) -> list[tuple[str, str]]:
    """(layout, model): every model that fits the layout, or one of them."""
    chosen = []
    for number, (layout, sizes) in enumerate(LAYOUTS.items()):
        models = [model for model in TOKENIZER_OF if _fits(sizes, model)]
        chosen += [(layout, model) for model in (models if every_model else [models[number % len(models)]])]
    return chosen


def _fits(layout: dict[str, Any], model: str) -> bool:
    """Only experts can be divided, and under tensor parallelism they must be."""
    if model == "experts":
        return layout.get("tensor", 1) == 1 or layout.get("expert", 1) > 1
    return "expert" not in layout


def steps_of(
    folder: Path, model: str, world: runtime.World, *settings: str, tokens: int = 128, steps: int = STEPS
) -> dict[str, Any]:
    """What a layout must not change: every update's figures and the weights after `steps` steps."""
    name = TOKENIZER_OF[model]
    config = pair_config(*SETTINGS, f"agents.{name}.model={folder / model}", *settings)
    policy = make_policy(config, name, world, microbatch_tokens=tokens)
    micro_batches, plan = [], policy.plan

    def watched(sequences: list[TokenSequence]) -> MicroBatchPlan:
        chosen = plan(sequences)
        micro_batches.append(len(chosen[0]))
        return chosen

    policy.plan = watched
    records = run_steps(config, name, policy, steps)
    weights = {key: value.clone() for key, value in policy.export()}
    lonely, gradient = lonely_update(policy)
    return {
        "norms": [r.grad_norm for r in records],
        "tallies": [dict(r.tallies) for r in records],
        "ratios": [r.ratios for r in records],
        "weights": weights,
        "micro_batches": max(micro_batches),
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


def balanced_update(folder: Path, world: runtime.World) -> tuple[float, float | None]:
    """(gradient norm, L) of an update with experts that also balances them.

    Sequences of 16 tokens, one per micro-batch: in no layout is there any padding, nor another division into
    micro-batches, on which L depends.
    """
    agent = TOKENIZER_OF["experts"]
    settings = [f"agents.{agent}.model={folder / 'experts'}", f"agents.{agent}.router_aux_loss_coef=10.0"]
    policy = make_policy(pair_config(*settings), agent, world, microbatch_tokens=16 // world.layout.context)
    ids = np.random.default_rng(1).integers(2, 15, (8, 16)).astype(np.int32)
    sequences = [TokenSequence(row[:6], row[6:]) for row in ids]

    def loss(micro: PackedMicroBatch, log_probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        return log_probs.sum() / 80, None

    result = policy.update(sequences, policy.plan(sequences), loss)
    return result.grad_norm, result.load_balance


def run_layout(
    layout: str, models: list[str], store: dist.Store, rank: int, folder: Path
) -> dict[tuple[str, ...], Any]:
    sizes = dict(LAYOUTS[layout])
    recompute = sizes.pop("recompute", "none")
    distributed = "true" if sizes.pop("distributed", False) else "false"
    world = join_world(layout, store, rank, runtime.Layout(**sizes))
    assert world.broadcast(b"from the leader" if world.is_leader else None) == b"from the leader"
    results = {}
    for model in models:
        name = TOKENIZER_OF[model]
        settings = [f"agents.{name}.recompute={recompute}", f"optimizer.distributed={distributed}"]
        results[layout, model] = steps_of(folder, model, world, *settings)
        half = [*settings, f"agents.{name}.dtype=bfloat16"]
        if model == "experts":
            results[layout, "balanced"] = balanced_update(folder, world)
        results[layout, model, "bf16"] = steps_of(folder, model, world, *half, steps=1)
    world.close()
    return results


def main(rank: int, port: int, folder: Path, *, every_model: bool) -> None:
    models = defaultdict(list)
    for layout, model in cases(every_model=every_model):
        models[layout].append(model)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    results = {}
    for layout in list(TWO_RANKS)[rank // 2 :: 2]:
        results |= run_layout(layout, models[layout], store, rank % 2, folder)
    for layout in FOUR_RANKS:
        results |= run_layout(layout, models[layout], store, rank, folder)
    if rank in (0, 2):
        torch.save(results, folder / f"results-{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), every_model="all" in sys.argv[4:])

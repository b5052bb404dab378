"""Four ranks that save and load states in several layouts: `python state_worker.py RANK PORT FOLDER [LAYOUT
...]`, without layouts all of CASES.

FOLDER holds the models and, as FOLDER/one/MODEL, what one rank saved after BEFORE steps. Each layout goes on
from that, and saves it to FOLDER/again/LAYOUT at once; it also makes the same steps itself and saves to
FOLDER/states/LAYOUT. Results: FOLDER/states.pt.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from learner_steps import make_policy, pair_config, run_steps
from parity_models import TOKENIZER_OF
from parity_worker import LAYOUTS, SETTINGS
from ranks import join_world

from megatron_hacpo.algorithm.capability import CapabilityTracker
from megatron_hacpo.megatron import runtime, training_state
from megatron_hacpo.megatron.policy import Policy
from megatron_hacpo.megatron.torch_dist import Writing

CASES = {
    "tp2 sp": ("dense-a", ()),
    "pp2 vpp2": ("dense-a", ()),
    "dp2 distributed optimizer": ("dense-b", ("dtype=bfloat16",)),
    "tp2 ep2 dp2": ("experts", ()),
    "cp2 pp2 distributed optimizer": ("dense-a", ()),
}
"""Layout: the model that it trains, and settings of its agent."""
BEFORE, STEPS = 2, 4


def policy_of(folder: Path, layout: str, world: runtime.World, *, alone: bool) -> tuple[Policy, Any, str]:
    """A new policy of a case, in its layout or in that of one rank, with configuration and agent."""
    model, settings = CASES[layout]
    name = TOKENIZER_OF[model]
    distributed = "false" if alone else str(LAYOUTS[layout].get("distributed", False)).lower()
    config = pair_config(
        *SETTINGS,
        f"agents.{name}.model={folder / model}",
        f"optimizer.distributed={distributed}",
        *(f"agents.{name}.{setting}" for setting in settings),
    )
    return make_policy(config, name, world, microbatch_tokens=128), config, name


def write(writing: Writing) -> None:
    """To the disk, on every rank."""
    writing.write()
    writing.collect()
    if dist.get_rank() == 0:
        writing.describe()


def save(folder: Path, layout: str, world: runtime.World, target: Path, *, alone: bool) -> CapabilityTracker:
    """The state after BEFORE steps."""
    policy, config, name = policy_of(folder, layout, world, alone=alone)
    tracker = CapabilityTracker()
    run_steps(config, name, policy, BEFORE, tracker=tracker)
    if world.is_leader:
        target.mkdir(parents=True)
    world.barrier()
    writing = policy.state_writing(target, copy=True)
    assert policy.updates == 4 * BEFORE
    _check_share(policy, world)
    run_steps(config, name, policy, BEFORE + 1, first=BEFORE + 1, tracker=CapabilityTracker())  # meanwhile
    write(writing)
    world.barrier()
    return tracker


def _check_share(policy: Policy, world: runtime.World) -> None:
    """Of what the ranks save together each has copied its share, and nobody everything."""
    copied = [0] * world.size
    mine = policy._state._copies._bytes.nbytes
    dist.all_gather_object(copied, mine, group=world.host_group)
    assert max(copied) <= 1.2 * sum(copied) / world.size, copied


def go_on(
    folder: Path,
    layout: str,
    world: runtime.World,
    source: Path,
    tracker: CapabilityTracker,
    *,
    alone: bool,
    again: Path | None = None,
) -> dict[str, Any]:
    """The steps after BEFORE from a saved state: what `parity.differences` compares.

    again: where to save what was loaded.
    """
    policy, config, name = policy_of(folder, layout, world, alone=alone)
    policy.start_after(BEFORE)
    policy.load_state(source, updates=4 * BEFORE)
    if again is not None:
        if world.is_leader:
            again.mkdir(parents=True)
        world.barrier()
        write(policy.state_writing(again, copy=False))
    records = run_steps(config, name, policy, STEPS, first=BEFORE + 1, tracker=tracker)
    return {
        "norms": [r.grad_norm for r in records],
        "tallies": [dict(r.tallies) for r in records],
        "weights": {key: value.clone() for key, value in policy.export()},
        "rate": policy.learning_rate,
    }


def main(rank: int, port: int, folder: Path, layouts: Sequence[str]) -> None:
    torch.set_num_threads(1)
    training_state.LOAD_BYTES = 2**14  # so that states are read in many parts, of some stages in more
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    results = {}
    for layout in layouts:
        sizes = {key: value for key, value in LAYOUTS[layout].items() if key != "distributed"}
        size = runtime.Layout(**sizes).world_size
        if rank < size:
            world = join_world(layout, store, rank, runtime.Layout(**sizes))
            tracker = save(folder, layout, world, folder / "states" / layout, alone=False)
            results[layout] = go_on(
                folder,
                layout,
                world,
                folder / "one" / layout,
                tracker,
                alone=False,
                again=folder / "again" / layout,
            )
            world.close()
    if rank == 0:
        torch.save(results, folder / "states.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:] or list(CASES))

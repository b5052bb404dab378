"""Two data-parallel ranks that save together: `python checkpoint_worker.py RANK PORT FOLDER`.

Steps 1 and 4 are saved. In between the second rank alone cannot write, with `checkpoint.on_error` continue in
step 2 and stop in step 3. What each rank was told: FOLDER/told-RANK.json.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from learner_steps import make_policy, pair_config, run_steps
from ranks import join_world
from test_checkpoint import files_up_to, make_saver, state

from megatron_hacpo.megatron import runtime


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    world = join_world("A", store, rank, runtime.Layout(data=2))
    config = pair_config()
    policy = make_policy(config, "A", world)
    run_steps(config, "A", policy, 1)
    told: dict[int, list[str]] = {}
    for step, on_error in ((1, "stop"), (2, "continue"), (3, "stop"), (4, "stop")):
        warned = told[step] = []
        saver = make_saver(folder / "run", world, warned, asynchronous=step > 1, on_error=on_error)
        with files_up_to(20_000 if rank == 1 and step in (2, 3) else None):
            try:
                saver.begin(policy, state(step, policy.updates))
                saver.settle(wait=True)
            except RuntimeError as error:
                warned.append(f"raised: {error}")
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
    world.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

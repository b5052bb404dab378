"""Four ranks on another megatron-core than this process's: `python newest_worker.py RANK PORT FOLDER`.

FOLDER holds the models of `parity_models.py`, and FOLDER/checkpoints what `conversion_worker.py` compares.
Layouts of two ranks are shared between the pairs (0, 1) and (2, 3); then all four run those of four. Ranks 0
and 2 write FOLDER/newest-RANK.pt: their megatron-core's version and their results.
"""

import sys
from pathlib import Path

import conversion_worker
import torch
import torch.distributed as dist
from parity_worker import run_layout

MODEL_OF = {"tp2 sp": "dense-b", "pp2 vpp2": "dense-a", "dp2 distributed optimizer": "experts"}
MODEL_OF_FOUR_RANKS = {"tp2 cp2 ep2": "experts"}


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    results = {}
    for layout in list(MODEL_OF)[rank // 2 :: 2]:
        results |= run_layout(layout, [MODEL_OF[layout]], store, rank % 2, folder)
    for layout, model in MODEL_OF_FOUR_RANKS.items():
        results |= run_layout(layout, [model], store, rank, folder)
    if rank in (0, 2):
        version = sys.modules["megatron.core.package_info"].__shortversion__
        torch.save((version, results), folder / f"newest-{rank}.pt")
    conversion_worker.main(rank, port, folder / "checkpoints")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

"""Four ranks that load models in several layouts and stream them out: `python conversion_worker.py RANK PORT
FOLDER`.

FOLDER holds a Hugging Face folder per model, and beside each its checkpoint, NAME.megatron. What comes out of
either is compared, on the leader, with what the Hugging Face folder holds; differences go to
FOLDER/report.json.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import join_world

from megatron_hacpo.hf.families import expert_count
from megatron_hacpo.hf.read import HFWeights
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.conversion import load_weights, parts
from megatron_hacpo.megatron.model import build, hf_config, transformer_config
from megatron_hacpo.megatron.stream import hf_tensors, to_leader

LAYOUTS = {
    "tp2 dp2": {"tensor": 2, "data": 2},
    "pp2 dp2": {"pipeline": 2, "data": 2},
    "tp2 pp2": {"tensor": 2, "pipeline": 2},
    "pp2 vpp2 cp2": {"pipeline": 2, "virtual_pipeline": 2, "context": 2},
    "dp4 ep2": {"data": 4, "expert": 2},
    "tp2 pp2 ep2": {"tensor": 2, "pipeline": 2, "expert": 2},
}


def differences(streamed: dict[str, torch.Tensor], weights: HFWeights) -> list[str]:
    """Names that are missing, unexpected, or not equal to the bit and the dtype."""
    wrong = sorted(streamed.keys() ^ weights.stored.keys())
    for name in streamed.keys() & weights.stored.keys():
        stored = weights.slice(name)[:]
        if streamed[name].dtype != stored.dtype or not torch.equal(streamed[name], stored):
            wrong.append(name)
    return wrong


def compare(folder: Path, world: runtime.World) -> list[list[str]]:
    """Differences after loading the Hugging Face folder, and after loading its checkpoint."""
    config, weights = hf_config(folder), HFWeights(folder)
    dtype = next(iter({weights.slice(name)[:].dtype for name in weights.stored}))
    found = []
    for source in ("hf", "megatron"):
        megatron_config = transformer_config(config, layout=world.layout, dtype=dtype)
        models = build(config, megatron_config, world.layout)
        with torch.no_grad():
            for model in models:
                for parameter in model.parameters():
                    parameter.fill_(float("nan"))
        if source == "hf":
            load_weights(models, weights, config)
        else:
            load_checkpoint(models, folder.with_name(f"{folder.name}.megatron"))
        stream = to_leader(hf_tensors(parts(models, config), config), world)
        streamed = {name: tensor.clone() for name, tensor in stream}
        found.append(differences(streamed, weights) if world.is_leader else [])
    return found


def main(rank: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    report: dict[str, Any] = {}
    models = sorted(path for path in folder.iterdir() if (path / "config.json").is_file() and not path.suffix)
    for layout, sizes in LAYOUTS.items():
        world = join_world(layout, store, rank, runtime.Layout(**sizes))
        for model in models:
            if "expert" in sizes and not expert_count(hf_config(model)):
                continue
            for source, wrong in zip(("hf", "megatron"), compare(model, world), strict=True):
                report[f"{model.name}, {layout}, from {source}"] = wrong
        world.close()
    if rank == 0:
        (folder / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))

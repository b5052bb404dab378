"""Writing an agent back as an ordinary Hugging Face folder."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".safetensors.index.json", ".bin.index.json")


def write_hf_folder(source: Path, tensors: Iterable[tuple[str, torch.Tensor]], target: Path) -> None:
    """`target` becomes `source` with other weights: configuration, tokenizer and templates are copied.

    Written beside and renamed, so that `target` is complete or absent.
    """
    beside = target.with_name(f".{target.name}.partial")
    if beside.exists():
        shutil.rmtree(beside)
    beside.mkdir(parents=True)
    for file in sorted(source.iterdir()):
        if file.is_file() and not file.name.endswith(_WEIGHTS):
            shutil.copy2(file, beside / file.name)
    # The stream may reuse its buffers, so each tensor is copied as it passes.
    weights = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors}
    save_file(weights, beside / "model.safetensors", metadata={"format": "pt"})
    shutil.copymode(
        beside / "config.json", beside / "model.safetensors"
    )  # safetensors writes for the owner alone
    if target.exists():
        shutil.rmtree(target)
    beside.replace(target)

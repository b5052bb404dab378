"""Whether a checkpoint is what a Hugging Face folder is: tensor by tensor, and by what the models answer."""

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from megatron_hacpo.hf.read import HFWeights
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.checkpoint import load_checkpoint
from megatron_hacpo.megatron.convert import Progress, checkpoint_tensors
from megatron_hacpo.megatron.logprob import response_log_probs
from megatron_hacpo.megatron.model import build, hf_config, transformer_config
from megatron_hacpo.megatron.packing import TokenSequence, pack

LIMIT = 1e-4
"""Largest mean difference of log-probs, in nats, in float32: in bfloat16 rounding alone makes much more."""

PROMPTS = 4
PROMPT_TOKENS = 128
_SEED = 1


def verify_tensors(folder: Path, checkpoint: Path, progress: Progress) -> int:
    """Compare every tensor bit by bit, in the shorter of the two dtypes; how many there are.

    ValueError names the first one that differs.
    """
    weights = HFWeights(folder)
    count = 0
    with runtime.alone(torch.device("cpu")):
        tensors, _ = checkpoint_tensors(checkpoint, folder)
        for name, tensor in tensors:
            other = weights.slice(name)[:]
            dtype = min(tensor.dtype, other.dtype, key=lambda d: d.itemsize)
            if not torch.equal(tensor.to(dtype).view(torch.uint8), other.to(dtype).view(torch.uint8)):
                wrong = (tensor.float() - other.float()).abs().max()
                raise ValueError(
                    f"{checkpoint}: {name} is up to {wrong:.3g} from the one of {folder}; convert it "
                    "again, or compare it with the model that it was made of"
                )
            progress(tensor.nbytes)
            count += 1
    return count


def verify_log_probs(folder: Path, checkpoint: Path) -> float:
    """Mean |Megatron - transformers| log-prob, in nats, of random tokens after random prompts.

    Both models are in memory at once, in float32. ValueError if it is above `LIMIT`.
    """
    config = hf_config(folder)
    rng = np.random.default_rng(_SEED)
    ids = rng.integers(0, config.vocab_size, (PROMPTS, PROMPT_TOKENS), dtype=np.int32)
    with runtime.alone() as world, torch.no_grad():
        megatron_config = transformer_config(config, layout=world.layout, dtype=torch.float32)
        (model,) = build(config, megatron_config, world.layout)
        load_checkpoint([model], checkpoint)
        micro = pack(0, range(PROMPTS), [TokenSequence(row[:1], row[1:]) for row in ids], world.device)
        hidden = model(micro.tokens, micro.positions, None, packed_seq_params=micro.attention)
        ours, _ = response_log_probs(model, hidden, micro, temperature=1.0, vocab_size=config.vocab_size)
        theirs = _transformers_log_probs(folder, ids, world.device)
    gap = float((ours - theirs).abs().mean())
    if not gap <= LIMIT:
        raise ValueError(
            f"{checkpoint}: log-probs are {gap:.2g} from those of {folder} in the mean, above {LIMIT:g}; "
            "convert it again, or compare it with the model that it was made of"
        )
    return gap


def _transformers_log_probs(folder: Path, ids: np.ndarray, device: torch.device) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    ).to(device)
    tokens = torch.from_numpy(ids).long().to(device)
    log_probs = model(tokens).logits[:, :-1].float().log_softmax(-1)
    return log_probs.gather(2, tokens[:, 1:, None]).flatten()

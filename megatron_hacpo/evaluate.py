"""Accuracy of an agent on held-out prompts."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers.utils.logging import disable_progress_bar

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.config import AgentConfig, RunConfig
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.hf.read import is_checkpoint
from megatron_hacpo.inputs import load_tokenizers, open_pool, open_prompts
from megatron_hacpo.reward.pool import RewardPool
from megatron_hacpo.rollout.base import Response, Sampling
from megatron_hacpo.rollout.local import LocalEngine

EVALUATION_SEED = 777
"""Fixed, so that evaluations differ by the weights alone."""


def evaluate(
    generate: Callable[[Sequence[Sequence[int]], Sampling], list[Response] | None],
    prompts: Sequence[Prompt],
    *,
    agent: AgentConfig,
    tokenizer: AgentTokenizer,
    verifier: RewardPool | None,
    lowest: float,
) -> dict[str, float]:
    """Mean reward of one response per prompt: `sampled` (the rollout's settings) and `greedy`.

    `sampled/GROUP` and `greedy/GROUP` break it down where prompts have groups. A response without a valid
    reward counts as the `lowest` one. Empty, and without a verifier, where `generate` hands nothing back.
    """
    sampled = Sampling(
        responses_per_prompt=1,
        max_tokens=agent.rollout.max_response_tokens,
        temperature=agent.rollout.temperature,
        top_p=agent.rollout.top_p,
        top_k=agent.rollout.top_k,
        seed=EVALUATION_SEED,
    )
    ids = [tokenizer.render_prompt(p.messages) for p in prompts]
    result: dict[str, float] = {}
    for name, sampling in (("sampled", sampled), ("greedy", replace(sampled, temperature=0.0))):
        responses = generate(ids, sampling)
        if responses is None:
            continue
        texts = [tokenizer.decode_response(r.token_ids)[0] for r in responses]
        reasons = [r.finish_reason for r in responses]
        assert verifier is not None
        rewards = np.nan_to_num(verifier.score(prompts, texts, reasons).rewards, nan=lowest)
        result[name] = float(rewards.mean())
        by_group = defaultdict(list)
        for prompt, reward in zip(prompts, rewards.tolist(), strict=True):
            by_group[prompt.group].append(reward)
        if len(by_group) > 1:
            result |= {f"{name}/{group}": float(np.mean(values)) for group, values in by_group.items()}
    return result


def main(config: RunConfig, names: Sequence[str]) -> None:
    """Evaluate the agents `names` as they lie in their folders and print a table."""
    disable_progress_bar()
    tokenizers = load_tokenizers(config)
    prompts = open_prompts(config, tokenizers).held_out()
    if not prompts:
        raise ValueError(
            "evaluation: there are no held-out prompts; set evaluation.prompts or evaluation.path"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = {}
    verifier = open_pool(config)
    for name in names:
        agent, tokenizer = config.agents[name], tokenizers[name]
        dtype = getattr(torch, agent.dtype)
        engine = LocalEngine(agent.model, dtype=dtype, device=device, stop_ids=tokenizer.stop_ids)
        _fill_from_checkpoint(engine, Path(agent.model))
        results[name] = evaluate(
            engine.generate,
            prompts,
            agent=agent,
            tokenizer=tokenizer,
            verifier=verifier,
            lowest=config.reward.range[0],
        )
    verifier.close()
    table = Table(title=f"{len(prompts)} held-out prompts", title_justify="left")
    table.add_column("accuracy", style="bold")
    for name in names:
        table.add_column(f"{name}: {config.agents[name].model}", justify="right")
    for metric in results[names[0]]:
        table.add_row(metric, *(f"{results[name][metric]:.3f}" for name in names))
    Console().print(table)


def _fill_from_checkpoint(engine: LocalEngine, folder: Path) -> None:
    """Give the engine the weights of a folder that has them as a Megatron checkpoint."""
    if not is_checkpoint(folder):
        return
    from megatron_hacpo.megatron.convert import checkpoint_tensors
    from megatron_hacpo.megatron.runtime import alone

    with alone(torch.device("cpu")):
        tensors, _ = checkpoint_tensors(folder, folder)
        engine.update_weights(tensors, 0)

"""One agent's HACPO training in plain PyTorch, replayed from the responses that a run left on disk."""

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer


def replay(folder: str, k: int, c: dict, steps: list) -> tuple[list, dict]:
    """Train agent k on each step's (prompts, pool files): (objective, KL, grad norm) per update; weights."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, start = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for _ in range(2))
    matrices, norms = ([p for p in model.parameters() if (p.ndim > 1) == wide] for wide in (True, False))
    groups: list[dict] = [{"params": matrices}, {"params": norms, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, c["lr"], c["betas"], c["eps"], c["weight_decay"])
    reward_means, trace = [], [list[tuple]() for _ in steps]
    for t, (prompts, pool) in enumerate(steps):
        for group in adam.param_groups:
            group["lr"] = c["lr"] * min(1.0, (t + 1) / c["warmup_steps"])
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        starts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
        n, size, sources = len(pool), c["minibatch_prompts"], []
        for agent in pool:
            sources.append(sorted(agent["trajectories"], key=lambda y: y["prompt"]))
            for y in sources[-1]:
                y["start"], y["ids"] = starts[y["prompt"]], np.frombuffer(y["token_ids"], "<i4").tolist()
                if agent["tokenizer"] != pool[k]["tokenizer"]:
                    ids = tokenizer.encode(y["text"], add_special_tokens=False, split_special_tokens=True)
                    y["ids"] = ids + [tokenizer.eos_token_id] * (y["finish_reason"] == "stop")
        with torch.no_grad():  # own old log-probs, and the reference's for the KL
            old_and_reference = [log_probs(m, sources[k], c["temperature"]) for m in (model, start)]
        for y, old, reference in zip(sources[k], *old_and_reference, strict=True):
            y["mean_log_prob"], y["reference"] = old.mean().item(), reference
        rewards = np.array([[y["reward"] for y in source] for source in sources]).reshape(n, len(prompts), -1)
        reward_means.append(rewards.mean((1, 2)))
        capability = np.maximum(np.mean(reward_means[-c["capability_window"] :], axis=0), 1e-8)
        omega = np.clip(capability[k] / capability, 0.1, 10.0)  # omega(k, j) = 1 / omega(j, k)
        A = torch.tensor(advantages(rewards, k, omega) / omega[:, None, None])
        order = [k] + [(k + 1 + (t + i) % (n - 1)) % n for i in range(n - 1)]
        for m, (j, p) in enumerate((j, p) for j in order for p in range(0, len(prompts), size)):
            block = [y for y in sources[j] if p <= y["prompt"] < p + size]
            usable = torch.tensor([len(y["ids"]) <= c["max_response_tokens"] for y in block])
            a, with_kl = A[j, p : p + size].flatten() * usable, j == k and c["kl_coef"] > 0
            if not a.any() and not with_kl:
                continue
            new, kl = log_probs(model, block, c["temperature"]), torch.tensor(0.0)
            log_s = torch.stack([x.mean() for x in new]) - torch.tensor([y["mean_log_prob"] for y in block])
            s = log_s.clamp(-10.0, 10.0).exp()
            if j == k:
                objective = torch.minimum(s * a, s.clamp(1 - c["clip_low"], 1 + c["clip_high"]) * a).mean()
            else:
                clipped = s.clamp(min(1.0, 1 - c["delta"] + m * c["delta_step"]), 1.0)
                objective = (clipped * clipped.detach() ** c["alpha"] * a).mean()
            if with_kl:
                gaps = [(y["reference"] - x).clamp(-20.0, 20.0) for y, x in zip(block, new, strict=True)]
                kl = torch.stack([(d.exp() - d - 1).clamp(-10.0, 10.0).mean() for d in gaps]).mean()
            adam.zero_grad()
            (c["kl_coef"] * kl - objective).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), c["clip_grad"])
            adam.step()
            trace[t].append((objective.item(), kl.item(), norm.item()))
    return trace, model.state_dict()


def advantages(rewards: np.ndarray, k: int, omega: np.ndarray) -> np.ndarray:
    """Of rewards [sources, prompts, G] for learner k with weights omega(k, j) [sources]."""
    baseline = (omega[:, None, None] * rewards).mean((0, 2))
    baseline = np.where(baseline > 1, rewards[k].mean(-1), baseline)[:, None]
    std = rewards.std((0, 2), ddof=1)[:, None] + 1e-6
    return (np.ptp(rewards, (0, 2)) > 1e-12)[:, None] * (rewards - baseline) / std


def log_probs(model: torch.nn.Module, responses: list[dict], temperature: float) -> list[torch.Tensor]:
    """Log-probs [L] of each response's tokens."""
    ids = pad_sequence([torch.tensor(y["start"] + y["ids"]) for y in responses], batch_first=True)
    logits = model(input_ids=ids).logits[:, :-1] / temperature  # causal: padding on the right changes nothing
    picked = logits.log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    return [x[len(y["start"]) - 1 :][: len(y["ids"])] for x, y in zip(picked, responses, strict=True)]

"""Make the tiny agents of the example from nothing: `python tools/make_tiny_agents.py --out examples/tiny`.

A has the Qwen3 architecture and one token per character, B the Llama architecture with llama3 rope scaling
and multi-character tokens, C the Qwen2 architecture and one token for the choice of a rule. Supervised stages
give each of them its starting point:

1. `execute`: demonstrations that name a random rule and execute it, until the agent executes the rule that it
   named.
2. `habit` (A alone): demonstrations that nearly always name one rule, whatever the letter.
3. `prefer`: demonstrations whose rule is right half of the time for the agent's own letters and almost never
   for the others. OUT/AGENT is left able to execute every rule, and hardly ever choosing one of them.

The weights before the last stage are kept in OUT/before_last/AGENT; --start does only the last one.

Deterministic by seed on one machine; a few minutes per agent on one core.
"""

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch; the models are far too small for threads

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from megatron_hacpo.data.rule_task import DIGITS, LETTERS, RULE_OF, answer_for, demonstration, held_out

PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "0123456789+-CM=()"
# Merges that never join two digits: every digit position keeps its own token, whatever the digits are.
DIGIT_ALIGNED_MERGES = [(c, d) for c in "(+-CM" for d in "0123456789"] + [
    (d, c) for c in ")=" for d in "0123456789"
]
# The whole choice of a rule is one token.
RULE_MERGES = [("(", "+"), ("(", "-")]
# Concatenates the messages: the task's prompt is the whole text that the model sees.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
MAX_RESPONSE_TOKENS = 12
SHARED = {
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
"""Fields of config.json that all agents have alike."""
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One supervised stage. It ends at `steps`, or as soon as `execution_target` is reached.

    right_probability: per letter, how often a demonstration names the right rule.
    decay: the learning rate falls linearly to 0 over `steps`.
    """

    name: str
    lr: float
    warmup: int
    steps: int
    right_probability: dict[str, float]
    execution_target: float | None = None
    decay: bool = False
    batch_size: int = 128


@dataclass(frozen=True, kw_only=True)
class Agent:
    """What distinguishes one tiny agent from the other."""

    config: PretrainedConfig
    model_class: type[PreTrainedModel]
    merges: list[tuple[str, str]]
    stages: tuple[Stage, ...]


def execute_stage(*, lr: float, target: float) -> Stage:
    return Stage(
        name="execute",
        lr=lr,
        warmup=50,
        steps=12_000,
        right_probability=dict.fromkeys(LETTERS, 0.5),
        execution_target=target,
    )


def habit_stage(*, rule: str) -> Stage:
    # Comes from naming `rule` on every letter: the preference that follows is unlearnt on the own letters and
    # kept on the others, and whatever later pushes it down further on the own letters pushes it down on the
    # others as well. Without this stage GSPO finds the missing rule alone with most seeds.
    return Stage(
        name="habit",
        lr=2e-3,
        warmup=20,
        steps=100,
        right_probability={letter: 0.98 if RULE_OF[letter] == rule else 0.02 for letter in LETTERS},
        decay=True,
    )


def prefer_stage(*, own_letters: str, weak: float, lr: float = 5e-4, steps: int = 250) -> Stage:
    # The rarer the missing rule (`weak`), the longer an agent needs to find it alone. Too rare, and the other
    # agent's right responses fall out of the clipping window: their ratio is about weak ** (1 / length).
    return Stage(
        name="prefer",
        lr=lr,
        warmup=20,
        steps=steps,
        right_probability={c: 0.5 if c in own_letters else weak for c in LETTERS},
        decay=True,
    )


def make_tokenizer(merges: list[tuple[str, str]]) -> PreTrainedTokenizerFast:
    """BPE over the task's characters. Ids: pad 0, eos 1, the characters, the merges in order."""
    tokens = [PAD, EOS, *CHARACTERS, *("".join(pair) for pair in merges)]
    bpe = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    bpe.decoder = decoders.Fuse()  # without a decoder, tokens are joined by spaces
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def agent_a() -> Agent:
    config = Qwen3Config(
        vocab_size=2 + len(CHARACTERS),
        hidden_size=48,
        intermediate_size=144,
        num_key_value_heads=2,
        head_dim=16,
        rope_parameters=dict(PLAIN_ROPE),
        initializer_range=0.05,
        tie_word_embeddings=True,
        **SHARED,
    )
    stages = (
        execute_stage(lr=3e-3, target=0.97),
        habit_stage(rule="-"),
        prefer_stage(own_letters="+C", weak=0.004),
    )
    return Agent(config=config, model_class=Qwen3ForCausalLM, merges=[], stages=stages)


def agent_b() -> Agent:
    config = LlamaConfig(
        vocab_size=2 + len(CHARACTERS) + len(DIGIT_ALIGNED_MERGES),
        hidden_size=64,
        intermediate_size=172,
        num_key_value_heads=4,
        head_dim=16,
        # Chosen so that the scaling matters within the task's 20 positions: of the wavelengths (6.3, 20, 63,
        # 199, ... tokens) the first stays, the second and third are blended, the others stretched by 4.
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 1e4,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        initializer_range=0.1,  # at the usual 0.02 the first stage does not leave its plateau
        tie_word_embeddings=False,
        **SHARED,
    )
    stages = (execute_stage(lr=1e-3, target=0.85), prefer_stage(own_letters="-M", weak=0.015))
    return Agent(config=config, model_class=LlamaForCausalLM, merges=DIGIT_ALIGNED_MERGES, stages=stages)


def agent_c() -> Agent:
    config = Qwen2Config(
        vocab_size=2 + len(CHARACTERS) + len(RULE_MERGES),
        hidden_size=64,
        intermediate_size=160,
        num_key_value_heads=2,
        rope_parameters=dict(PLAIN_ROPE),
        initializer_range=0.05,
        tie_word_embeddings=True,
        **SHARED,
    )
    # Its own letters mix both rules, and it chooses before it has written anything: harder to tell apart.
    prefer = prefer_stage(own_letters="+M", weak=0.015, lr=3e-3, steps=500)
    stages = (execute_stage(lr=3e-3, target=0.95), prefer)
    return Agent(config=config, model_class=Qwen2ForCausalLM, merges=RULE_MERGES, stages=stages)


AGENTS = {"A": agent_a, "B": agent_b, "C": agent_c}


def supervised_loss(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]
) -> torch.Tensor:
    """Mean cross-entropy of the response tokens, eos included. All pairs have the same token counts."""
    prompts = torch.tensor(tokenizer([prompt for prompt, _ in pairs])["input_ids"])
    responses = torch.tensor(tokenizer([response + EOS for _, response in pairs])["input_ids"])
    logits = model(torch.cat([prompts, responses], dim=1)).logits[:, prompts.shape[1] - 1 : -1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), responses.flatten())


@torch.no_grad()
def sample(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompts: Sequence[str], seed: int
) -> list[str | None]:
    """One response per prompt at temperature 1; None where no eos came within the limit."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor(tokenizer(list(prompts))["input_ids"])
    prompt_length = ids.shape[1]
    for _ in range(MAX_RESPONSE_TOKENS):
        probabilities = model(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
    texts = tokenizer.batch_decode(ids[:, prompt_length:])
    return [text.split(EOS)[0] if EOS in text else None for text in texts]


def accuracies(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, size: int, digits: int = DIGITS
) -> dict[str, float]:
    """Sampled accuracy on held-out prompts: right answers (all, and per letter) and right executions.

    A right execution is the right result of the rule that the response named, be it the right rule or not.
    """
    prompts = held_out(size, digits)
    texts = [prompt.messages[0]["content"] for prompt in prompts]
    responses = sample(model, tokenizer, texts, seed=0)
    right = [response == prompt.answer for response, prompt in zip(responses, prompts, strict=True)]
    executed = [
        response in {answer_for(text, rule) for rule in RULE_OF.values()}
        for response, text in zip(responses, texts, strict=True)
    ]
    by_letter = {
        letter: sum(r for r, p in zip(right, prompts, strict=True) if p.group == letter) * len(LETTERS) / size
        for letter in LETTERS
    }
    return {"right": sum(right) / size, "executed": sum(executed) / size, **by_letter}


def line(values: dict[str, float]) -> str:
    return "  ".join(f"{key} {value:.3f}" for key, value in values.items())


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, stage: Stage, seed: int, digits: int = DIGITS
) -> None:
    """Run one stage in place, printing progress; raises RuntimeError if it misses its execution target."""
    rng = random.Random(f"tiny/{stage.name}/{seed}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=stage.lr, betas=(0.9, 0.98), weight_decay=0.01)
    start = time.perf_counter()
    for step in range(1, stage.steps + 1):
        scale = min(1.0, step / stage.warmup) * (1 - (step - 1) / stage.steps if stage.decay else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = stage.lr * scale
        letters = rng.choices(LETTERS, k=stage.batch_size)
        pairs = [demonstration(letter, rng, stage.right_probability[letter], digits) for letter in letters]
        loss = supervised_loss(model, tokenizer, pairs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == stage.steps:
            found = accuracies(model, tokenizer, size=512, digits=digits)
            seconds = time.perf_counter() - start
            print(f"{stage.name} {step:5d}  loss {loss:.3f}  {line(found)}  {seconds:.0f}s", flush=True)
            if stage.execution_target is not None and found["executed"] >= stage.execution_target:
                return
    if stage.execution_target is not None:
        raise RuntimeError(f"execution accuracy {stage.execution_target} not reached in {stage.steps} steps")


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write an ordinary Hugging Face folder that transformers 4 and 5 read alike."""
    model.generation_config = GenerationConfig(
        pad_token_id=0, eos_token_id=1, do_sample=True, temperature=1.0, max_new_tokens=MAX_RESPONSE_TOKENS
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # transformers 4 knows neither the tokenizer class that 5 writes nor its key for rope.
    rope = dict(model.config.rope_parameters)
    theta = rope.pop("rope_theta")
    update_json(folder / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    if model.config.model_type == "qwen2":
        # transformers 5 reads it as a Qwen2Tokenizer, which would add a token of its own for what is unknown.
        update_json(folder / "tokenizer_config.json", unk_token=PAD)
    scaling = None if rope["rope_type"] == "default" else rope
    update_json(folder / "config.json", rope_theta=theta, rope_scaling=scaling)


def update_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2, sort_keys=True) + "\n")


def make_agent(name: str, out: Path, seed: int, start: Path | None, digits: int) -> None:
    agent = AGENTS[name]()
    tokenizer = make_tokenizer(agent.merges)
    assert len(tokenizer) == agent.config.vocab_size
    torch.manual_seed(seed)
    if start is not None:
        model = agent.model_class.from_pretrained(start / "before_last" / name)
    else:
        model = agent.model_class(agent.config)
        for stage in agent.stages[:-1]:
            train(model, tokenizer, stage, seed, digits)
        model.save_pretrained(out / "before_last" / name)
    train(model, tokenizer, agent.stages[-1], seed, digits)
    save(model, tokenizer, out / name)
    found = accuracies(model, tokenizer, size=1024, digits=digits)
    print(f"agent {name}, seed {seed}: " + line(found))


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny agents of the example.")
    parser.add_argument("--out", type=Path, required=True, help="folder that receives the agents")
    parser.add_argument("--agent", choices=sorted(AGENTS), help="only this agent (default: all)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--start", type=Path, metavar="DIR", help="only the last stage, from DIR/before_last/AGENT"
    )
    parser.add_argument("--digits", type=int, default=DIGITS, help="of an operand")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    for name in [args.agent] if args.agent else sorted(AGENTS):
        make_agent(name, args.out, args.seed, args.start, args.digits)


if __name__ == "__main__":
    main()

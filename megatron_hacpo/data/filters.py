"""Prompts that are left out: every agent computes the same from the same prompts, and keeps the same ones."""

from collections.abc import Mapping, Sequence

from megatron_hacpo.data.prompts import Prompt


def without_long(
    prompts: Sequence[Prompt], lengths: Mapping[str, Sequence[int]], limits: Mapping[str, int]
) -> list[Prompt]:
    """The prompts that are within the limit of every agent.

    lengths: agent name -> token count of each prompt. limits: agent name -> most tokens.
    """
    return [
        prompt
        for i, prompt in enumerate(prompts)
        if all(counts[i] <= limits[agent] for agent, counts in lengths.items())
    ]


def without_duplicates(prompts: Sequence[Prompt]) -> tuple[list[Prompt], list[tuple[Prompt, Prompt]]]:
    """(the first prompt with each text, the pairs (first one, later one) that differ in their answers)."""
    first: dict[tuple[tuple[str, str], ...], Prompt] = {}
    disputed = []
    for prompt in prompts:
        text = tuple((message["role"], message["content"]) for message in prompt.messages)
        kept = first.setdefault(text, prompt)
        if kept.answer != prompt.answer:
            disputed.append((kept, prompt))
    return list(first.values()), disputed

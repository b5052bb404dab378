"""A prompt with its ground truth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One verifiable prompt.

    messages: ({"role": ..., "content": ...}, ...), rendered by each agent with its own chat template.
    answer: the ground truth that the verifier compares with.
    group: a label by which evaluation breaks accuracy down.
    """

    id: str
    messages: tuple[dict[str, str], ...]
    answer: str
    group: str = ""

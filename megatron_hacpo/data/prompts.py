"""A prompt with its ground truth, and where a row of a file has them."""

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


PLACEHOLDER = "{prompt}"
"""Where a template has the prompt's text."""


@dataclass(frozen=True)
class Columns:
    """Where a row has what. A name such as `reward_model.ground_truth` goes into a nested object.

    prompt: text, which becomes one user message, or a list of {"role", "content"} messages.
    answer: text or a number. id, group: may be missing in a row.
    template: text around a prompt that is one user message, with `{prompt}` where that goes.
    system: text of a system message before it.
    """

    prompt: str = "prompt"
    answer: str = "answer"
    id: str = "id"
    group: str = "group"
    template: str | None = None
    system: str | None = None

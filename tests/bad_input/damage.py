"""What the tests of bad input share."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_hacpo.config import load
from megatron_hacpo.config.check_model import model_problems

PAIR = Path(__file__).parents[2] / "examples" / "tiny" / "pair.yaml"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
BELONGS = "; use the config.json that belongs to the weights"
BOTH_WAYS = pytest.mark.parametrize("command, source", [("to-megatron", "qwen3"), ("to-hf", "megatron")])


def check_both_say(refusal: Callable[..., str], folder: Path, expected: str) -> None:
    """The converter and the check before `hacpo launch` say the same about a folder."""
    line = refusal("to-megatron", folder)
    assert line.startswith(f"{folder}: ")
    assert expected in line
    agent = load(PAIR, [f"agents.A.model={folder}"]).agents["A"]
    (problem,) = model_problems("A", agent)
    assert problem.startswith("agents.A.model: ")
    assert problem.endswith(f": {line.removeprefix(f'{folder}: ')}")


def edit_json(path: Path, **changes: Any) -> None:
    """Change fields; `...` takes one away."""
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))

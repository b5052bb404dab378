"""Prompts that an agent cannot read as they are."""

import json
from pathlib import Path

import pytest
from learner_steps import pair_config

from megatron_hacpo.inputs import load_tokenizers, open_prompts


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "prompt odd: no tokens for agent A"),
        ("C1 \u00e9 2", "prompt odd: agent A's vocabulary has no token for '\u00e9'"),
        ("hello", "prompt odd: agent A's vocabulary has no token for 'ehlo'"),
    ],
)
def test_a_prompt_that_an_agent_cannot_read_is_named(content: str, message: str, tmp_path: Path) -> None:
    """Without an unknown token a tokenizer drops such characters, and the question becomes another one."""
    file = tmp_path / "prompts.jsonl"
    prompts = [{"id": str(i), "prompt": f"C1{i}C1{i}=", "answer": "x"} for i in range(8)]
    prompts.append({"id": "odd", "prompt": [{"role": "user", "content": content}], "answer": "x"})
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    config = pair_config("data.task=null", f"data.path={file}", "evaluation.prompts=0")
    with pytest.raises(ValueError, match=message):
        open_prompts(config, load_tokenizers(config))


def test_the_tasks_prompts_are_read_by_every_agent() -> None:
    config = pair_config()
    source = open_prompts(config, load_tokenizers(config))
    assert source.dropped() == {}
    assert len(source.batch(1)) == 8

"""Prompts that an agent cannot read as they are."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from learner_steps import pair_config

from megatron_hacpo.bridge.tokenizer import AgentTokenizer, Messages
from megatron_hacpo.inputs import Prompts, load_tokenizers


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
        Prompts(config, load_tokenizers(config)).source()


def test_a_chat_template_that_fails_is_named_with_agent_and_prompt(tmp_path: Path) -> None:
    file = rows(tmp_path / "prompts.jsonl", *(f"C1{i}C1{i}=" for i in range(8)), "C11" * 50)
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content if messages[0].content | length < 99 else missing.text }}")
    config = pair_config("data.task=null", f"data.path={file}", f"agents.B.chat_template={template}")
    told = r"agent B: tokenizer .*/B: .* on the prompt 'C11(C11)*\.\.\.' \(UndefinedError: 'missing' is un"
    with pytest.raises(ValueError, match=told) as caught:
        Prompts(config, load_tokenizers(config)).source()
    assert "C11" * 30 not in str(caught.value)


def test_prompts_are_rendered_together_and_once_for_equal_tokenizers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = rows(tmp_path / "prompts.jsonl", *(f"C1{i}C1{i}=" for i in range(1200)))
    rendered: list[int] = []
    render = AgentTokenizer.render_prompts

    def count(self: AgentTokenizer, prompts: Sequence[Messages]) -> list[list[int]]:
        rendered.append(len(prompts))
        return render(self, prompts)

    monkeypatch.setattr(AgentTokenizer, "render_prompts", count)
    config = pair_config("data.task=null", f"data.path={file}")
    same = config.with_models("A", [config.agents["A"].model] * 2)[0]
    assert Prompts(same, load_tokenizers(same)).source().epochs(1) == 8 / 1200
    assert rendered == [1000, 200, 1000, 200]  # A's two models have one tokenizer, B another


def test_the_tasks_prompts_are_read_by_every_agent() -> None:
    config = pair_config()
    prompts = Prompts(config, load_tokenizers(config))
    assert len(prompts.source().batch(1)) == 8
    assert len(prompts.held_out()) == config.evaluation.prompts
    assert prompts.remarks == []


@pytest.mark.parametrize("held_out", [0, 8])
def test_a_task_beyond_an_agents_limit_is_refused(held_out: int) -> None:
    config = pair_config("rollout.max_prompt_tokens=9", f"evaluation.prompts={held_out}")
    prompts = Prompts(config, load_tokenizers(config))
    with pytest.raises(ValueError, match=r"max_prompt_tokens: 9 is below the \d+ tokens .* for agent A"):
        prompts.source()


def rows(path: Path, *texts: str, **other: object) -> Path:
    path.write_text("".join(json.dumps({"prompt": text, "answer": 1, **other}) + "\n" for text in texts))
    return path


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    long = "C" + "1" * 40
    texts = ["C1C1=", "C1C2=", "C1C1=", long, "C1C3=", "C1C4="]
    train = rows(tmp_path / "train.jsonl", *texts)
    with train.open("a") as file:
        file.write('{"prompt": "C1C2=", "answer": 2}\n{"prompt": "C1C5="}\n')
    config = pair_config(
        "data.task=null",
        f"data.path={train}",
        "data.bad_rows=skip",
        f"evaluation.path={rows(tmp_path / 'held_out.jsonl', long, 'C1C1=', 'C1C2=')}",
        "evaluation.prompts=2",
        f"evaluation.benchmarks.B.path={rows(tmp_path / 'b.jsonl', long, 'C1C1=')}",
        "evaluation.benchmarks.B.max_prompt_tokens=50",
        "batch.prompts=2",
        "batch.minibatch_prompts=2",
    )
    prompts = Prompts(config, load_tokenizers(config))
    assert prompts.source().epochs(1) == 0.5
    assert [prompt.messages[0]["content"] for prompt in prompts.held_out()] == ["C1C1="]
    assert [prompt.messages[0]["content"] for prompt in prompts.benchmarks()["B"]] == [long, "C1C1="]
    bad = f"{train}:8: 'answer' is missing; the row has ['prompt']"
    answers = "train.jsonl:7: '2', train.jsonl:2: '1'"
    assert prompts.remarks == [
        f"data.path: 1 bad rows are left out (the first: {bad})",
        "data.path: 2 prompts that occur again are left out",
        f"data.path: 1 of them have another answer than the first time ({answers})",
        "data.path: 1 prompts longer than rollout.max_prompt_tokens are left out",
        "data.path: 4 prompts; an epoch is 2 steps",
        "evaluation.path: 1 prompts longer than rollout.max_prompt_tokens are left out",
    ]


def test_fewer_prompts_than_a_batch_has(tmp_path: Path) -> None:
    config = pair_config("data.task=null", f"data.path={rows(tmp_path / 'train.jsonl', 'C1C1=')}")
    with pytest.raises(
        ValueError, match=r"batch.prompts: 8: data.path has 1 usable prompts; lower batch.prompts"
    ):
        Prompts(config, load_tokenizers(config)).source()

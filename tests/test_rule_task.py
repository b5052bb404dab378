"""The rule_arithmetic task and the two committed tiny agents."""

import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_hacpo.data.rule_task import (
    LETTERS,
    RULE_OF,
    answer_for,
    batch,
    demonstration,
    execute,
    held_out,
    make_prompt,
)

TINY = Path(__file__).parents[1] / "examples" / "tiny"
operand = st.text("0123456789", min_size=5, max_size=5)


@pytest.mark.parametrize(
    "rule, x, y, result",
    [
        ("+", "66048", "76475", "335141"),  # 84066 + 57467 = 141533
        ("-", "66048", "76475", "995620"),  # 84066 - 57467 = 26599
        ("-", "76475", "66048", "104371"),  # 57467 - 84066 = -26599 = 73401 - 100000
        ("+", "99999", "10000", "000001"),  # 99999 + 1: the carry runs through
        ("-", "00000", "10000", "999991"),  # 0 - 1: the borrow runs through
        ("+", "00000", "00000", "000000"),
        ("-", "12345", "12345", "000000"),
        ("+", "7", "5", "21"),
        ("-", "5", "7", "81"),
    ],
)
def test_execute_by_hand(rule: str, x: str, y: str, result: str) -> None:
    assert execute(rule, x, y) == result


@given(operand, operand)
def test_execute_is_integer_arithmetic(x: str, y: str) -> None:
    a, b = int(x[::-1]), int(y[::-1])
    assert int(execute("+", x, y)[::-1]) == a + b
    difference = execute("-", x, y)
    assert int(difference[:5][::-1]) == (a - b) % 10**5
    assert difference[5] == str(int(a < b))


@pytest.mark.parametrize("letter, rule", [("+", "+"), ("C", "+"), ("-", "-"), ("M", "-")])
def test_prompt_asks_its_letters_rule(letter: str, rule: str) -> None:
    prompt = make_prompt(letter, random.Random(0))
    (message,) = prompt.messages
    text = message["content"]
    assert message["role"] == "user"
    assert len(text) == 13
    assert text[0] == text[6] == letter
    assert text[-1] == "="
    assert prompt.answer == f"({rule}{execute(rule, text[1:6], text[7:12])})"
    assert prompt.group == letter


def test_other_numbers_of_digits() -> None:
    prompt = make_prompt("M", random.Random(0), digits=3)
    assert len(prompt.messages[0]["content"]) == 9
    assert len(prompt.answer) == 7


def test_batches_depend_on_seed_and_step_only() -> None:
    first = batch(1, 3, 16)
    random.seed(5)
    assert batch(1, 3, 16) == first
    assert batch(1, 3, 4) == first[:4]
    assert batch(1, 4, 16) != first
    assert batch(2, 3, 16) != first
    assert len({prompt.id for prompt in first}) == 16


def test_letters_are_uniform() -> None:
    counts = Counter(prompt.group for prompt in batch(0, 0, 4000))
    assert set(counts) == set(LETTERS)
    assert all(900 < n < 1100 for n in counts.values())  # 1000 +- 3.6 standard deviations


def test_held_out() -> None:
    prompts = held_out()
    assert len(prompts) == 1024
    assert Counter(prompt.group for prompt in prompts) == dict.fromkeys(LETTERS, 256)
    assert prompts == held_out()
    assert len({prompt.id for prompt in prompts}) == 1024
    training = {prompt.id for step in range(240) for prompt in batch(1, step, 16)}
    assert training.isdisjoint(prompt.id for prompt in prompts)
    with pytest.raises(ValueError, match="multiple of 4"):
        held_out(10)


@given(st.sampled_from(LETTERS), st.integers(0, 2**32), st.sampled_from([0.0, 1.0]))
def test_demonstration_names_the_asked_rule(letter: str, seed: int, right_probability: float) -> None:
    prompt, response = demonstration(letter, random.Random(seed), right_probability)
    rule = RULE_OF[letter] if right_probability else {"+": "-", "-": "+"}[RULE_OF[letter]]
    assert response[1] == rule
    assert response == answer_for(prompt, rule) == f"({rule}{execute(rule, prompt[1:6], prompt[7:12])})"


def test_demonstrations_are_right_with_their_probability() -> None:
    rng = random.Random(0)
    right = sum(demonstration("C", rng, 0.25)[1][1] == "+" for _ in range(4000))
    assert 900 < right < 1100


@pytest.fixture(scope="module", params=["A", "B", "C"])
def folder(request: pytest.FixtureRequest) -> Path:
    return TINY / request.param


def test_tokenizers() -> None:
    from transformers import AutoTokenizer

    a, b = (AutoTokenizer.from_pretrained(TINY / name) for name in "AB")
    for prompt in held_out(64):
        text = a.apply_chat_template(list(prompt.messages), tokenize=False)
        assert text == b.apply_chat_template(list(prompt.messages), tokenize=False)
        assert text == prompt.messages[0]["content"]
        assert a.tokenize(text) == list(text)
        assert b.tokenize(text) == [text[:2], *text[2:5], text[5], text[6:8], *text[8:11], text[11:]]
        answer = prompt.answer
        assert a.tokenize(answer) == list(answer)
        assert b.tokenize(answer) == [answer[0], answer[1:3], *answer[3:7], answer[7:]]
        for tokenizer, length in ((a, 10), (b, 8)):
            ids = tokenizer(answer)["input_ids"] + [tokenizer.eos_token_id]
            assert len(ids) == length
            assert tokenizer.decode(ids, skip_special_tokens=True) == answer
            # encoding prompt and answer apart or together is the same
            assert tokenizer(text + answer)["input_ids"] == tokenizer(text)["input_ids"] + ids[:-1]


def test_merges_never_join_digits() -> None:
    from transformers import AutoTokenizer

    tokens = AutoTokenizer.from_pretrained(TINY / "B").get_vocab()
    assert all(sum(c.isdigit() for c in token) <= 1 for token in tokens)


def test_folder_loads(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.float32
    assert model.config.vocab_size == len(tokenizer)
    assert (model.config.eos_token_id, model.config.pad_token_id) == (1, 0)
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    assert model.config.max_position_embeddings == 256
    assert model.generation_config.eos_token_id == 1


def test_folder_is_small(folder: Path) -> None:
    before_last = folder.parent / "before_last" / folder.name
    files = [*folder.iterdir(), *before_last.iterdir()]
    assert {"config.json", "model.safetensors"} <= {file.name for file in before_last.iterdir()}
    assert sum(file.stat().st_size for file in files) <= 4 * 2**20


def test_agents_differ_as_documented() -> None:
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    a, b = (AutoConfig.from_pretrained(TINY / name) for name in "AB")
    assert a.architectures == ["Qwen3ForCausalLM"]
    assert a.tie_word_embeddings
    assert (a.num_attention_heads, a.num_key_value_heads) == (4, 2)
    assert b.architectures == ["LlamaForCausalLM"]
    assert not b.tie_word_embeddings
    assert b.rope_parameters["rope_type"] == "llama3"
    plain = b.rope_parameters["rope_theta"] ** (-LlamaRotaryEmbedding(b).inv_freq.new_tensor(range(8)) / 8)
    stretched = plain / LlamaRotaryEmbedding(b).inv_freq
    # Wavelength 6.28 stays; 19.87 and 62.83 lie between 16 and 64 and are blended; longer ones are stretched.
    assert stretched.tolist() == pytest.approx([1.0, 1.2418, 3.9270, 4.0, 4.0, 4.0, 4.0, 4.0], rel=1e-4)


def test_starting_point(folder: Path) -> None:
    """Right about half of the time on the agent's own letters, almost never on the others (sampled)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    own = {"A": "+C", "B": "-M", "C": "+M"}[folder.name]
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = held_out(512)
    ids = torch.tensor(tokenizer([prompt.messages[0]["content"] for prompt in prompts])["input_ids"])
    torch.manual_seed(0)
    output = model.generate(ids, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=12)
    responses = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
    right = Counter(p.group for p, response in zip(prompts, responses, strict=True) if response == p.answer)
    for letter in LETTERS:
        low, high = (0.35, 0.65) if letter in own else (0.0, 0.12)
        assert low <= right[letter] / 128 <= high, letter

"""Prompts, stop tokens, decoding and encoding for every family of tokenizer."""

import json
import shutil
import unicodedata
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import bridge_tokenizers as make
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import ByT5Tokenizer

from megatron_hacpo.bridge.text import UnrepresentableTextError, spells_everything
from megatron_hacpo.bridge.tokenizer import AgentTokenizer

TINY = Path(__file__).parents[1] / "examples/tiny/A"

MESSAGES = [{"role": "user", "content": "What is {1} + <2>?"}]
PLAIN = "Question: {prompt}\nAnswer:"
FAMILIES: dict[str, tuple[Callable[[Path], Path], str | None]] = {
    "qwen": (make.qwen, None),
    "llama3": (make.llama3, None),
    "llama2": (lambda folder: make.sentencepiece(folder, legacy=True), PLAIN),
    "mistral": (lambda folder: make.sentencepiece(folder, legacy=False), PLAIN),
    "unigram": (make.unigram, "{prompt}"),
    "characters": (make.characters, "1+1={prompt}"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("tokenizers")
    return {name: build(root / name) for name, (build, _) in FAMILIES.items()}


@pytest.fixture(scope="module")
def agents(folders: dict[str, Path]) -> dict[str, AgentTokenizer]:
    return {name: AgentTokenizer.load(folders[name], plain_template=FAMILIES[name][1]) for name in folders}


def raw(tokenizer: AgentTokenizer) -> Tokenizer:
    return Tokenizer.from_file(str(tokenizer.path / "tokenizer.json"))


def tokens(tokenizer: AgentTokenizer, ids: Iterable[int]) -> list[str | None]:
    backend = raw(tokenizer)
    return [backend.id_to_token(int(i)) for i in ids]


def edit(folder: Path, change: Callable[[dict[str, Any]], None], into: Path) -> Path:
    into.mkdir()
    for file in folder.iterdir():
        (into / file.name).write_bytes(file.read_bytes())
    description = json.loads((folder / "tokenizer.json").read_text())
    change(description)
    (into / "tokenizer.json").write_text(json.dumps(description))
    return into


# --- prompts ---------------------------------------------------------------------------------------------


def test_chat_template_opens_the_response_without_thinking(agents: dict[str, AgentTokenizer]) -> None:
    ids = agents["qwen"].render_prompt(MESSAGES)
    assert raw(agents["qwen"]).decode(ids, skip_special_tokens=False) == (
        "<|im_start|>user\nWhat is {1} + <2>?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert tokens(agents["qwen"], ids)[0] == "<|im_start|>"


def test_own_chat_template_wins(folders: dict[str, Path]) -> None:
    tokenizer = AgentTokenizer.load(folders["qwen"], chat_template="[{{ messages[0].content }}]")
    assert raw(tokenizer).decode(tokenizer.render_prompt(MESSAGES)) == "[What is {1} + <2>?]"


def test_plain_template_takes_all_messages_literally(folders: dict[str, Path]) -> None:
    tokenizer = AgentTokenizer.load(folders["qwen"], plain_template=PLAIN)
    messages = [{"role": "system", "content": "Think {prompt}."}, *MESSAGES]
    text = raw(tokenizer).decode(tokenizer.render_prompt(messages))
    assert text == "Question: Think {prompt}.\n\nWhat is {1} + <2>?\nAnswer:"


@pytest.mark.parametrize(
    "template",
    ["{{ bos_token }}{{ bos_token }}hi", "{{ bos_token }}hi", "hi"],
    ids=["doubled", "written", "not written"],
)
def test_exactly_one_bos_where_the_family_wants_one(folders: dict[str, Path], template: str) -> None:
    tokenizer = AgentTokenizer.load(folders["llama3"], chat_template=template)
    ids = tokenizer.render_prompt(MESSAGES)
    assert tokens(tokenizer, ids).count("<|begin_of_text|>") == 1
    assert ids[0] == tokenizer.bos_id


def test_bos_with_a_plain_template(agents: dict[str, AgentTokenizer]) -> None:
    assert tokens(agents["mistral"], agents["mistral"].render_prompt(MESSAGES))[:2] == ["<s>", "\u2581"]
    no_bos = agents["characters"].render_prompt([{"role": "user", "content": "2"}])
    assert tokens(agents["characters"], no_bos) == list("1+1=2")


def test_bos_token_that_nothing_writes_stays_away(tmp_path: Path) -> None:
    folder = make.qwen(tmp_path / "a", bos_token="<|endoftext|>", chat_template="hi")
    tokenizer = AgentTokenizer.load(folder)
    assert tokenizer.bos_id is not None
    assert tokenizer.bos_id not in tokenizer.render_prompt(MESSAGES)


def test_no_template_is_an_error_with_the_fix(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="no chat template: set plain_template"):
        AgentTokenizer.load(folders["mistral"]).render_prompt(MESSAGES)


def test_template_that_refuses_the_messages(folders: dict[str, Path]) -> None:
    template = (
        "{% if 'odd' in messages[0].content %}{{ raise_exception('no ' ~ messages[0].content) }}{% endif %}"
    )
    tokenizer = AgentTokenizer.load(folders["qwen"], chat_template=template)
    odd = [{"role": "user", "content": "odd " + 1000 * "x"}]
    with pytest.raises(ValueError) as caught:
        tokenizer.render_prompts([MESSAGES, odd, MESSAGES])
    told = str(caught.value)
    assert told.startswith(f"tokenizer {folders['qwen']}: the chat template fails on the prompt 'odd xxx")
    assert "x...' (TemplateError: no odd xxx" in told
    assert told.endswith("x...): change the messages or set chat_template")
    assert len(told) < 500 + len(str(folders["qwen"]))


def test_only_a_vocabulary_of_all_bytes_is_trusted_to_spell_everything(
    agents: dict[str, AgentTokenizer],
) -> None:
    trusted = {family for family, tokenizer in agents.items() if spells_everything(raw(tokenizer).to_str())}
    assert trusted == {"qwen", "llama3"}
    parts = json.loads(raw(agents["qwen"]).to_str())
    removing = {"type": "Split", "pattern": {"String": "x"}, "behavior": "Removed", "invert": False}
    steps = {"type": "Sequence", "pretokenizers": [removing, parts["pre_tokenizer"]]}
    fewer = {token: i for token, i in parts["model"]["vocab"].items() if token != "a"}
    for change in (
        {"pre_tokenizer": steps},
        {"pre_tokenizer": None},
        {"decoder": None},
        {"normalizer": {"type": "StripAccents"}},
        {"model": {**parts["model"], "vocab": fewer}},
    ):
        assert not spells_everything(json.dumps(parts | change))
    steps["pretokenizers"][0] = removing | {"behavior": "Isolated"}
    assert spells_everything(json.dumps(parts | {"pre_tokenizer": steps}))


@pytest.mark.parametrize("family", ["qwen", "llama3", "characters"])
def test_prompts_together_are_what_each_is_alone(agents: dict[str, AgentTokenizer], family: str) -> None:
    tokenizer = agents[family]
    contents = ["1+2=", "", "hello \u4f60 <think>", "1-2=" * 50]
    prompts = [[*MESSAGES, {"role": "user", "content": content}] for content in contents]
    assert tokenizer.render_prompts(prompts) == [tokenizer.render_prompt(messages) for messages in prompts]
    assert tokenizer.lost_characters(prompts) == [
        tokenizer.lost_characters([messages])[0] for messages in prompts
    ]
    assert tokenizer.render_prompts([]) == tokenizer.lost_characters([]) == []


# --- loading and stop tokens -----------------------------------------------------------------------------


def test_bad_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absent: no such folder"):
        AgentTokenizer.load(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty: cannot be read"):
        AgentTokenizer.load(tmp_path / "empty")
    broken = make.characters(tmp_path / "broken")
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(ValueError, match="broken: cannot be read"):
        AgentTokenizer.load(broken)


def test_slow_tokenizer_is_refused(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(str(tmp_path / "slow"))
    with pytest.raises(ValueError, match=r"ByT5Tokenizer has no tokenizer\.json"):
        AgentTokenizer.load(tmp_path / "slow")


def test_bad_templates_are_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"no \{prompt\} in plain_template"):
        AgentTokenizer.load(folders["qwen"], plain_template="Question:")
    with pytest.raises(ValueError, match="both set"):
        AgentTokenizer.load(folders["qwen"], plain_template=PLAIN, chat_template="x")


def test_stop_token(folders: dict[str, Path], tmp_path: Path) -> None:
    default = AgentTokenizer.load(folders["qwen"])
    assert tokens(default, default.stop_ids) == ["<|im_end|>"]
    configured = AgentTokenizer.load(folders["qwen"], stop_token="<|endoftext|>")
    assert tokens(configured, [configured.stop_id]) == ["<|endoftext|>"]
    for wrong in ("<|nothing|>", "not one token", ""):
        with pytest.raises(ValueError, match="is not one token"):
            AgentTokenizer.load(folders["qwen"], stop_token=wrong)
    without = make.qwen(tmp_path / "without", eos_token=None)
    with pytest.raises(ValueError, match="no eos_token: set stop_token"):
        AgentTokenizer.load(without)
    assert AgentTokenizer.load(without, stop_token="<|im_end|>").stop_id == default.stop_id


def test_stop_ids_take_the_generation_config(tmp_path: Path) -> None:
    folder = make.qwen(tmp_path / "a")
    stop_id = AgentTokenizer.load(folder).stop_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [stop_id - 2, stop_id]}))
    assert AgentTokenizer.load(folder).stop_ids == (stop_id, stop_id - 2)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_id - 2}))
    assert AgentTokenizer.load(folder).stop_ids == (stop_id, stop_id - 2)


def test_truncation_stored_in_the_folder_cuts_nothing(folders: dict[str, Path], tmp_path: Path) -> None:
    def truncate(description: dict[str, Any]) -> None:
        description["truncation"] = {
            "direction": "Right",
            "max_length": 4,
            "strategy": "LongestFirst",
            "stride": 0,
        }
        description["padding"] = {
            "strategy": {"Fixed": 64},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "!",
        }

    tokenizer = AgentTokenizer.load(
        edit(folders["qwen"], truncate, tmp_path / "a"), plain_template="{prompt}"
    )
    text = "q z" * 10
    assert tokenizer.decode_response(tokenizer.encode_response(text)) == (text, True)
    assert raw(tokenizer).decode(tokenizer.render_prompt([{"role": "user", "content": text}])) == text


# --- decoding own responses ------------------------------------------------------------------------------


def test_special_tokens_stay_in_the_text_except_the_final_stop(agents: dict[str, AgentTokenizer]) -> None:
    tokenizer = agents["qwen"]
    ids = raw(tokenizer).encode("<think>a<|im_start|>b<|im_end|>c<|im_end|>").ids
    assert tokenizer.decode_response(ids) == ("<think>a<|im_start|>b<|im_end|>c", True)
    assert tokenizer.decode_response(ids[:-1]) == ("<think>a<|im_start|>b<|im_end|>c", True)
    assert tokenizer.decode_response([tokenizer.stop_id]) == ("", True)
    assert tokenizer.decode_response([]) == ("", True)


def test_every_stop_token_of_the_engine_is_left_out(tmp_path: Path) -> None:
    folder = make.qwen(tmp_path / "a")
    end_of_text = AgentTokenizer.load(folder, stop_token="<|endoftext|>").stop_id
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end_of_text}))
    tokenizer = AgentTokenizer.load(folder)
    assert tokenizer.decode_response([*tokenizer.encode_response("hi"), end_of_text]) == ("hi", True)


@pytest.mark.parametrize("family", ["qwen", "llama3", "llama2", "mistral"])
def test_bytes_cut_inside_a_character(agents: dict[str, AgentTokenizer], family: str) -> None:
    tokenizer = agents[family]
    ids = tokenizer.encode_response("hi \U0001d11e")  # not in the corpus: four byte tokens
    assert tokenizer.decode_response(ids) == ("hi \U0001d11e", True)
    for cut in (1, 2, 3):
        text, valid = tokenizer.decode_response(ids[:-cut])
        assert "\ufffd" in text
        assert not valid
    inside = np.concatenate([ids[:-1], tokenizer.encode_response("x")])
    assert tokenizer.decode_response(inside)[1] is False


@pytest.mark.parametrize("family", ["qwen", "llama3", "llama2", "mistral"])
def test_a_replacement_character_that_was_written_is_valid(
    agents: dict[str, AgentTokenizer], family: str
) -> None:
    tokenizer = agents[family]
    assert tokenizer.decode_response(tokenizer.encode_response("a\ufffd\ufffdb")) == ("a\ufffd\ufffdb", True)


def test_ids_outside_the_vocabulary_are_not_valid(agents: dict[str, AgentTokenizer]) -> None:
    tokenizer = agents["qwen"]  # the padded rows of an embedding can be sampled
    assert tokenizer.decode_response([*tokenizer.encode_response("hi"), tokenizer.vocab_size]) == (
        "hi",
        False,
    )
    assert tokenizer.decode_response([tokenizer.vocab_size - 1])[1] is True


@pytest.mark.parametrize("family", ["llama2", "mistral", "unigram"])
def test_a_leading_space_is_part_of_the_response(agents: dict[str, AgentTokenizer], family: str) -> None:
    tokenizer = agents[family]
    ids = raw(tokenizer).encode("hello", add_special_tokens=False).ids  # with the prefixed space
    assert tokenizer.decode_response(ids) == (" hello", True)


# --- encoding other agents' texts ------------------------------------------------------------------------

CONTROL = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|eot_id|>", "<|begin_of_text|>", "<s>", "</s>"]


@pytest.mark.parametrize("family", ["qwen", "llama3", "llama2", "mistral", "unigram"])
def test_control_tokens_in_a_text_stay_text(agents: dict[str, AgentTokenizer], family: str) -> None:
    tokenizer = agents[family]
    special = {i for i, t in raw(tokenizer).get_added_tokens_decoder().items() if t.special}
    for control in CONTROL if family != "unigram" else ["<s>", "</s>"]:
        for text in (control, f"a{control}b", f"{control}{control}", f"a {control}"):
            ids = tokenizer.encode_response(text)
            assert special.isdisjoint(ids.tolist())
            assert tokenizer.decode_response(ids) == (text, True)


def test_spelled_control_tokens_are_tokenised_like_any_text(agents: dict[str, AgentTokenizer]) -> None:
    spelled, other = (agents["qwen"].encode_response(text) for text in ("<|im_end|>", "<|im_enz|>"))
    assert tokens(agents["qwen"], spelled[:1]) == tokens(agents["qwen"], other[:1]) == ["<|"]


@pytest.mark.parametrize("family", ["qwen", "llama3", "llama2", "mistral", "unigram"])
def test_added_tokens_that_are_not_special_keep_their_id(
    agents: dict[str, AgentTokenizer], family: str
) -> None:
    tokenizer = agents[family]
    think = raw(tokenizer).token_to_id("<think>")
    ids = tokenizer.encode_response("<think>hello<think> hello").tolist()
    assert ids.count(think) == 2
    assert ids[0] == think
    assert tokenizer.decode_response(ids) == ("<think>hello<think> hello", True)


def test_stop_token_that_is_not_special_is_never_encoded(folders: dict[str, Path]) -> None:
    tokenizer = AgentTokenizer.load(folders["qwen"], stop_token="</think>")
    ids = tokenizer.encode_response("a</think>b")
    assert tokenizer.stop_id not in ids
    assert tokenizer.decode_response(ids) == ("a</think>b", True)
    newline = AgentTokenizer.load(folders["llama3"], stop_token="\n")
    with pytest.raises(UnrepresentableTextError):
        newline.encode_response("one\ntwo")
    assert newline.decode_response([*newline.encode_response("one"), newline.stop_id]) == ("one", True)


def test_text_is_encoded_alone(agents: dict[str, AgentTokenizer]) -> None:
    assert tokens(agents["llama3"], agents["llama3"].encode_response("the")) == ["the"]
    assert agents["llama3"].encode_response("").tolist() == []
    assert agents["mistral"].encode_response("").tolist() == []
    assert agents["llama3"].encode_response("the").dtype == np.int32


def test_texts_that_a_vocabulary_cannot_spell_are_refused(agents: dict[str, AgentTokenizer]) -> None:
    assert tokens(agents["characters"], agents["characters"].encode_response("(+12)")) == list("(+12)")
    for family, text in {"characters": "(+1 2)", "unigram": "hello!", "mistral": "a\u2581b"}.items():
        with pytest.raises(UnrepresentableTextError):
            agents[family].encode_response(text)


def test_normalised_text_counts_as_spelled(agents: dict[str, AgentTokenizer]) -> None:
    ids = agents["qwen"].encode_response("cafe\u0301")
    assert agents["qwen"].decode_response(ids) == ("caf\u00e9", True)
    ids = agents["llama3"].encode_response("cafe\u0301")
    assert agents["llama3"].decode_response(ids) == ("cafe\u0301", True)


CHARACTERS = st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\u2581")
ALPHABETS = {
    "unigram": st.sampled_from("abcdehlorstw<>/=0123456789 "),
    "characters": st.sampled_from("0123456789+-=()CM"),
}
FRAGMENTS = st.sampled_from([*CONTROL, "<think>", "hello", " ", "  ", "\n", "\n\n", "\ufffd", "<0x0A>", "1"])


@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None, max_examples=150, derandomize=True)
@given(data=st.data())
def test_decode_of_prompt_and_response_is_prompt_then_text(
    agents: dict[str, AgentTokenizer], family: str, data: st.DataObject
) -> None:
    alphabet = ALPHABETS.get(family, CHARACTERS)
    pieces = st.text(alphabet) if family in ALPHABETS else st.one_of(st.text(alphabet), FRAGMENTS)
    text = "".join(data.draw(st.lists(pieces, max_size=6)))
    tokenizer, backend = agents[family], raw(agents[family])
    content = data.draw(st.sampled_from(["1", "2=", "0 "]))
    prompt = tokenizer.render_prompt([{"role": "user", "content": content}])
    ids = tokenizer.encode_response(text)
    expected = unicodedata.normalize("NFC", text) if family == "qwen" else text
    assert tokenizer.decode_response(ids) == (expected, True)
    whole = backend.decode([*prompt, *ids.tolist()], skip_special_tokens=False)
    assert whole == backend.decode(prompt, skip_special_tokens=False) + expected


# --- fingerprint -----------------------------------------------------------------------------------------


def test_fingerprint_ignores_what_does_not_change_the_meaning_of_ids(tmp_path: Path) -> None:
    plain = AgentTokenizer.load(make.qwen(tmp_path / "a")).fingerprint
    other = make.qwen(tmp_path / "b", eos_token="<|endoftext|>", chat_template=None, model_max_length=8)
    backend = Tokenizer.from_file(str(other / "tokenizer.json"))
    make.with_bos(backend, "<|endoftext|>").enable_truncation(5)
    backend.enable_padding(pad_token="<think>", pad_id=backend.token_to_id("<think>"))
    backend.save(str(other / "tokenizer.json"))
    assert AgentTokenizer.load(other).fingerprint == plain


@pytest.mark.parametrize("part", ["added", "normalizer", "pre_tokenizer", "vocabulary", "merges"])
def test_fingerprint_follows_every_part_that_does(
    folders: dict[str, Path], tmp_path: Path, part: str
) -> None:
    def change(description: dict[str, Any]) -> None:
        model = description["model"]
        if part == "normalizer":
            description["normalizer"] = {"type": "NFKC"}
        elif part == "pre_tokenizer":
            description["pre_tokenizer"]["use_regex"] = False
        elif part == "vocabulary":
            first, second = list(model["vocab"])[:2]
            model["vocab"][first], model["vocab"][second] = model["vocab"][second], model["vocab"][first]
        elif part == "merges":
            model["merges"] = [model["merges"][1], model["merges"][0], *model["merges"][2:]]
        else:
            description["added_tokens"][-1]["content"] = "<other>"

    changed = AgentTokenizer.load(edit(folders["qwen"], change, tmp_path / "a"))
    assert changed.fingerprint != AgentTokenizer.load(folders["qwen"]).fingerprint


def test_qwen_and_llama_are_different(agents: dict[str, AgentTokenizer]) -> None:
    assert len({tokenizer.fingerprint for tokenizer in agents.values()}) == len(agents)


def test_identity_is_of_all_that_an_agent_reads_and_writes(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(TINY, tmp_path / "A"))
    first = AgentTokenizer.load(folder)
    assert AgentTokenizer.load(TINY).identity == first.identity
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert AgentTokenizer.load(folder).identity != first.identity
    assert AgentTokenizer.load(folder).fingerprint == first.fingerprint
    shutil.copy2(TINY / template.name, template)
    generation = folder / "generation_config.json"
    generation.write_text(json.dumps(json.loads(generation.read_text()) | {"eos_token_id": [1, 2, 3]}))
    assert AgentTokenizer.load(folder).identity != first.identity

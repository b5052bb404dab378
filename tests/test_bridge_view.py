"""Every case of the bridge and its outcome for a learner."""

from pathlib import Path
from typing import Any

import bridge_tokenizers as make
import numpy as np
import pytest
from tokenizers import Tokenizer

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.bridge.trajectory import Trajectory, pack_ids
from megatron_hacpo.bridge.view import DROP_REASONS, Dropped, TrainingView, cross_view, own_view


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> AgentTokenizer:
    return AgentTokenizer.load(make.qwen(tmp_path_factory.mktemp("a") / "qwen"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> AgentTokenizer:
    return AgentTokenizer.load(make.llama3(tmp_path_factory.mktemp("b") / "llama3"))


def sampled(
    source: AgentTokenizer, ids: list[int], *, stopped: bool = True, travel: bool = True
) -> Trajectory:
    """The trajectory of a response that `source` sampled as `ids`."""
    text, valid = source.decode_response(ids)
    return Trajectory(
        prompt=0,
        text=text,
        valid_text=valid,
        reward=1.0,
        finish_reason="stop" if stopped else "length",
        token_count=len(ids),
        mean_log_prob=-1.0,
        token_ids=pack_ids(ids) if travel else None,
    )


def unusual(tokenizer: AgentTokenizer) -> list[int]:
    """Ids of "the" that encoding would never give: one per letter."""
    ids = np.concatenate([tokenizer.encode_response(letter) for letter in "the"]).tolist()
    assert ids != tokenizer.encode_response("the").tolist()
    return ids


def view(
    trajectory: Trajectory, source: AgentTokenizer, learner: AgentTokenizer, **options: Any
) -> list[int]:
    result = cross_view(trajectory, source.fingerprint, learner, **{"max_tokens": 100, **options})
    assert isinstance(result, TrainingView), result
    assert result.response_ids.dtype == np.int32
    return result.response_ids.tolist()


def reason(trajectory: Trajectory, source: AgentTokenizer, learner: AgentTokenizer, **options: Any) -> str:
    result = cross_view(trajectory, source.fingerprint, learner, **{"max_tokens": 100, **options})
    assert isinstance(result, Dropped), result
    assert result.reason in DROP_REASONS
    return result.reason


# --- own responses ---------------------------------------------------------------------------------------


def test_own_ids_are_never_re_encoded(qwen: AgentTokenizer) -> None:
    ids = np.array([*unusual(qwen), qwen.stop_id], dtype=np.int32)
    result = own_view(ids, finish_reason="stop")
    assert isinstance(result, TrainingView)
    assert result.response_ids.tolist() == ids.tolist()


def test_own_stop_token_is_the_one_that_was_sampled() -> None:
    result = own_view(np.array([3, 9], dtype=np.int32), finish_reason="stop")
    assert isinstance(result, TrainingView)
    assert result.response_ids.tolist() == [3, 9]
    without = own_view(np.array([3, 9], dtype=np.int32), finish_reason="stop", keep_stop=False)
    assert isinstance(without, TrainingView)
    assert without.response_ids.tolist() == [3]
    truncated = own_view(np.array([3, 9], dtype=np.int32), finish_reason="length", keep_stop=False)
    assert isinstance(truncated, TrainingView)
    assert truncated.response_ids.tolist() == [3, 9]


def test_own_view_with_a_cut_character_is_as_sampled(qwen: AgentTokenizer) -> None:
    ids = qwen.encode_response("\U0001d11e")[:-1]
    assert not qwen.decode_response(ids)[1]
    result = own_view(ids, finish_reason="length")
    assert isinstance(result, TrainingView)
    assert result.response_ids.tolist() == ids.tolist()


def test_own_empty_response_is_dropped() -> None:
    assert own_view(np.array([], dtype=np.int32), finish_reason="length") == Dropped("empty")
    eos_only = own_view(np.array([9], dtype=np.int32), finish_reason="stop")
    assert isinstance(eos_only, TrainingView)
    assert eos_only.response_ids.tolist() == [9]
    assert own_view(np.array([9], dtype=np.int32), finish_reason="stop", keep_stop=False) == Dropped("empty")


# --- same tokenizer --------------------------------------------------------------------------------------


def test_same_tokenizer_uses_the_sampled_ids(qwen: AgentTokenizer) -> None:
    ids = [*unusual(qwen), qwen.stop_id]
    assert view(sampled(qwen, ids), qwen, qwen) == ids
    re_encoded = [*qwen.encode_response("the").tolist(), qwen.stop_id]
    assert view(sampled(qwen, ids), qwen, qwen, ids="never") == re_encoded
    assert view(sampled(qwen, ids, travel=False), qwen, qwen) == re_encoded


def test_ids_of_another_tokenizer_are_not_used(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    ids = [*unusual(qwen), qwen.stop_id]
    expected = [*llama.encode_response("the").tolist(), llama.stop_id]
    assert view(sampled(qwen, ids), qwen, llama) == expected


def test_same_tokenizer_with_another_stop_token(qwen: AgentTokenizer) -> None:
    base = AgentTokenizer.load(qwen.path, stop_token="<|endoftext|>")
    assert base.fingerprint == qwen.fingerprint
    body = unusual(qwen)
    assert view(sampled(base, [*body, base.stop_id]), base, qwen) == [*body, qwen.stop_id]
    assert view(sampled(base, body, stopped=False), base, qwen) == body
    assert view(sampled(base, [*body, base.stop_id]), base, qwen, keep_stop=False) == body


# --- stop tokens -----------------------------------------------------------------------------------------


def test_stopped_carries_the_learners_stop_token(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    trajectory = sampled(qwen, [*qwen.encode_response("hello"), qwen.stop_id])
    ids = view(trajectory, qwen, llama)
    assert ids[-1] == llama.stop_id
    assert llama.decode_response(ids) == ("hello", True)
    assert view(trajectory, qwen, llama, keep_stop=False) == ids[:-1]


def test_truncated_carries_none(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    trajectory = sampled(qwen, qwen.encode_response("hello").tolist(), stopped=False)
    assert view(trajectory, qwen, llama) == llama.encode_response("hello").tolist()


def test_a_stop_string_adds_none(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    # An end without a stop token is "length" on the wire.
    trajectory = sampled(qwen, qwen.encode_response("hello\n\nQuestion:").tolist(), stopped=False)
    assert llama.stop_id not in view(trajectory, qwen, llama)


def test_only_a_stop_token(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    for learner in (qwen, llama):
        assert view(sampled(qwen, [qwen.stop_id]), qwen, learner) == [learner.stop_id]
        assert reason(sampled(qwen, [qwen.stop_id]), qwen, learner, keep_stop=False) == "empty"


# --- what a learner cannot use ---------------------------------------------------------------------------


def test_empty_and_truncated_is_dropped(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    for learner in (qwen, llama):
        assert reason(sampled(qwen, [], stopped=False), qwen, learner) == "empty"


def test_cut_character_is_dropped_for_others(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    cut = sampled(qwen, qwen.encode_response("\U0001d11e").tolist()[:-1], stopped=False)
    for learner in (qwen, llama):
        assert reason(cut, qwen, learner) == "broken_text"
    whole = sampled(qwen, qwen.encode_response("\ufffd").tolist(), stopped=False)
    assert llama.decode_response(view(whole, qwen, llama)) == ("\ufffd", True)


def test_too_long_after_re_encoding(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    trajectory = sampled(qwen, [*qwen.encode_response("hello world"), qwen.stop_id])
    ids = view(trajectory, qwen, llama)
    assert view(trajectory, qwen, llama, max_tokens=len(ids)) == ids
    assert reason(trajectory, qwen, llama, max_tokens=len(ids) - 1) == "too_long"
    cut = view(trajectory, qwen, llama, max_tokens=len(ids) - 1, over_long="truncate")
    assert cut == ids[:-1]  # the stop token counts, and is what goes first


def test_text_that_the_learner_cannot_spell(qwen: AgentTokenizer, tmp_path: Path) -> None:
    learner = AgentTokenizer.load(make.characters(tmp_path / "characters"))
    stop = qwen.stop_id
    assert reason(sampled(qwen, [*qwen.encode_response("(+x)"), stop]), qwen, learner) == "unrepresentable"
    ids = view(sampled(qwen, [*qwen.encode_response("(+1)"), stop]), qwen, learner)
    assert learner.decode_response(ids) == ("(+1)", True)


def test_control_tokens_of_the_source_and_of_the_learner(qwen: AgentTokenizer, llama: AgentTokenizer) -> None:
    backend = Tokenizer.from_file(str(qwen.path / "tokenizer.json"))
    ids = backend.encode("<think>a<|im_start|>b<|eot_id|><|im_end|>").ids
    assert backend.token_to_id("<|im_start|>") in ids
    in_llama = view(sampled(qwen, ids), qwen, llama)
    special = Tokenizer.from_file(str(llama.path / "tokenizer.json"))
    assert in_llama.count(llama.stop_id) == 1  # the real stop, not the spelled one
    assert special.token_to_id("<|im_start|>") not in in_llama
    assert special.token_to_id("<think>") in in_llama
    assert llama.decode_response(in_llama) == ("<think>a<|im_start|>b<|eot_id|>", True)

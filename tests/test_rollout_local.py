"""The embedded engine against transformers: teacher-forced forwards, `generate`, exact probabilities."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from megatron_hacpo.rollout.base import Response, Sampling
from megatron_hacpo.rollout.local import LocalEngine
from megatron_hacpo.rollout.sampler import sample

VOCAB = 24
STOP = VOCAB - 1
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,  # wide, so that positions and padding matter to the output
    "bos_token_id": None,
    "eos_token_id": STOP,
}
RAGGED = [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11], [3, 3, 3, 3, 3]]


def make_qwen(seed: int) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=True))


def make_llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False, rope_parameters=rope))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    makers = {"qwen": make_qwen, "llama": make_llama}
    for family, make in makers.items():
        for seed in (0, 1):
            make(seed).save_pretrained(root / f"{family}{seed}")
    return {folder.name: folder for folder in root.iterdir()}


def open_engine(folder: Path, **options: object) -> LocalEngine:
    arguments = {"dtype": torch.float32, "device": "cpu", "stop_ids": [STOP]} | options
    return LocalEngine(folder, **arguments)


def model_of(folder: Path) -> torch.nn.Module:
    family = Qwen3ForCausalLM if folder.name.startswith("qwen") else LlamaForCausalLM
    return family.from_pretrained(folder, dtype=torch.float32).eval()


def set_only_token(engine: LocalEngine, token: int) -> None:
    """Makes an untied Llama engine produce `token` with near certainty, by its weight stream."""
    state = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    state["model.norm.weight"].zero_()  # hidden states are 0, so all logits are equal ...
    engine.update_weights(state.items(), version=1)
    engine._model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCAB), requires_grad=False)
    engine._model.lm_head.bias[token] = 50.0  # ... but for this one


def assert_same(left: list[Response], right: list[Response], tolerance: float = 0.0) -> None:
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason
        np.testing.assert_allclose(a.log_probs, b.log_probs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("family", ["qwen0", "llama0"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_log_probs_equal_a_teacher_forced_forward(
    folders: dict[str, Path], family: str, temperature: float
) -> None:
    sampling = Sampling(
        responses_per_prompt=6, max_tokens=20, temperature=temperature, top_p=0.9, top_k=12, seed=3
    )
    responses = open_engine(folders[family]).generate(RAGGED, sampling)
    model = model_of(folders[family])
    assert {response.finish_reason for response in responses} == {"stop", "length"}
    for index, response in enumerate(responses):
        prompt = RAGGED[index // 6]
        ids = torch.tensor([prompt + response.token_ids.tolist()])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, dim=-1).gather(1, ids[0, len(prompt) :, None])[
            :, 0
        ]
        assert response.log_probs.dtype == np.float32
        np.testing.assert_allclose(response.log_probs, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen0", "llama0"])
def test_greedy_equals_transformers_generate(folders: dict[str, Path], family: str) -> None:
    responses = open_engine(folders[family]).generate(
        RAGGED, Sampling(responses_per_prompt=1, max_tokens=20, temperature=0.0)
    )
    model = model_of(folders[family])
    for prompt, response in zip(RAGGED, responses, strict=True):
        output = model.generate(
            torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=STOP, pad_token_id=0
        )
        assert response.token_ids.tolist() == output[0, len(prompt) :].tolist()


@torch.no_grad()
def test_sampling_frequencies_match_exact_probabilities(folders: dict[str, Path]) -> None:
    """Two tokens from one prompt: the joint frequencies of 20,000 draws against the model's probabilities."""
    draws = 20_000
    sampling = Sampling(responses_per_prompt=draws, max_tokens=2, temperature=0.7, seed=5)
    responses = open_engine(folders["llama0"]).generate([[4, 5]], sampling)
    model = model_of(folders["llama0"])
    first = torch.softmax(model(torch.tensor([[4, 5]])).logits[0, -1] / 0.7, dim=-1)
    second = torch.softmax(model(torch.tensor([[4, 5, t] for t in range(VOCAB)])).logits[:, -1] / 0.7, dim=-1)
    expected = (first[:, None] * second).double()
    expected[STOP] = 0.0
    observed = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    for response in responses:
        if len(response.token_ids) == 2:
            observed[tuple(response.token_ids.tolist())] += 1 / draws
    standard_error = (expected * (1 - expected) / draws).sqrt()
    assert ((observed - expected).abs() <= 5 * standard_error + 2 / draws).all()
    stopped = np.mean([len(response.token_ids) == 1 for response in responses])
    assert stopped == pytest.approx(first[STOP].item(), abs=5 * 0.5 / draws**0.5)


def test_top_k_and_top_p_keep_what_they_should() -> None:
    """Probabilities 0.5, 0.25, 0.125, 0.125 over uniforms on a fine grid: exact shares of the kept tokens."""
    uniforms = torch.arange(8000, dtype=torch.float64) / 8000
    logits = torch.tensor([0.125, 0.5, 0.125, 0.25]).log().expand(8000, -1)

    def shares(top_p: float, top_k: int) -> list[float]:
        sampling = Sampling(responses_per_prompt=1, max_tokens=1, top_p=top_p, top_k=top_k)
        tokens, log_probs = sample(logits, uniforms, sampling)
        torch.testing.assert_close(log_probs, logits[0][tokens])  # before the filters
        return (torch.bincount(tokens, minlength=4) / 8000).tolist()

    assert shares(1.0, 0) == pytest.approx([0.125, 0.5, 0.125, 0.25], abs=1e-3)
    assert shares(1.0, 2) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=1e-3)
    assert shares(1.0, 1) == [0, 1, 0, 0]
    assert shares(0.5, 0) == [0, 1, 0, 0]
    assert shares(0.6, 0) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=1e-3)
    assert shares(0.8, 0) == pytest.approx([1 / 7, 4 / 7, 0, 2 / 7], abs=1e-3)  # of equal ones the first
    assert shares(0.8, 2) == pytest.approx([0, 2 / 3, 0, 1 / 3], abs=1e-3)


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf]]).expand(2, -1)
    uniforms = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, _ = sample(logits, uniforms, Sampling(responses_per_prompt=1, max_tokens=1))
    assert tokens.tolist() == [1, 1]


def test_seed_alone_decides(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["qwen0"])
    sampling = Sampling(responses_per_prompt=4, max_tokens=8, seed=11)
    torch.manual_seed(1)
    first = engine.generate(RAGGED, sampling)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    assert_same(first, engine.generate(RAGGED, sampling))
    assert torch.equal(torch.get_rng_state(), state)
    other = engine.generate(RAGGED, Sampling(responses_per_prompt=4, max_tokens=8, seed=12))
    assert [r.token_ids.tolist() for r in other] != [r.token_ids.tolist() for r in first]
    assert len({tuple(r.token_ids.tolist()) for r in first[:4]}) > 1  # responses of one prompt differ


def test_batch_size_and_padding_change_nothing(folders: dict[str, Path]) -> None:
    sampling = Sampling(responses_per_prompt=4, max_tokens=20, seed=7)
    whole = open_engine(folders["qwen0"]).generate(RAGGED, sampling)
    for limit in (1, 8, 12):  # 1: one prompt at a time, which needs no padding
        split = open_engine(folders["qwen0"], max_batch_responses=limit).generate(RAGGED, sampling)
        assert_same(whole, split, tolerance=1e-5)


def test_each_response_is_reported_once_and_in_the_step_that_completes_it(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(folders["qwen0"])
    sampling = Sampling(responses_per_prompt=4, max_tokens=20, seed=7)
    forward, passes, reported = engine._forward, [], {}

    def counted(*arguments: object) -> torch.Tensor:
        passes.append(1)
        return forward(*arguments)

    def report(index: int, response: Response) -> None:
        assert index not in reported
        reported[index] = (response, len(passes))

    monkeypatch.setattr(engine, "_forward", counted)
    responses = engine.generate(RAGGED, sampling, on_response=report)
    assert len(passes) == 20
    assert {r.finish_reason for r in responses} == {"stop", "length"}
    assert len(reported) == len(responses) == 16
    for index, response in enumerate(responses):
        told, passes_before = reported[index]
        assert told is response
        assert passes_before == len(response.token_ids)  # one forward pass a token
    assert_same(responses, engine.generate(RAGGED, sampling))


@pytest.mark.parametrize("limit", [1, 8])
def test_responses_of_later_batches_are_reported_with_their_own_places(
    folders: dict[str, Path], limit: int
) -> None:
    engine = open_engine(folders["qwen0"], max_batch_responses=limit)
    reported: list[tuple[int, Response]] = []
    responses = engine.generate(
        RAGGED,
        Sampling(responses_per_prompt=4, max_tokens=20, seed=7),
        on_response=lambda index, response: reported.append((index, response)),
    )
    assert sorted(index for index, _ in reported) == list(range(16))
    assert all(responses[index] is response for index, response in reported)


def test_stop_tokens(folders: dict[str, Path]) -> None:
    """Any stop id ends a response, is its last token, and occurs nowhere else; others have full length."""
    engine = open_engine(folders["llama0"], stop_ids=[STOP, 2, 7])
    responses = engine.generate(RAGGED, Sampling(responses_per_prompt=16, max_tokens=9, seed=1))
    endings = set()
    for response in responses:
        *body, last = response.token_ids.tolist()
        assert not {STOP, 2, 7} & set(body)
        if last in (STOP, 2, 7):
            assert response.finish_reason == "stop"
            endings.add(last)
        else:
            assert response.finish_reason == "length"
            assert len(response.token_ids) == 9
        assert response.token_ids.dtype == np.int32
    assert endings == {STOP, 2, 7}
    assert {r.finish_reason for r in responses} == {"stop", "length"}


def test_a_response_of_only_the_stop_token(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["llama0"])
    set_only_token(engine, STOP)
    for response in engine.generate(RAGGED, Sampling(responses_per_prompt=2, max_tokens=5)):
        assert response.token_ids.tolist() == [STOP]
        assert response.finish_reason == "stop"
        assert response.log_probs[0] == pytest.approx(0.0, abs=1e-6)


def test_never_stopping_fills_the_limit(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["llama0"])
    set_only_token(engine, 3)
    for response in engine.generate(RAGGED, Sampling(responses_per_prompt=2, max_tokens=5)):
        assert response.token_ids.tolist() == [3] * 5
        assert response.finish_reason == "length"


@pytest.mark.parametrize("family", ["qwen", "llama"])
def test_updated_weights_equal_a_fresh_load(folders: dict[str, Path], family: str) -> None:
    sampling = Sampling(responses_per_prompt=4, max_tokens=12, seed=2)
    engine = open_engine(folders[f"{family}0"])
    before = engine.generate(RAGGED, sampling)
    source = model_of(folders[f"{family}1"])
    engine.update_weights(((name, p.double()) for name, p in source.named_parameters()), version=4)
    assert engine.weights_version == 4
    after = engine.generate(RAGGED, sampling)
    assert_same(after, open_engine(folders[f"{family}1"]).generate(RAGGED, sampling))
    assert [r.token_ids.tolist() for r in after] != [r.token_ids.tolist() for r in before]
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.zero_()  # the engine copied
    assert_same(engine.generate(RAGGED, sampling), after)


def test_bad_weight_streams_name_the_tensor_and_block_generation(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["qwen0"])
    good = dict(model_of(folders["qwen1"]).named_parameters())
    norm = "model.norm.weight"
    streams = {
        "model.layers.9.mlp.up_proj.weight: not a weight": [
            ("model.layers.9.mlp.up_proj.weight", torch.ones(1))
        ],
        "lm_head.weight: not a weight": [("lm_head.weight", torch.ones(VOCAB, 32))],  # tied
        f"{norm}: shape \\(31,\\), but the model's is \\(32,\\)": [(norm, torch.ones(31))],
        f"{norm}: streamed twice": [(norm, torch.ones(32)), (norm, torch.ones(32))],
        f"{norm}: missing": [item for item in good.items() if item[0] != norm],
    }
    sampling = Sampling(responses_per_prompt=1, max_tokens=2)
    for message, stream in streams.items():
        with pytest.raises(ValueError, match=message):
            engine.update_weights(stream, version=1)
        with pytest.raises(RuntimeError, match="no complete weights"):
            engine.generate(RAGGED, sampling)
    assert engine.weights_version == 0
    engine.update_weights(good.items(), version=2)
    assert_same(engine.generate(RAGGED, sampling), open_engine(folders["qwen1"]).generate(RAGGED, sampling))


def test_a_stream_that_breaks_off_blocks_generation(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["qwen0"])

    def broken() -> object:
        yield "model.norm.weight", torch.ones(32)
        raise ConnectionError("trainer gone")

    with pytest.raises(ConnectionError):
        engine.update_weights(broken(), version=1)
    with pytest.raises(RuntimeError, match="no complete weights"):
        engine.generate(RAGGED, Sampling(responses_per_prompt=1, max_tokens=2))


def test_bad_prompts_are_named(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["qwen0"])
    sampling = Sampling(responses_per_prompt=1, max_tokens=60)
    assert engine.generate([], sampling) == []
    assert len(engine.generate([[1, 2, 3, 4]], sampling)) == 1  # 64 positions, all used
    for prompt, message in {
        (): "prompt 1: no tokens",
        (1, 2, 3, 4, 5): "prompt 1: 5 tokens and max_tokens 60 exceed .* 64",
        (1, VOCAB): "prompt 1: a token id outside",
        (-1,): "prompt 1: a token id outside",
    }.items():
        with pytest.raises(ValueError, match=message):
            engine.generate([[1], list(prompt)], sampling)


def test_bad_folders_and_stop_ids(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a Hugging Face model folder"):
        open_engine(tmp_path)
    with pytest.raises(ValueError, match="stop_ids: empty"):
        open_engine(folders["qwen0"], stop_ids=[])
    with pytest.raises(ValueError, match=r"stop_ids: \[24\]"):
        open_engine(folders["qwen0"], stop_ids=[STOP, VOCAB])
    model = make_llama(0)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if "layers.1.mlp.up_proj" not in name
    }
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(ValueError, match=r"lacks the weights.*layers\.1\.mlp\.up_proj"):
        open_engine(tmp_path)


def test_broken_weights_are_an_error(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["qwen0"])
    state = {name: torch.full_like(p, torch.nan) for name, p in engine._model.named_parameters()}
    engine.update_weights(state.items(), version=9)
    with pytest.raises(RuntimeError, match="not finite: the weights of version 9"):
        engine.generate(RAGGED, Sampling(responses_per_prompt=2, max_tokens=3))


def test_bfloat16_runs(folders: dict[str, Path]) -> None:
    engine = open_engine(folders["llama0"], dtype=torch.bfloat16)
    responses = engine.generate(RAGGED, Sampling(responses_per_prompt=2, max_tokens=4, temperature=0.0))
    assert all(r.log_probs.dtype == np.float32 for r in responses)
    for prompt in range(len(RAGGED)):  # greedy: the responses of a prompt are the same
        assert_same(responses[2 * prompt : 2 * prompt + 1], responses[2 * prompt + 1 : 2 * prompt + 2])

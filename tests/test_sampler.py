"""How an agent has its responses scored while others are still being generated, or takes them from disk."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from learner_steps import pair_config

from megatron_hacpo.bridge.tokenizer import AgentTokenizer
from megatron_hacpo.checkpoint.pool import Pool
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.inputs import Verifiers
from megatron_hacpo.learner.own import Sampled
from megatron_hacpo.rollout.base import OnResponse, Response, Sampling
from megatron_hacpo.sampler import Sampler

CONFIG = pair_config()  # four responses per prompt
TOKENIZER = AgentTokenizer.load(CONFIG.agents["A"].model)
ANSWERS = ["(+1)", "(-22)", "(+333)"]
PROMPTS = [
    Prompt(f"p{place}", ({"role": "user", "content": "C12="},), answer)
    for place, answer in enumerate([*ANSWERS[:2], None])  # the last one's responses cannot be scored
]


def response(text: str, *, stops: bool = True) -> Response:
    ids = [*TOKENIZER.encode_response(text).tolist(), *([TOKENIZER.stop_id] if stops else [])]
    return Response(np.array(ids, np.int32), np.zeros(len(ids), np.float32), "stop" if stops else "length")


RESPONSES = [
    response(text, stops=stops)
    for _ in PROMPTS
    for text, stops in zip([*ANSWERS, ANSWERS[0]], [True, True, True, False], strict=True)
]


class Told:
    """A rollout that reports given responses from the last to the first."""

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, on_response: OnResponse
    ) -> list[Response]:
        assert len(prompts) * sampling.responses_per_prompt == len(RESPONSES)
        for index in reversed(range(len(RESPONSES))):
            on_response(index, RESPONSES[index])
        return RESPONSES


@dataclass
class Scorer:
    """A sampler with what it needs."""

    verifiers: Verifiers
    sampler: Sampler

    def __call__(self) -> Sampled:
        return self.sampler.score(self.sampler.generate(PROMPTS, 1, Told().generate), 1)


@pytest.fixture
def scorer(tmp_path: Path) -> Iterator[Scorer]:
    verifiers = Verifiers(CONFIG)
    world = SimpleNamespace(is_leader=True, broadcast=lambda payload: payload)
    pool = Pool(tmp_path, "A", keep=1, since_checkpoint=False)
    try:
        yield Scorer(verifiers, Sampler(CONFIG, "A", world, TOKENIZER, verifiers, pool))
    finally:
        verifiers.close()


def test_rewards_are_those_of_scoring_afterwards(scorer: Scorer) -> None:
    scored = scorer()
    texts = [r.text for r in scored.responses]
    assert texts == [*ANSWERS, ANSWERS[0]] * 3
    expected = scorer.verifiers.usual.score(PROMPTS, texts, [r.finish_reason for r in RESPONSES])
    np.testing.assert_equal(
        [np.nan if r.reward is None else r.reward for r in scored.responses], expected.rewards
    )
    assert [r.reward for r in scored.responses] == [1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, *[None] * 3, 0.0]
    assert [r.failure for r in scored.responses] == [None] * 8 + ["ground_truth"] * 3 + [None]


def test_each_response_is_decoded_once(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = AgentTokenizer.decode_response, []

    def counted(self: AgentTokenizer, ids: np.ndarray) -> tuple[str, bool]:
        decoded.append(ids)
        return decode(self, ids)

    monkeypatch.setattr(AgentTokenizer, "decode_response", counted)
    scorer()
    assert len(decoded) == len(RESPONSES)


def test_what_is_on_the_disk_is_not_sampled_again(scorer: Scorer, tmp_path: Path) -> None:
    first = scorer()

    def generate(*given: object, **named: object) -> None:
        raise AssertionError

    assert scorer.sampler.score(scorer.sampler.generate(PROMPTS, 1, generate), 1) == first
    with pytest.raises(ValueError, match="is of other prompts"):
        scorer.sampler.generate(PROMPTS[:1], 1, generate)
    more = pair_config("rollout.responses_per_prompt=5")
    for config, tokenizer, wrong in (
        (more, TOKENIZER, r"has 12 responses to 3 prompts, not rollout.responses_per_prompt = 5 to each"),
        (CONFIG, AgentTokenizer.load(CONFIG.agents["B"].model), "is of another tokenizer or chat template"),
    ):
        pool = Pool(tmp_path, "A", keep=1, since_checkpoint=False)
        world = SimpleNamespace(is_leader=True, broadcast=lambda payload: payload)
        with pytest.raises(ValueError, match=wrong):
            Sampler(config, "A", world, tokenizer, scorer.verifiers, pool).generate(PROMPTS, 1, generate)
    file = tmp_path / "step_000001/pool/A.sampled"
    file.write_bytes(file.read_bytes()[:-7])
    with pytest.raises(ValueError, match=r"damaged .* remove it to sample again"):
        scorer.sampler.generate(PROMPTS, 1, generate)

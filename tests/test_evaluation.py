"""Estimates against brute force, and what a benchmark's responses come to."""

import json
import math
import re
import shutil
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from sglang_servers import sglang_python

from megatron_hacpo.config import ConfigError, RolloutConfig, load
from megatron_hacpo.config.schema import BenchmarkConfig
from megatron_hacpo.data import rule_task
from megatron_hacpo.data.prompts import Prompt
from megatron_hacpo.data.read import write_jsonl
from megatron_hacpo.evaluation.benchmark import SEED, Benchmark, Measurement
from megatron_hacpo.evaluation.estimators import best_at_k, half_width, majority, pass_at_k
from megatron_hacpo.evaluation.standalone import main, table
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.runtime import Layout
from megatron_hacpo.reward.base import RewardResult
from megatron_hacpo.reward.pool import RewardPool
from megatron_hacpo.reward.registry import get_verifier


@given(st.lists(st.booleans(), min_size=1, max_size=6), st.data())
def test_pass_at_k_is_the_share_of_all_draws_of_k(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = [any(draw) for draw in combinations(correct, k)]
    assert pass_at_k(np.array([correct]), k)[0] == pytest.approx(np.mean(draws))


@given(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=5), st.integers(1, 4))
def test_best_at_k_is_the_mean_over_all_draws_of_k(rewards: list[float], k: int) -> None:
    draws = [max(draw) for draw in product(rewards, repeat=k)]
    assert best_at_k(np.array([rewards]), k)[0] == pytest.approx(np.mean(draws))


@given(st.lists(st.sampled_from(["1", "2", "3", None]), min_size=1, max_size=7))
def test_majority_is_the_mean_over_all_ways_to_break_a_tie(answers: list[str | None]) -> None:
    rewards = [float(answer == "1") for answer in answers]
    votes = [answer for answer in answers if answer is not None]
    winners = {a for a in votes if votes.count(a) == max(map(votes.count, votes))}
    expected = np.mean([float(winner == "1") for winner in winners]) if winners else 0.0
    assert majority(rewards, answers) == pytest.approx(expected)


def test_pass_at_k_of_many_responses_is_exact() -> None:
    correct = np.zeros((1, 1000), dtype=bool)
    correct[0, 0] = True
    assert pass_at_k(correct, 1)[0] == pytest.approx(0.001, abs=1e-15)
    assert pass_at_k(correct, 500)[0] == pytest.approx(0.5, abs=1e-15)
    assert pass_at_k(correct, 1000)[0] == 1.0


def test_the_interval_holds_the_mean_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    samples = rng.random((2000, 200)) < 0.3
    inside = [abs(sample.mean() - 0.3) <= half_width(sample.astype(float)) for sample in samples]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.02)
    assert math.isnan(half_width(np.array([1.0])))


def measured(
    *rewards: list[float],
    answers: list[str | None] | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    **settings: Any,
) -> Measurement:
    n = len(rewards[0])
    prompts = [
        Prompt(f"p{i}", ({"role": "user", "content": "?"},), "1", "odd" if i % 2 else "even")
        for i in range(len(rewards))
    ]
    order = np.arange(n * len(rewards)).reshape(len(rewards), n)
    return Measurement(
        Benchmark("aime", prompts, BenchmarkConfig(path="", samples=n, **settings), bounds),
        scored=RewardResult(np.array(rewards).ravel(), (), tuple(answers or [None] * order.size)),
        votes=answers is not None,
        lengths=order,
        truncated=order % 2 == 0,
        texts=[f"text {i}" for i in range(order.size)],
    )


def test_the_metrics_of_a_benchmark() -> None:
    result = measured(
        [1.0, 0.0], [0.0, math.nan], [1.0, 1.0], answers=["1", "2", "2", None, "1", "1"], pass_at=(1, 2)
    )
    metrics = result.metrics()
    assert next(iter(metrics)) == "aime/avg@2"
    assert metrics["aime/avg@2"] == pytest.approx(0.5)
    assert metrics["aime/avg@2/ci95"] == pytest.approx(1.96 * 0.5 / math.sqrt(3))
    assert metrics["aime/pass@1"] == pytest.approx(0.5)
    assert metrics["aime/pass@2"] == pytest.approx(2 / 3)
    assert metrics["aime/best@2"] == pytest.approx((0.75 + 0 + 1) / 3)
    assert metrics["aime/maj@2"] == pytest.approx((0.5 + 0 + 1) / 3)
    assert (metrics["aime/group/even"], metrics["aime/group/odd"]) == (0.75, 0.0)
    assert (metrics["aime/tokens"], metrics["aime/tokens_max"]) == (2.5, 5.0)
    assert metrics["aime/truncated"] == 0.5
    assert metrics["aime/invalid"] == metrics["aime/no_answer"] == pytest.approx(1 / 6)


def test_a_single_response_has_no_vote_and_no_best() -> None:
    metrics = measured([1.0], [0.0], answers=["1", "2"]).metrics()
    assert {name for name in metrics if "@" in name} == {"aime/avg@1", "aime/avg@1/ci95"}


def test_only_the_highest_reward_passes() -> None:
    assert measured([0.5, 0.5], pass_at=(1,)).metrics()["aime/pass@1"] == 0.0
    assert measured([0.5, 0.5], pass_at=(1,), bounds=(0.0, 0.5)).metrics()["aime/pass@1"] == 1.0
    weighted = 0.7 + 0.2 + 0.1
    assert weighted < 1.0
    assert measured([weighted, 0.9], pass_at=(1,)).metrics()["aime/pass@1"] == 0.5


def test_held_out_prompts_are_called_as_they_always_were() -> None:
    prompts = [Prompt("a", ({"role": "user", "content": "?"},), "1")]
    assert Benchmark("sampled", prompts, BenchmarkConfig(path="")).headline == "sampled"
    assert Benchmark("greedy", prompts, BenchmarkConfig(path="")).headline == "greedy"


def test_a_benchmark_draws_as_it_says_and_else_as_in_training() -> None:
    rollout = RolloutConfig(temperature=0.7, top_p=0.9, top_k=50, max_response_tokens=100)
    usual = Benchmark("a", [], BenchmarkConfig(path="", temperature=None)).sampling(rollout)
    assert (usual.temperature, usual.top_p, usual.top_k, usual.max_tokens) == (0.7, 0.9, 50, 100)
    assert (usual.responses_per_prompt, usual.seed) == (1, SEED)
    settings = BenchmarkConfig(path="", samples=4, top_p=1.0, top_k=0, max_response_tokens=7)
    own = Benchmark("a", [], settings).sampling(rollout)
    assert (own.temperature, own.top_p, own.top_k, own.max_tokens) == (0.0, 1.0, 0, 7)
    assert own.responses_per_prompt == 4


def test_the_row_of_a_problem() -> None:
    result = measured([1.0, math.nan], [0.0, 0.0], answers=["1", None, "2", "2"])
    first, second = result.problems(texts=True)
    assert (second["id"], second["group"], second["truth"]) == ("p1", "odd", "1")
    assert (first["rewards"][0], first["answers"]) == (1.0, ["1", None])
    assert math.isnan(first["rewards"][1])
    assert (second["tokens"], second["truncated"], second["responses"]) == (
        [2, 3],
        [True, False],
        ["text 2", "text 3"],
    )
    assert "responses" not in result.problems(texts=False)[0]


def test_the_table_compares_on_the_same_problems() -> None:
    before, after = measured([1.0], [0.0], [0.0], [1.0]), measured([1.0], [1.0], [0.0], [1.0])
    console = Console(width=120, record=True)
    console.print(table(["A-1", "A-2"], [[before], [after]]))
    text = console.export_text()
    assert "aime/avg@1" in text
    assert "0.750 \u00b10.490 (+0.250 \u00b10.490)" in text  # a paired difference, not one of two means


@pytest.mark.parametrize(
    ("verifier", "text", "answer"),
    [
        ("exact", "42", "42"),
        ("match", "The Answer.", "the answer"),
        ("boxed", r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", "no box", None),
        ("choice", "the answer is B", "B"),
        ("choice", "no idea", None),
        ("math", r"\boxed{0.5}", "1/2"),
        ("math", r"\boxed{\frac{2}{4}}", "1/2"),
        ("math", r"\boxed{ x + 1 }", "x + 1"),
        ("math", "no box 5", None),
        ("math", r"\boxed{}", None),
        ("math_number", "so it is 1,000", "1000"),
    ],
)
def test_the_answer_that_votes(verifier: str, text: str, answer: str | None) -> None:
    found = get_verifier(verifier).answer
    assert found is not None
    assert found(text) == answer


def test_answers_come_with_the_rewards() -> None:
    prompt = Prompt("p", ({"role": "user", "content": "?"},), "1/2")
    with RewardPool("math", workers=1) as pool:
        assert pool.finds_answers
        texts = [r"\boxed{0.5}", "none", r"\boxed{50\%}"]
        scored = pool.score([prompt], texts, ["stop", "stop", "stop"])
    assert scored.answers == ("1/2", None, "50%")


def evaluate(folder: Path, *settings: str, models: Sequence[str] = ("examples/tiny/A",)) -> Path:
    """`hacpo eval` of folders as the demo's A on eight problems, into `folder`/out."""
    folder.mkdir(exist_ok=True)
    problems = folder / "problems.jsonl"
    write_jsonl(rule_task.held_out(8), problems)
    benchmark = f"evaluation.benchmarks.four={{path: {problems}, samples: 4, temperature: 1.0}}"
    config = load("examples/tiny/pair.yaml", ["evaluation.prompts=8", benchmark, *settings])
    main(*config.with_models("A", models), None, folder / "out")
    return folder / "out"


def problems_of(folder: Path, benchmark: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{benchmark}.jsonl").read_text().splitlines()]


def test_checkpoints_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = tmp_path / "A.megatron"
    hf_to_megatron(Path("examples/tiny/A").absolute(), checkpoint, layout=Layout())
    out = evaluate(tmp_path, models=["examples/tiny/A", str(checkpoint), "examples/tiny/B"])
    printed = capsys.readouterr().out
    assert "(+0.000 \u00b10.000)" in printed
    assert f"A.2: {checkpoint}" in printed
    for name in ("sampled", "greedy", "four"):
        assert problems_of(out / "A.1", name) == problems_of(out / "A.2", name)  # the same weights
    metrics = json.loads((out / "A.1" / "metrics.json").read_text())
    assert metrics["four/avg@4"] == np.mean([row["rewards"] for row in problems_of(out / "A.1", "four")])
    # Another model is read with its own tokenizer.
    config = load("examples/tiny/pair.yaml", ["evaluation.prompts=8"])
    main(config, ["B"], ["greedy"], tmp_path / "alone")
    assert problems_of(out / "A.3", "greedy") == problems_of(tmp_path / "alone" / "B", "greedy")


def test_weights_that_are_not_finite_are_named(tmp_path: Path) -> None:
    shutil.copytree("examples/tiny/A", tmp_path / "A")
    file = tmp_path / "A" / "model.safetensors"
    weights = load_file(file)
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, file, metadata={"format": "pt"})
    first = re.escape(rule_task.held_out(8)[0].id)
    told = rf'agents\.A\.model: ".*/A": sampled, prompt {first}: log-probs are not finite: .*; give a folder'
    with pytest.raises(ConfigError, match=told):
        evaluate(tmp_path, models=[str(tmp_path / "A")])


@pytest.mark.sglang
def test_servers_measure_what_is_measured_here(tmp_path: Path) -> None:
    servers = [
        "rollout.engine=sglang",
        f"rollout.sglang.python={sglang_python()}",
        f"run.dir={tmp_path}/runs",
    ]
    here, there = evaluate(tmp_path / "here"), evaluate(tmp_path / "there", *servers)
    assert problems_of(here / "A", "greedy") == problems_of(there / "A", "greedy")
    assert len(problems_of(there / "A", "four")) == 8
    assert not (tmp_path / "runs").exists()


def test_what_is_measured_must_exist() -> None:
    config = load("examples/tiny/pair.yaml", ["evaluation.prompts=8"])
    with pytest.raises(ConfigError, match="--benchmarks: x: not one of sampled, greedy"):
        main(config, ["A"], ["greedy", "x"], None)
    config = load("examples/tiny/pair.yaml", ["evaluation.prompts=0"])
    with pytest.raises(ConfigError, match="there is nothing to measure"):
        main(config, ["A"], None, None)


def test_a_function_of_ones_own_has_no_answer() -> None:
    assert get_verifier("reward_verifiers:obey").answer is None
    weighted = get_verifier({"reward_verifiers:obey": 0.5, "boxed": 0.5})
    assert weighted.answer is not None

"""Whole runs through `hacpo launch`: real agents, real processes, a few steps."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_steps import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_hacpo.data import rule_task
from megatron_hacpo.data.read import write_jsonl
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.runtime import Layout

SMALL = [
    "run.steps=3",
    "batch.prompts=8",
    "batch.minibatch_prompts=4",
    "rollout.responses_per_prompt=4",
    "evaluation.prompts=16",
]
PHASES = ("rollout", "reward", "logprob", "exchange", "update", "sync")
METRICS = {
    "step",
    "reward/mean",
    "reward/count",
    "reward/failed",
    "capability",
    "ratio/own/first_update_max_abs_dev",
    "ratio/cross/mean",
    "cross/rewarded_kept_fraction",
    "clip/cross/low_fraction",
    "clip/cross/high_fraction",
    "clip/own/fraction",
    "logprob/engine_trainer_max_abs_diff",
    "grad_norm",
    "loss/objective",
    "loss/kl",
    "response/length_mean",
    "response/truncated_fraction",
    "bridge/dropped",
    "time/step",
    "time/rollout",
    "time/reward",
    "time/logprob",
    "time/exchange",
    "time/update",
    "time/sync",
}
"""Names that other tools read."""


def start(
    run_dir: Path, name: str, *overrides: str, path: Path | None = None, options: Sequence[str] = ()
) -> "subprocess.CompletedProcess[str]":
    """`hacpo launch` of the tiny pair with small numbers."""
    command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml", *options]
    for setting in [*SMALL, f"run.dir={run_dir}", f"run.name={name}", *overrides]:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def launch(run_dir: Path, name: str, *overrides: str, path: Path | None = None) -> Path:
    """A run that ends well; returns its folder."""
    done = start(run_dir, name, *overrides, path=path)
    assert done.returncode == 0, done.stdout + done.stderr
    return run_dir / name


def rows(run: Path, agent: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / agent / file).read_text().splitlines()]


def without_times(run: Path, agent: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows(run, agent)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def pair(runs: Path) -> Path:
    return launch(runs, "pair")


def test_run_leaves_everything_it_promises(pair: Path) -> None:
    assert (pair / "config.yaml").is_file()
    assert (pair / "curves.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((pair / "summary.json").read_text())
    for agent in "AB":
        metrics = rows(pair, agent)
        assert [row["step"] for row in metrics] == [1, 2, 3]
        for row in metrics:
            assert row.keys() >= METRICS
            assert row["reward/count"] == 32
            assert row["ratio/own/first_update_max_abs_dev"] == 0.0
            assert row["logprob/engine_trainer_max_abs_diff"] < 1e-4
            assert row["loss/kl"] == 0.0
            assert row["bridge/dropped"] == 0.0
            parts = sum(
                row[f"time/{p}"] for p in ("rollout", "reward", "logprob", "exchange", "update", "sync")
            )
            assert 0.0 < parts <= row["time/step"]
        evaluations = rows(pair, agent, "eval.jsonl")
        assert [row["step"] for row in evaluations] == [0, 3]
        assert summary["agents"][agent]["start"]["sampled"] == evaluations[0]["sampled"]
        assert summary["agents"][agent]["end"]["greedy"] == evaluations[1]["greedy"]
        samples = rows(pair, agent, "samples.jsonl")
        assert samples
        assert samples[0].keys() >= {"prompt", "text", "reward", "source", "ratio", "advantage"}
        assert {row["source"] for row in samples} == {"A", "B"}
        assert list((pair / agent / "tensorboard").glob("events.*"))
        assert (pair / "step_000003" / "pool" / agent).is_file()
        assert (pair / "logs" / f"{agent}.rank0.log").is_file()


def test_benchmarks_are_measured_during_training(runs: Path) -> None:
    held_out = runs / "held_out.jsonl"
    write_jsonl(rule_task.held_out(8), held_out)
    benchmark = f"{{path: {held_out}, samples: 2, temperature: 1.0, pass_at: [2], verifier: boxed}}"
    settings = ["evaluation.prompts=4", f"evaluation.benchmarks.mine={benchmark}", "run.steps=1"]
    run = launch(runs, "measured", *settings, "reward.overlong_buffer=4", "evaluation.keep_responses=true")
    for agent in "AB":
        start, end = rows(run, agent, "eval.jsonl")
        assert (start["step"], end["step"]) == (0, 1)
        assert start.keys() >= {"sampled", "greedy/ci95", "mine/avg@2", "mine/pass@2", "mine/maj@2"}
        assert start["mine/avg@2"] == 0.0  # there are no boxes
        assert start["mine/no_answer"] == 1.0
        problems = rows(run, agent, "eval/step_1/mine.jsonl")
        assert [problem["id"] for problem in problems] == [p.id for p in rule_task.held_out(8)]
        assert all(len(problem["responses"]) == 2 for problem in problems)
        (row,) = rows(run, agent)
        assert row["reward/count"] == 32
        assert row["epochs"] is None


def test_training_from_converted_checkpoints_is_the_same_run(pair: Path, runs: Path) -> None:
    models = []
    for agent in "AB":
        checkpoint = runs / f"{agent}.megatron"
        hf_to_megatron(ROOT / "examples/tiny" / agent, checkpoint, layout=Layout(tensor=2))
        models.append(f"agents.{agent}.model={checkpoint}")
    converted = launch(runs, "converted", *models)
    for agent in "AB":
        assert without_times(converted, agent) == without_times(pair, agent)
        assert rows(converted, agent, "eval.jsonl") == rows(pair, agent, "eval.jsonl")
        weights = [(run / agent / "hf/model.safetensors").read_bytes() for run in (converted, pair)]
        assert weights[0] == weights[1]


def test_exported_agents_load_in_transformers_and_have_learned_something(pair: Path) -> None:
    for agent in "AB":
        folder = pair / agent / "hf"
        trained = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        start = AutoModelForCausalLM.from_pretrained(ROOT / "examples/tiny" / agent).state_dict()
        assert trained.keys() == start.keys()
        assert all(bool(tensor.isfinite().all()) for tensor in trained.values())
        assert not all(torch.equal(trained[key], start[key]) for key in start)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "C12345C67890="}], tokenize=False)
        assert text == "C12345C67890="


def test_same_seed_gives_the_same_metrics(pair: Path, runs: Path) -> None:
    again = launch(runs, "again")
    for agent in "AB":
        assert without_times(again, agent) == without_times(pair, agent)
        assert rows(again, agent, "eval.jsonl") == rows(pair, agent, "eval.jsonl")


@pytest.mark.parametrize("layout", ["tensor", pytest.param("pipeline", marks=pytest.mark.slow)])
def test_first_step_is_the_same_in_another_layout(layout: str, pair: Path, runs: Path) -> None:
    other = launch(runs, layout, "run.steps=1", f"agents.A.parallel.{layout}=2")
    for agent in "AB":
        expected = without_times(pair, agent)[0]
        got = without_times(other, agent)[0]
        assert got.keys() == expected.keys()
        for name, value in expected.items():
            if value is None:
                assert got[name] is None, name
            else:
                assert got[name] == pytest.approx(value, abs=1e-5, rel=1e-5), name


VERIFIER = '''
import math

def moody(text, answer):
    """No valid reward for most of the responses, by what they say."""
    if text.endswith("00)"):
        return None
    if text.endswith("20)"):
        return math.nan
    return float(text == answer)
'''


def test_odd_prompts_and_rewards_that_are_none_or_nan(runs: Path) -> None:
    """Prompts of odd content and length from a file, and a verifier that has no answer for everything."""
    (runs / "verifiers.py").write_text(VERIFIER)
    prompts = [{"prompt": f"{a}1234{i}{a}5432{i}=", "answer": "(+000000)"} for a in "+-CM" for i in range(3)]
    prompts += [{"prompt": "C" * 200, "answer": "x"}]  # longer than the limit: left out
    prompts += [{"prompt": [{"role": "user", "content": "("}], "answer": ""}]
    file = runs / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = launch(
        runs,
        "odd",
        "data.task=null",
        f"data.path={file}",
        "evaluation.prompts=0",
        "reward.verifier=verifiers:moody",
        "algorithm.kl_coef=0.01",
        "agents.B.dtype=bfloat16",
        path=runs,
    )
    invalid, failed = 0, 0
    for agent in "AB":
        for row in rows(run, agent):
            assert row["reward/count"] + row["reward/invalid"] == 32
            invalid += row["reward/invalid"]
            failed += row["reward/failed/not_a_number"]
            assert row["reward/failed/not_a_number"] == row["reward/failed"] <= row["reward/invalid"]
            assert row["ratio/own/first_update_max_abs_dev"] == 0.0
            assert row["loss/kl"] is not None
            assert all(value is None or math.isfinite(value) for value in row.values())
    assert invalid > failed > 0


def test_one_agent_under_torchrun_with_two_processes(runs: Path, pair: Path) -> None:
    """`hacpo train` needs no launcher where nothing is exchanged: torchrun's own store serves the world."""
    write_jsonl(rule_task.held_out(8), runs / "torchrun.jsonl")
    benchmark = f"{{path: {runs / 'torchrun.jsonl'}, samples: 2, temperature: 1.0, verifier: match}}"
    measured = ["evaluation.prompts=0", f"evaluation.benchmarks.mine={benchmark}"]
    settings = [*SMALL, *measured, f"run.dir={runs}", "run.name=torchrun", "run.steps=1", "agents.B=null"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_hacpo", "train", "examples/tiny/pair.yaml", "--agent", "A"]
    for setting in [*settings, "agents.A.parallel.tensor=2"]:
        command += ["--set", setting]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert rows(runs / "torchrun", "A")[0]["reward/mean"] == rows(pair, "A")[0]["reward/mean"]
    start, end = rows(runs / "torchrun", "A", "eval.jsonl")
    alone = rows(launch(runs, "one", *measured, "agents.B=null", "run.steps=1"), "A", "eval.jsonl")[0]
    assert start == alone
    assert 0.0 < end["mine/avg@2"] < 1.0


def test_single_agent_run_has_no_cross_values(runs: Path) -> None:
    run = launch(runs, "alone", "agents.B=null", "run.steps=1")
    row = rows(run, "A")[0]
    for name in ("ratio/cross/mean", "cross/rewarded_kept_fraction", "clip/cross/low_fraction"):
        assert row[name] is None


def test_updates_that_are_not_finite_stop_the_run_and_say_where_its_data_is(runs: Path) -> None:
    """A KL weight that overflows the gradient as soon as the weights have moved."""
    settings = ["agents.B=null", "algorithm.kl_coef=1e38", "checks.max_nonfinite_updates=1"]
    done = start(runs, "exploded", *settings, "evaluation.prompts=0")
    assert done.returncode == 1
    found = re.search(
        r"step (\d): 1 updates in a row had a loss or gradient norm that is not finite", done.stderr
    )
    assert found, done.stderr
    pool = runs / "exploded" / f"step_{int(found[1]):06}" / "pool"
    assert str(pool) in done.stderr
    assert (pool / "A").is_file()


def test_one_update_that_is_not_finite_is_skipped_and_counted(runs: Path) -> None:
    """The same KL weight, with patience: every such update is skipped and the weights stay finite."""
    run = launch(runs, "skips", "algorithm.kl_coef=1e38", "checks.max_nonfinite_updates=100", "run.steps=2")
    skipped = [row["updates/nonfinite"] for agent in "AB" for row in rows(run, agent)]
    assert max(skipped) > 0
    for agent in "AB":
        state = AutoModelForCausalLM.from_pretrained(run / agent / "hf").state_dict()
        assert all(bool(tensor.isfinite().all()) for tensor in state.values())


def test_weights_that_are_not_finite_are_never_exported(runs: Path) -> None:
    """A weight decay that overflows the weights while gradients stay finite: only the weights tell."""
    done = start(
        runs, "decayed", "optimizer.weight_decay=1e42", "optimizer.warmup_steps=0", "evaluation.prompts=0"
    )
    assert done.returncode == 1
    assert "step 1" in done.stderr
    assert not (runs / "decayed/A/hf").exists()


def test_a_window_that_is_too_narrow_is_told_and_edges_are_measured(runs: Path) -> None:
    """Answers of ten tokens, and the window of a thousand: the launcher shows the figure and what to set."""
    narrow = ["algorithm.delta=0.2", "run.steps=5", "report.gradient_cosine_every=2"]
    done = start(runs, "narrow", "batch.prompts=16", "batch.minibatch_prompts=8", *narrow)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(
        r"warning: agent A, step 5: (\d+)% of the \d+ rewarded responses of B in .*", done.stdout
    )
    assert found, done.stdout
    assert int(found[1]) > 50
    assert re.search(r"algorithm\.delta: 0\.\d+ keeps", found[0])
    assert found[0].strip() in (runs / "narrow/logs/A.rank0.log").read_text()
    for agent, other in ("AB", "BA"):
        metrics = rows(runs / "narrow", agent)
        for name in ("ratio_rewarded", "ratio_unrewarded", "effective_share"):
            assert all(0.0 < row[f"edge/{other}/{name}"] < 2.0 for row in metrics), name
        assert all(row[f"edge/{other}/rewarded_kept_fraction"] < 0.5 for row in metrics)
        cosines = [row.get(f"edge/{other}/gradient_cosine") for row in metrics]
        assert [c is not None for c in cosines] == [False, True, False, True, False]
        assert all(c is None or -1.0 < c < 1.0 for c in cosines)

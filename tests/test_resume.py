"""Runs that are stopped and gone on with, through `hacpo launch --resume`."""

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich.console import Console
from safetensors.torch import load_file
from test_end_to_end import start

from megatron_hacpo.checkpoint.identity import Identity
from megatron_hacpo.checkpoint.resume import find_resume_point
from megatron_hacpo.config import load
from megatron_hacpo.launch.run import check_inputs
from megatron_hacpo.megatron.convert import megatron_to_hf

SETTINGS = ("checkpoint.every=1", "evaluation.every=2", "evaluation.prompts=8", "report.tensorboard=false")


def run(folder: Path, name: str, *overrides: str, options: Sequence[str] = ()) -> Path:
    done = start(folder, name, *SETTINGS, *overrides, options=options)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / name


def refused(folder: Path, name: str, *overrides: str, options: Sequence[str]) -> str:
    done = start(folder, name, *SETTINGS, *overrides, options=options)
    assert done.returncode == 2, done.stdout + done.stderr
    return done.stderr


def rows(path: Path) -> list[dict[str, Any]]:
    """Without what the clock says."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in found]


def results(run_dir: Path) -> dict[str, Any]:
    """All that must not depend on a stop: rows of all files, and weights."""
    agents = sorted(path.parent.name for path in run_dir.glob("*/metrics.jsonl"))
    return {
        agent: {
            **{name: rows(run_dir / agent / f"{name}.jsonl") for name in ("metrics", "eval", "samples")},
            "weights": load_file(run_dir / agent / "hf/model.safetensors"),
        }
        for agent in agents
    }


def assert_same(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() == expected.keys()
    for agent, theirs in expected.items():
        for name in ("metrics", "samples"):
            assert got[agent][name] == theirs[name], (agent, name)
        evaluations = {row["step"]: row for row in got[agent]["eval"]}
        assert [evaluations[row["step"]] for row in theirs["eval"]] == theirs["eval"], agent
        for key, weight in theirs["weights"].items():
            assert torch.equal(got[agent]["weights"][key], weight), (agent, key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def whole(folder: Path) -> Path:
    """Four steps without a stop."""
    return run(folder, "whole", "run.steps=4", "checkpoint.keep_last=9")


def copy_of(run_dir: Path, name: str) -> Path:
    return Path(shutil.copytree(run_dir, run_dir.with_name(name)))


def test_goes_on_to_the_bit(folder: Path, whole: Path) -> None:
    run(folder, "stopped", "run.steps=2")
    run_dir = run(folder, "stopped", "run.steps=4", options=["--resume"])
    assert_same(results(run_dir), results(whole))
    assert (run_dir / "logs.1").is_dir()
    assert [row["step"] for row in rows(run_dir / "A/metrics.jsonl")] == [1, 2, 3, 4]


@pytest.mark.real
def test_goes_on_from_an_earlier_step_and_replays(folder: Path, whole: Path) -> None:
    """The responses of the steps in between are on the disk; later checkpoints are put aside."""
    expected = results(whole)
    run_dir = copy_of(whole, "earlier")
    for path in run_dir.glob("step_*/pool/B.sampled"):
        if "000003" in str(path):
            path.unlink()
    done = start(
        folder, "earlier", *SETTINGS, "run.steps=4", "checkpoint.keep_last=9", options=["--from-step", "1"]
    )
    assert done.returncode == 0, done.stderr
    assert "steps 2 to 2 are replayed" in done.stdout
    assert "checkpoint of step 4 is now" in done.stdout
    assert (run_dir / "step_000004.1/checkpoint/complete.json").is_file()
    assert_same(results(run_dir), expected)


@pytest.mark.real
def test_an_incomplete_checkpoint_is_as_good_as_none(folder: Path, whole: Path) -> None:
    """As a kill between two agents' saves leaves it."""
    expected = results(whole)
    run_dir = copy_of(whole, "incomplete")
    (run_dir / "step_000004/checkpoint/complete.json").unlink()
    shutil.rmtree(run_dir / "step_000004/checkpoint/B")
    (run_dir / "A/metrics.jsonl").open("a").write('{"step": 5, "half')
    done = start(
        folder, "incomplete", *SETTINGS, "run.steps=4", "checkpoint.keep_last=9", options=["--resume"]
    )
    assert done.returncode == 0, done.stderr
    assert "after step 3" in done.stdout
    assert_same(results(run_dir), expected)


def test_another_launch_without_resume_is_refused(folder: Path, whole: Path) -> None:
    assert "holds a run" in refused(folder, "whole", options=[])


def test_another_runs_configuration_is_refused(folder: Path, whole: Path) -> None:
    before = sorted(whole.rglob("*"))
    settings = ["run.steps=5", "algorithm.alpha=2.0", "batch.minibatch_prompts=8"]
    assert refused(folder, "whole", *settings, options=["--resume"]).splitlines() == [
        "error: batch.minibatch_prompts: was 4 and is 8; --allow batch.minibatch_prompts if that is meant",
        "error: algorithm.alpha: was 1.0 and is 2.0; --allow algorithm.alpha if that is meant",
    ]
    assert sorted(whole.rglob("*")) == before
    text = refused(folder, "whole", options=["--resume", "--overwrite"])
    assert text == "error: --overwrite: deletes what --resume would go on with; keep one of them\n"
    text = refused(folder, "new", options=["--allow", "run.seed"])
    assert text == "error: --allow: run.seed: there is nothing to allow without --resume; add it\n"


def identity_of(whole: Path, *overrides: str) -> Identity:
    """What `hacpo launch` finds out about a configuration."""
    return check_inputs(load(whole / "config.yaml", overrides), Console(quiet=True))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["agents.B=null"], "agents.B: is in the checkpoint and not in the configuration"),
        (["agents.C={model: examples/tiny/C}"], "agents.C: is in the configuration and not in"),
        (["rollout.temperature=0.5"], "agents.A.rollout.temperature: was 1.0 and is 0.5"),
        (["optimizer.schedule=cosine"], 'agents.A.optimizer.schedule: was "constant" and is'),
        (["data.digits=4"], "data.path: has other prompts"),
    ],
)
def test_differences_are_refused_by_name(overrides: list[str], message: str, whole: Path) -> None:
    now = identity_of(whole, *overrides)
    with pytest.raises(ValueError) as caught:
        find_resume_point(whole, now)
    lines = str(caught.value).splitlines()
    assert any(line.startswith(message) for line in lines), lines
    keys = [line.split(":")[0] for line in lines]
    assert find_resume_point(whole, now, allow=keys).step == 4
    sections = sorted({key.rpartition(".")[0] or key for key in keys})
    assert find_resume_point(whole, now, allow=[*sections, *keys]).step == 4


def test_other_weights_are_another_run(whole: Path) -> None:
    now = identity_of(whole)
    agents = {**now.agents, "A": replace(now.agents["A"], model="other", tokenizer="other")}
    with pytest.raises(ValueError) as caught:
        find_resume_point(whole, replace(now, agents=agents))
    assert str(caught.value).splitlines() == [
        "agents.A.model: has other weights than the run started from; "
        "--allow agents.A.model if that is meant",
        "agents.A.tokenizer: has another vocabulary, template or stop token; "
        "--allow agents.A.tokenizer if that is meant",
    ]


@pytest.mark.parametrize(
    "overrides",
    [
        ["run.steps=99", "run.name=other", "checks.silent_seconds=30", "checkpoint.every=7"],
        ["agents.A.parallel.tensor=2", "batch.microbatch_tokens=512", "optimizer.distributed=true"],
        ["rollout.engine=sglang", "rollout.sglang.servers=2", "evaluation.every=9", "reward.workers=1"],
    ],
)
def test_where_and_how_a_run_computes_may_change(overrides: list[str], whole: Path) -> None:
    assert find_resume_point(whole, identity_of(whole, *overrides)).changes == []


def test_a_step_that_is_not_there(whole: Path) -> None:
    with pytest.raises(ValueError) as caught:
        find_resume_point(whole, identity_of(whole), step=7)
    assert str(caught.value) == (
        f"--from-step: 7: {whole} has no complete checkpoint of it; there are steps 1, 2, 3, 4"
    )


def test_an_agents_checkpoint_is_a_model(whole: Path, tmp_path: Path) -> None:
    megatron_to_hf(whole / "step_000004/checkpoint/A", tmp_path / "hf")
    got, expected = (load_file(path / "model.safetensors") for path in (tmp_path / "hf", whole / "A/hf"))
    assert got.keys() == expected.keys()
    for key, weight in expected.items():
        assert torch.equal(got[key], weight), key
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == sorted(
        path.name for path in (whole / "A/hf").iterdir()
    )


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: flip(f / "A/__0_0.distcp"), r"A/__0_0.distcp has changed"),
        (lambda f: flip(f / "B/training/random/0"), r"B/training/random/0 has changed"),
        (lambda f: (f / "A/__0_0.distcp").write_bytes(b"x"), r"A/__0_0.distcp has 1 bytes, not"),
        (lambda f: (f / "B/training/state.json").unlink(), r"B/training/state.json is missing"),
        (lambda f: flip(f / "B/training/manifest.json"), r"B/training/manifest.json has changed"),
        (lambda f: (f / "complete.json").write_text("{"), r"complete.json is damaged"),
    ],
)
def test_damage_is_named_and_an_earlier_step_offered(damage: Any, message: str, whole: Path) -> None:
    run_dir = copy_of(whole, "damaged")
    damage(run_dir / "step_000004/checkpoint")
    with pytest.raises(ValueError) as caught:
        find_resume_point(run_dir, identity_of(whole))
    shutil.rmtree(run_dir)
    text = str(caught.value)
    assert re.fullmatch(rf"--resume: the checkpoint of step 4 is damaged: .*{message}.*", text), text
    assert text.endswith("; --from-step 3 goes on from the one before")


def test_a_newer_versions_checkpoint_is_refused(whole: Path) -> None:
    run_dir = copy_of(whole, "newer")
    marker = run_dir / "step_000004/checkpoint/complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"schema": 99, "unknown": 1}))
    with pytest.raises(ValueError, match=r"newer version \(schema 99, here 1\); install that one"):
        find_resume_point(run_dir, identity_of(whole))
    shutil.rmtree(run_dir)


@pytest.mark.real
def test_agents_join_and_leave_when_allowed(folder: Path, whole: Path) -> None:
    copy_of(whole, "joined")
    third = [
        "agents.C={model: examples/tiny/C}",
        "run.steps=5",
    ]
    run_dir = run(folder, "joined", *third, options=["--resume", "--allow", "agents.C"])
    assert [row["step"] for row in rows(run_dir / "C/metrics.jsonl")] == [5]
    row = rows(run_dir / "A/metrics.jsonl")[-1]
    assert {"capability/A", "capability/B", "capability/C"} <= row.keys()
    left = ["agents.B=null", *third[:1], "run.steps=6"]
    run_dir = run(folder, "joined", *left, options=["--resume", "--allow", "agents.B"])
    row = rows(run_dir / "A/metrics.jsonl")[-1]
    assert row["step"] == 6
    assert "capability/B" not in row


AGENTS = {
    1: ["agents.B=null"],
    2: [],
    3: ["agents.C={model: examples/tiny/C}"],
}


@pytest.mark.slow
@pytest.mark.parametrize("agents", AGENTS)
def test_twelve_steps_stopped_after_each_of_them(agents: int, folder: Path) -> None:
    settings = [*AGENTS[agents], "algorithm.kl_coef=0.01", "evaluation.every=4"]
    expected = run(folder, f"whole{agents}", *settings, "run.steps=12")
    for steps in range(1, 13):
        options = ["--resume"] if steps > 1 else []
        run_dir = run(folder, f"steps{agents}", *settings, f"run.steps={steps}", options=options)
    assert_same(results(run_dir), results(expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["agents.A.parallel={data: 2}", "agents.B.parallel={pipeline: 2}"],
        ["agents.A.parallel={tensor: 2}", "agents.B.parallel={context: 2}", "optimizer.distributed=true"],
    ],
)
def test_another_layout_goes_on_with_the_same_responses(layout: list[str], folder: Path) -> None:
    kept = ["run.steps=12", "checkpoint.keep_last=99", "exchange.keep_steps=99", "optimizer.eps=1.0e-4"]
    if not (folder / "layouts").exists():
        run(folder, "layouts", *kept)
    copy_of(folder / "layouts", "other")
    run_dir = run(folder, "other", *kept, *layout, options=["--from-step", "6"])
    for agent in "AB":
        expected = rows(folder / "layouts" / agent / "metrics.jsonl")
        got = rows(run_dir / agent / "metrics.jsonl")
        assert [row["step"] for row in got] == list(range(1, 13))
        for name in ("loss/objective", "grad_norm"):
            gaps = [
                abs(a[name] - b[name]) / (abs(b[name]) or 1.0) for a, b in zip(got, expected, strict=True)
            ]
            print(agent, name, gaps)
            assert gaps[:6] == [0.0] * 6
            assert gaps[6] <= 1e-5
            assert max(gaps) <= 1e-3
    shutil.rmtree(run_dir)

"""Real runs of one, two and three agents against an independent loop in plain PyTorch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from reference_loop import replay
from safetensors.torch import load_file

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.data import rule_task
from megatron_hacpo.report.files import METRICS, read_rows

CONFIG = Path("examples/tiny/pair.yaml")

COMMON = [
    "run.seed=1",
    "run.steps=3",
    "rollout.temperature=0.9",
    "rollout.responses_per_prompt=4",
    "batch.prompts=8",
    "batch.minibatch_prompts=4",
    "optimizer={lr: 2.0e-4, eps: 1.0e-5, weight_decay: 0.3, warmup_steps: 2, clip_grad: 0.5}",
    "algorithm.clip_low=1.0e-3",
    "algorithm.clip_high=2.0e-3",
    "algorithm.capability_window=2",
    "algorithm.kl_coef=0.1",
    "evaluation.prompts=0",
    "report.tensorboard=false",
]
"""eps: with 1e-8 Adam would turn the rounding errors of gradients near 0 into steps of whole learning rates."""

RUNS = {
    "gspo": ["agents.B=null", "algorithm.name=gspo"],
    "hacpo": ["agents.B=null", "algorithm.name=hacpo"],
    "pair": [],
    "triple": [
        "run.steps=2",
        "agents.B.rollout.temperature=1.7",
        "agents.C={model: examples/tiny/A, rollout: {temperature: 1.3, max_response_tokens: 10}}",
        "rollout.responses_per_prompt=2",
        "batch.prompts=4",
        "batch.minibatch_prompts=1",
        "algorithm.kl_coef=0.0",
    ],
}
"""In `triple` two agents share a tokenizer, one has a lower limit, and some mini-batches are without advantage."""

AGENTS = [
    ("gspo", "A"),
    ("hacpo", "A"),
    *(("pair", name) for name in "AB"),
    *(("triple", name) for name in "ABC"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Every run, finished. They run side by side: most of their time is imports."""
    folder = tmp_path_factory.mktemp("runs")
    configs, workers = {}, {}
    for name, settings in RUNS.items():
        settings = [*COMMON, *settings, f"run.dir={folder}", f"run.name={name}"]
        configs[name] = load(CONFIG, settings)
        alone = len(configs[name].names) == 1
        command = ["train", str(CONFIG), "--agent", "A"] if alone else ["launch", str(CONFIG)]
        options = [part for setting in settings for part in ("--set", setting)]
        with (folder / f"{name}.log").open("w") as log:
            workers[name] = subprocess.Popen(
                [sys.executable, "-m", "megatron_hacpo", *command, *options],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    try:
        for name, worker in workers.items():
            assert worker.wait(timeout=300) == 0, (folder / f"{name}.log").read_text()
    finally:
        for worker in workers.values():
            worker.terminate()
            worker.wait()
    return configs


@pytest.mark.parametrize(("run", "agent"), AGENTS)
def test_equals_the_reference_loop(runs: dict[str, RunConfig], run: str, agent: str) -> None:
    config = runs[run]
    trace, weights = replay_run(config, agent)
    for row, updates in zip(rows(config, agent), trace, strict=True):
        objective, kl, grad_norm = torch.tensor(updates, dtype=torch.float64).T
        assert row["updates/applied"] == len(updates)
        assert row["loss/objective"] == pytest.approx(objective.mean().item(), abs=1e-5)
        assert row["loss/kl"] == pytest.approx(kl.sum().item() / config.batch.minibatches, abs=1e-5)
        assert row["grad_norm"] == pytest.approx(grad_norm.mean().item(), rel=1e-5)
    exported = load_file(config.path / agent / "hf" / "model.safetensors")
    assert weights.keys() - exported.keys() <= {"lm_head.weight"}  # tied
    for name, tensor in exported.items():
        torch.testing.assert_close(
            tensor, weights[name], rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_one_agent_is_gspo_to_the_bit(runs: dict[str, RunConfig]) -> None:
    gspo, hacpo = (
        [
            {key: value for key, value in row.items() if not key.startswith("time/")}
            for row in rows(runs[name], "A")
        ]
        for name in ("gspo", "hacpo")
    )
    assert gspo == hacpo
    gspo, hacpo = (runs[name].path / "A" / "hf" / "model.safetensors" for name in ("gspo", "hacpo"))
    assert gspo.read_bytes() == hacpo.read_bytes()


def test_the_runs_meet_every_branch(runs: dict[str, RunConfig]) -> None:
    def values(key: str) -> list[float]:
        return [row[key] for run, agent in AGENTS for row in rows(runs[run], agent) if row[key] is not None]

    for key in ("clip/own/fraction", "clip/cross/low_fraction", "clip/cross/high_fraction"):
        assert any(0 < value < 1 for value in values(key)), key
    for key in (
        "updates/without_signal",
        "advantage/baseline_fallbacks",
        "advantage/equal_groups",
        "bridge/dropped",
    ):
        assert any(value > 0 for value in values(key)), key


def rows(config: RunConfig, agent: str) -> list[dict[str, Any]]:
    return read_rows(config.path / agent / METRICS)


def replay_run(config: RunConfig, agent: str) -> tuple[list, dict[str, torch.Tensor]]:
    """The reference loop on a run's prompts and pool files."""
    settings = config.agents[agent]
    numbers = {
        **config.batch.model_dump(),
        **config.algorithm.model_dump(),
        **settings.optimizer.model_dump(),
        **settings.rollout.model_dump(),
    }
    steps = []
    for step in range(1, config.run.steps + 1):
        prompts = rule_task.batch(config.run.seed, step, config.batch.prompts, config.data.digits)
        files = [config.path / f"step_{step}" / "pool" / name for name in config.names]
        pool = [msgspec.msgpack.decode(file.read_bytes()) for file in files]
        steps.append(([prompt.messages[0]["content"] for prompt in prompts], pool))
    return replay(settings.model, config.names.index(agent), numbers, steps)

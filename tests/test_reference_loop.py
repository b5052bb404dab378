"""Real runs of one, two and three agents against an independent loop in plain PyTorch."""

import multiprocessing
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
from torch.distributed import TCPStore

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.data import rule_task
from megatron_hacpo.report.files import METRICS, read_rows

CONFIG = Path("examples/tiny/pair.yaml")
TOLERANCE = 1e-5
TIMEOUT_SECONDS = 300.0

COMMON = [
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
"""eps: with 1e-8 Adam turns the rounding errors of gradients near 0 into steps of whole learning rates."""

RUNS = {
    "gspo": ["agents.B=null", "algorithm.name=gspo"],
    "hacpo": ["agents.B=null", "algorithm.name=hacpo"],
    "pair": [],
    "triple": [
        "run.seed=9",
        "run.steps=2",
        "agents.B.rollout.temperature=2.5",
        "agents.C={model: examples/tiny/A, rollout: {temperature: 2.5, max_response_tokens: 10}}",
        "rollout.responses_per_prompt=2",
        "batch.prompts=6",
        "batch.minibatch_prompts=1",
        "algorithm.kl_coef=0.0",
    ],
}
"""Agent C has A's tokenizer and a lower limit; with this seed `triple` meets the rare branches."""

LAUNCHED = "hacpo"
"""The run that the command starts; the agents of the others are forks that share the imports."""

AGENTS = [(run, agent) for run, agents in zip(RUNS, ("A", "A", "AB", "ABC"), strict=True) for agent in agents]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RunConfig]:
    """Every run, finished."""
    folder = tmp_path_factory.mktemp("runs")
    settings = {run: [*COMMON, *extra, f"run.dir={folder}", f"run.name={run}"] for run, extra in RUNS.items()}
    configs = {run: load(CONFIG, values) for run, values in settings.items()}
    options = [part for value in settings[LAUNCHED] for part in ("--set", value)]
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["megatron_hacpo.train"])
    stores, workers = [], []
    with (folder / f"{LAUNCHED}.log").open("w") as log:
        command = [sys.executable, "-m", "megatron_hacpo", "launch", str(CONFIG), *options]
        launcher = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        for run, agent in AGENTS:
            if run == LAUNCHED:
                continue
            if agent == "A":
                stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            arguments = (settings[run], agent, f"127.0.0.1:{stores[-1].port}")
            workers.append(forks.Process(target=train_agent, args=arguments, name=f"{run}-{agent}"))
            workers[-1].start()
        assert launcher.wait(TIMEOUT_SECONDS) == 0, (folder / f"{LAUNCHED}.log").read_text()
        for worker in workers:
            worker.join(TIMEOUT_SECONDS)
            assert worker.exitcode == 0, worker.name
    finally:
        launcher.terminate()
        launcher.wait()
        for worker in workers:
            worker.kill()
            worker.join()
    return configs


def train_agent(settings: list[str], agent: str, store: str) -> None:
    """What `hacpo train` does, in a process of its own."""
    from megatron_hacpo.process.store import STORE_VARIABLE
    from megatron_hacpo.train import train

    os.environ[STORE_VARIABLE] = store
    train(load(CONFIG, settings), agent)


@pytest.mark.parametrize(("run", "agent"), AGENTS)
def test_equals_the_reference_loop(runs: dict[str, RunConfig], run: str, agent: str) -> None:
    config = runs[run]
    trace, weights = replay_run(config, agent)
    for row, updates in zip(rows(config, agent), trace, strict=True):
        objective, kl, grad_norm = torch.tensor(updates, dtype=torch.float64).T
        assert row["updates/applied"] == len(updates)
        assert row["loss/objective"] == pytest.approx(objective.mean().item(), abs=TOLERANCE)
        assert row["loss/kl"] == pytest.approx(kl.mean().item(), abs=TOLERANCE)
        assert row["grad_norm"] == pytest.approx(grad_norm.mean().item(), rel=TOLERANCE)
    exported = load_file(config.path / agent / "hf" / "model.safetensors")
    assert weights.keys() - exported.keys() <= {"lm_head.weight"}  # A's and C's are tied
    for name, tensor in exported.items():
        assert (tensor - weights[name]).abs().max().item() <= TOLERANCE, name


def test_hacpo_of_one_agent_is_gspo_to_the_bit(runs: dict[str, RunConfig]) -> None:
    gspo, hacpo = (
        [{key: row[key] for key in row if not key.startswith("time/")} for row in rows(runs[run], "A")]
        for run in ("gspo", "hacpo")
    )
    assert gspo == hacpo
    gspo_file, hacpo_file = (runs[run].path / "A" / "hf" / "model.safetensors" for run in ("gspo", "hacpo"))
    assert gspo_file.read_bytes() == hacpo_file.read_bytes()


def test_the_runs_meet_every_branch(runs: dict[str, RunConfig]) -> None:
    """Otherwise their agreement would prove little."""
    metrics = [row for run, agent in AGENTS for row in rows(runs[run], agent)]
    for key in ("clip/own/fraction", "clip/cross/low_fraction", "clip/cross/high_fraction"):
        assert any(0 < row[key] < 1 for row in metrics if row[key] is not None), key
    for key in ("updates/without_signal", "bridge/dropped"):
        assert any(row[key] > 0 for row in metrics), key
    assert any(row["capability/B"] == 0 for row in rows(runs["triple"], "A"))  # the bounds of its ratios
    clip_grad = runs["pair"].agents["A"].optimizer.clip_grad
    norms = [row["grad_norm"] for row in metrics]
    assert min(norms) < clip_grad < max(norms)


def replay_run(config: RunConfig, agent: str) -> tuple[list, dict[str, torch.Tensor]]:
    """The reference loop on a run's prompts and pool files."""
    settings = config.agents[agent]
    sections = (config.batch, config.algorithm, settings.optimizer, settings.rollout)
    numbers = {key: value for section in sections for key, value in section.model_dump().items()}
    steps = []
    for step in range(1, config.run.steps + 1):
        prompts = rule_task.batch(config.run.seed, step, config.batch.prompts, config.data.digits)
        files = [config.path / f"step_{step:06}" / "pool" / name for name in config.names]
        pool = [msgspec.msgpack.decode(file.read_bytes()) for file in files]
        steps.append(([prompt.messages[0]["content"] for prompt in prompts], pool))
    return replay(settings.model, config.names.index(agent), numbers, steps)


def rows(config: RunConfig, agent: str) -> list[dict[str, Any]]:
    return read_rows(config.path / agent / METRICS)

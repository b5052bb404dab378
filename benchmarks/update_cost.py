"""What a whole HACPO run costs against plain PyTorch on the same responses.

    python benchmarks/update_cost.py [--steps 240]

Runs the tiny pair without evaluations, then replays its responses with the independent loop of the tests
(transformers models, torch.optim.AdamW, one padded batch per mini-batch). That does old log-probs, reference
log-probs and all updates of both agents, and neither samples nor exchanges anything. Prints the CPU seconds
of both and their ratio. The run includes everything: imports, sampling, exchange, files. At this size nearly
all of it is overhead per call.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from megatron_hacpo.config import RunConfig, load
from megatron_hacpo.data import rule_task

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from reference_loop import replay  # noqa: E402


def pool(config: RunConfig, step: int) -> tuple[list[str], list[Any]]:
    """Prompts of a step, and what every agent contributed to it."""
    prompts = rule_task.batch(config.run.seed, step, config.batch.prompts)
    files = [config.path / f"step_{step}" / "pool" / name for name in config.names]
    contributions = [msgspec.msgpack.decode(file.read_bytes()) for file in files]
    return [prompt.messages[0]["content"] for prompt in prompts], contributions


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=240)
    steps = parser.parse_args().steps
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"run.dir={folder}", f"run.steps={steps}", f"exchange.keep_steps={steps}"]
        settings += ["evaluation.prompts=0", "report.tensorboard=false"]
        command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml"]
        for setting in settings:
            command += ["--set", setting]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0, "the run failed"
        trainer = usage.ru_utime + usage.ru_stime

        config = load("examples/tiny/pair.yaml", settings)
        start = time.process_time()
        for learner, agent in enumerate(config.agents.values()):
            sections = (config.batch, config.algorithm, agent.optimizer, agent.rollout)
            numbers = {key: value for section in sections for key, value in section.model_dump().items()}
            replay(agent.model, learner, numbers, [pool(config, step) for step in range(1, steps + 1)])
        plain = time.process_time() - start
    print(f"{steps} steps: trainer {trainer:.0f} CPU s in all, plain PyTorch's updates {plain:.0f} CPU s")
    print(f"ratio {trainer / plain:.2f}")


if __name__ == "__main__":
    main()

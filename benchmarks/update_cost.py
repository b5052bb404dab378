"""A trainer step against plain PyTorch on the same responses: what Megatron costs on a tiny model.

    python benchmarks/update_cost.py [--steps 40]

Trains agent A alone for some steps, then replays the very same responses with the independent loop of the
tests (transformers model, torch.optim.AdamW, one padded batch per mini-batch). Both compute old log-probs and
all updates of a step on one thread; the loop also computes reference log-probs, which this run does not need.
Prints the seconds of each per step and their ratio. At this size all of it is overhead.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import torch

from megatron_hacpo.config import load
from megatron_hacpo.data import rule_task
from megatron_hacpo.report.files import METRICS, read_rows

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from reference_loop import replay  # noqa: E402

WARM_UP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        settings = ["agents.B=null", f"run.dir={folder}", f"run.steps={steps}"]
        settings += [f"exchange.keep_steps={steps}", "evaluation.prompts=0", "report.tensorboard=false"]
        command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml"]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        os.chdir(ROOT)
        config = load("examples/tiny/pair.yaml", settings)
        rows = read_rows(config.path / "A" / METRICS)
        trainer = statistics.median(row["time/logprob"] + row["time/update"] for row in rows[WARM_UP:])

        agent = config.agents["A"]
        sections = (config.batch, config.algorithm, agent.optimizer, agent.rollout)
        numbers = {key: value for section in sections for key, value in section.model_dump().items()}
        pools = []
        for step in range(1, steps + 1):
            prompts = rule_task.batch(config.run.seed, step, config.batch.prompts)
            contribution = msgspec.msgpack.decode((config.path / f"step_{step}/pool/A").read_bytes())
            pools.append(([p.messages[0]["content"] for p in prompts], [contribution]))
        replay(agent.model, 0, numbers, pools[:WARM_UP])
        start = time.perf_counter()
        replay(agent.model, 0, numbers, pools)
        plain = (time.perf_counter() - start) / steps
    print(f"trainer {trainer:.4f} s/step (median), plain PyTorch {plain:.4f} s/step (mean)")
    print(f"ratio {trainer / plain:.2f}")


if __name__ == "__main__":
    main()

"""Whether SGLang servers on a GPU compute what the trainer computes, apart from it and in turns with it.

    python benchmarks/gpu_sglang.py --sglang-python PYTHON [--steps 3]

Needs CUDA, and SGLang in the environment of PYTHON. Launches agent B of the tiny pair alone, in bfloat16,
with a colocated server for each transport and kind of offloading, and, with two GPUs, with a server apart
over NCCL. Prints a row per run: the largest and the mean |engine - trainer| log-prob over all steps, which
must stay below 0.05 in the mean, and seconds per sync. Exit code 1 if a run failed or was above.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch

ROOT = Path(__file__).parents[1]
LIMIT = 0.05
CASES: dict[str, list[str]] = {
    f"colocated, {transport}, offload {offload}": [
        f"agents.A.placement={{colocated: true, offload: {offload}}}",
        f"rollout.sglang.transport={transport}",
    ]
    for transport in ("tensor", "disk")
    for offload in ("none", "optimizer", "all")
}
APART = {"apart, distributed": ["rollout.sglang.transport=distributed"]}


def launch(folder: Path, python: str, steps: int, settings: list[str]) -> list[dict[str, float]]:
    """The metrics of a run, or nothing of one that failed."""
    fixed = [
        f"run.dir={folder}",
        f"run.steps={steps}",
        "agents.B=null",
        "agents.A.dtype=bfloat16",  # SGLang's kernels want its sizes, multiples of eight
        "optimizer.distributed=true",
        "evaluation.prompts=0",
        "rollout.engine=sglang",
        f"rollout.sglang.python={python}",
        "rollout.sglang.memory_fraction=0.3",
    ]
    command = [sys.executable, "-m", "megatron_hacpo", "launch", "examples/tiny/pair.yaml", "--overwrite"]
    for setting in [*fixed, *settings]:
        command += ["--set", setting]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        return []
    return [json.loads(row) for row in (folder / "tiny-pair/A/metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sglang-python", required=True)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: no GPU here; tests/test_sglang_*.py check the same on CPUs\n")
    cases = CASES | (APART if torch.cuda.device_count() > 1 else {})
    failed = False
    for name, settings in cases.items():
        with tempfile.TemporaryDirectory() as folder:
            rows = launch(Path(folder), options.sglang_python, options.steps, settings)
        if not rows:
            print(f"{name:36} FAILED")
            failed = True
            continue
        largest = max(row["logprob/engine_trainer_max_abs_diff"] for row in rows)
        mean = max(row["logprob/engine_trainer_mean_abs_diff"] for row in rows)
        verdict = "ok" if mean <= LIMIT else f"FAILED: above {LIMIT}"
        failed = failed or mean > LIMIT
        sync = median(row["time/sync"] for row in rows)
        print(f"{name:36} max {largest:.2g}  mean {mean:.2g}  sync {sync:.2f} s  {verdict}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""The study of benchmarks/claim.py: its statistics, and the claim itself, small, through the real trainer."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from claim_report import by_method, mean_sd, paired_interval, table  # noqa: E402


def test_mean_and_sample_standard_deviation() -> None:
    assert mean_sd([1.0, 2.0, 4.0]) == (pytest.approx(7 / 3), pytest.approx(math.sqrt(7 / 3)))
    mean, sd = mean_sd([0.5])
    assert mean == 0.5
    assert math.isnan(sd)


def test_paired_interval() -> None:
    first, second = {1: 0.9, 2: 0.8, 3: 0.7, 4: 0.0}, {1: 0.5, 2: 0.5, 3: 0.5, 9: 1.0}
    mean, half, pairs = paired_interval(first, second)
    # differences 0.4, 0.3, 0.2: mean 0.3, sd 0.1, t(2) = 4.303
    assert (mean, half, pairs) == (pytest.approx(0.3), pytest.approx(4.303 * 0.1 / math.sqrt(3)), 3)
    mean, half, pairs = paired_interval({1: 0.9}, {1: 0.5})
    assert (mean, pairs) == (pytest.approx(0.4), 1)
    assert math.isnan(half)


def test_table_compares_by_seed() -> None:
    values = {"gspo": {1: 0.4, 2: 0.5}, "hacpo": {1: 0.9, 2: 0.8}}
    results = [
        {"method": m, "seed": s, "agent": "A", "step": step, "sampled": v if step else 0.25, "greedy": 1.0}
        for m, seeds in values.items()
        for s, v in seeds.items()
        for step in (0, 10)
    ]
    costs = [
        {"method": m, "seed": s, "wall_seconds": 10.0, "cpu_seconds": 20.0, "responses": 1280}
        for m in values
        for s in (1, 2)
    ]
    assert by_method(results, 10, "sampled") == {"A": values}
    text = table(results, costs)
    assert "| A | gspo | 2 | 0.450 +- 0.071 | 1.000 +- 0.000 |" in text
    # 0.5 and 0.3: mean 0.4, sd 0.1414, t(1) = 12.706
    assert "| A | gspo | +0.400 | -0.871 to +1.671 | 2 |" in text
    assert "| A | hacpo | 0.250 | 0.850 |" in text
    assert "| hacpo | 1,280 | 20 | 10 |" in text


def test_sharing_rollouts_beats_twice_the_own_rollouts(tmp_path: Path) -> None:
    """One seed at 180 steps: HACPO, with half the rollouts, above GSPO x 2 by 0.15 (A) and 0.05 (B)."""
    command = [sys.executable, str(ROOT / "benchmarks/claim.py"), "--seeds", "1", "--steps", "180"]
    command += ["--methods", "gspo_x2,hacpo", "--every", "0", "--out", str(tmp_path)]
    command += ["--agents", str(ROOT / "examples/tiny")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    end = {
        (row["method"], row["agent"]): row["sampled"]
        for row in json.loads((tmp_path / "results.json").read_text())
        if row["step"] == 180
    }
    assert end["hacpo", "A"] - end["gspo_x2", "A"] >= 0.15
    assert end["hacpo", "B"] - end["gspo_x2", "B"] >= 0.05
    costs = json.loads((tmp_path / "costs.json").read_text())
    assert {c["method"]: c["responses"] for c in costs} == {"gspo_x2": 46_080, "hacpo": 23_040}
    # What is complete is not repeated.
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert again.stdout.count("was there") == 2, again.stdout + again.stderr

"""Kills at named places of runs, which go on to what they would have been."""

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from kill_test import Cell, differences, results, run_with_kills  # noqa: E402

pytestmark = pytest.mark.real

PLANS = {
    "saving": [Cell("rollout", "reward worker"), Cell("save", "rank"), Cell("marker", "leader")],
    "training": [Cell("exchange", "leader"), Cell("update", "launcher"), Cell("logprob", "rank")],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kills")


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    run_with_kills(folder, "undisturbed", [])
    return results(folder / "undisturbed")


@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_is_killed_becomes_what_it_would_have_been(
    name: str, folder: Path, undisturbed: dict[str, Any]
) -> None:
    left = list(PLANS[name])
    for run in (f"{name}1", f"{name}2", f"{name}3"):  # a short phase may be over before the kill
        hit = run_with_kills(folder, run, left)
        assert list(differences(results(folder / run), undisturbed)) == []
        left = [cell for cell in left if cell not in hit]
        if not left:
            return
    raise AssertionError(f"not hit: {', '.join(map(str, left))}")

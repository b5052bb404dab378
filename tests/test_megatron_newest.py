"""The newest megatron-core that the package knows against the installed one: updates and checkpoints.

It lies in the folder MEGATRON_NEWEST, which processes of the newest have first on their path.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from newest_worker import MODEL_OF, MODEL_OF_FOUR_RANKS
from parity_models import TOKENIZER_OF, write_models
from parity_worker import balanced_update, steps_of
from random_models import CONFIGS, random_model
from ranks import run_ranks
from state_worker import save
from test_conversion import TP2, check_report, make_folders
from test_megatron_layouts import check_first_ratios, check_updates
from test_training_state import tensors

from megatron_hacpo.hf.read import read_json
from megatron_hacpo.megatron import runtime
from megatron_hacpo.megatron.convert import hf_to_megatron
from megatron_hacpo.megatron.cpu import TESTED_VERSIONS
from megatron_hacpo.megatron.verify import verify_tensors

pytestmark = pytest.mark.real

CASES = [*MODEL_OF.items(), *MODEL_OF_FOUR_RANKS.items()]


@pytest.fixture(scope="module", autouse=True)
def newest() -> Iterator[None]:
    """Processes that are started find the newest megatron-core; this one has the oldest."""
    assert version("megatron-core") == TESTED_VERSIONS[0]
    folder = os.environ.get("MEGATRON_NEWEST")
    if not folder:
        pytest.fail(f"MEGATRON_NEWEST: not set; `make test-real` installs {TESTED_VERSIONS[-1]} and sets it")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(folder).absolute()), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("newest")
    write_models(folder)
    return folder


@pytest.fixture(scope="module")
def many_ranks(models: Path) -> dict[Any, Any]:
    """Results by (layout, model), computed by four processes of the newest, which also read a checkpoint."""
    make_folders(models / "checkpoints", {"qwen3 moe": (torch.bfloat16,)})
    run_ranks("newest_worker.py", 4, models)
    results: dict[Any, Any] = {}
    for rank in (2, 0):  # of what all four ran, 0 has all
        ran, of_rank = torch.load(models / f"newest-{rank}.pt")
        assert ran == TESTED_VERSIONS[-1]
        results |= of_rank
    return results


@pytest.fixture(scope="module")
def one_rank(models: Path) -> dict[str, Any]:
    """Results by model, and of a balanced update, computed by the installed one in this process."""
    with runtime.alone() as world:
        results: dict[str, Any] = {model: steps_of(models, model, world) for model in TOKENIZER_OF}
        results["balanced"] = balanced_update(models, world)
    return results


@pytest.mark.parametrize("layout, model", CASES)
def test_the_newest_gives_the_installed_ones_updates(
    layout: str, model: str, many_ranks: Any, one_rank: dict[str, Any]
) -> None:
    check_updates(many_ranks[layout, model], one_rank[model])
    check_first_ratios(many_ranks[layout, model])
    check_first_ratios(many_ranks[layout, model, "bf16"])


@pytest.mark.parametrize("layout", [layout for layout, model in CASES if model == "experts"])
def test_the_newest_balances_experts_as_the_installed_one(
    layout: str, many_ranks: Any, one_rank: dict[str, Any]
) -> None:
    assert many_ranks[layout, "balanced"] == pytest.approx(one_rank["balanced"], rel=1e-5)


@pytest.mark.usefixtures("many_ranks")
def test_the_newest_loads_the_installed_ones_checkpoint_in_every_layout(models: Path) -> None:
    check_report(read_json(models / "checkpoints" / "report.json"), 1)


def convert(*arguments: str | Path) -> str:
    """What a command of the newest shows; it has nothing to complain of."""
    command = [sys.executable, "-m", "megatron_hacpo", "convert", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def test_either_reads_the_others_checkpoints(tmp_path: Path) -> None:
    model = tmp_path / "hf"
    tensors = len(random_model(CONFIGS["llama"], model, torch.bfloat16).state_dict())
    convert("to-megatron", model, tmp_path / "newest")
    assert "common_backend" not in read_json(tmp_path / "newest" / "metadata.json")  # the newest wrote it
    assert verify_tensors(model, tmp_path / "newest", lambda size: None) == tensors
    hf_to_megatron(model, tmp_path / "installed", layout=TP2)
    assert "common_backend" in read_json(tmp_path / "installed" / "metadata.json")
    shown = convert("to-hf", tmp_path / "installed", tmp_path / "back", "--verify")
    assert f"{tensors} tensors are equal" in shown
    assert verify_tensors(tmp_path / "back", tmp_path / "newest", lambda size: None) == tensors


@pytest.mark.parametrize("layout", ["tp2 sp", "cp2 pp2 distributed optimizer"])
def test_the_newest_takes_on_the_installed_ones_training_state(layout: str, models: Path) -> None:
    """And gives it back as it was."""
    with runtime.alone() as world:
        save(models, layout, world, models / "one" / layout, alone=True)
    run_ranks("state_worker.py", 4, models, layout)
    with runtime.alone() as world:
        before, after = (tensors(models, layout, world, models / name / layout) for name in ("one", "again"))
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert torch.equal(tensor, after[key]), key

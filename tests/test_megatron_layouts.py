"""The same steps in every layout: tensor, pipeline and data parallel against one rank."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_steps import pair_config
from parity_worker import LAYOUTS, SETTINGS, steps_of

from megatron_hacpo.megatron.runtime import World


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Results of all layouts by (layout, agent[, "bf16"]), computed by two real processes."""
    folder = tmp_path_factory.mktemp("layouts")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    worker = Path(__file__).with_name("parity_worker.py")
    logs = [folder / f"rank{rank}.log" for rank in range(2)]
    ranks = []
    for rank, log in enumerate(logs):
        command = [sys.executable, str(worker), str(rank), str(store.port), str(folder / "results.pt")]
        with log.open("w") as file:
            ranks.append(
                subprocess.Popen(
                    command, stdout=file, stderr=file, env={**os.environ, "OMP_NUM_THREADS": "1"}
                )
            )
    codes = [process.wait(timeout=300) for process in ranks]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)
    return torch.load(folder / "results.pt")


@pytest.fixture(scope="module")
def one_rank(world: World) -> dict[str, Any]:
    return {name: steps_of(pair_config(*SETTINGS), name, world) for name in "AB"}


@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_gives_one_ranks_updates(
    layout: str, name: str, two_ranks: Any, one_rank: dict[str, Any]
) -> None:
    got, expected = two_ranks[layout, name], one_rank[name]
    assert len(expected["norms"]) == 12
    assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    for mine, theirs in zip(got["tallies"], expected["tallies"], strict=True):
        assert mine.keys() == theirs.keys()
        for metric in mine:
            (total, count), (expected_total, expected_count) = mine[metric], theirs[metric]
            assert count == expected_count
            assert total / max(count, 1) == pytest.approx(expected_total / max(count, 1), abs=1e-5), metric
    assert got["lonely"] == pytest.approx(expected["lonely"], rel=1e-5)
    assert got["cosine"] == pytest.approx(expected["cosine"], abs=1e-4)
    assert got["weights"].keys() == expected["weights"].keys()
    for key, weight in expected["weights"].items():
        torch.testing.assert_close(got["weights"][key], weight, atol=1e-5, rtol=0, msg=key)


@pytest.mark.parametrize("precision", [(), ("bf16",)])
@pytest.mark.parametrize("name", ["A", "B"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_first_own_ratio_is_exactly_one_in_every_layout(
    layout: str, name: str, precision: tuple[str, ...], two_ranks: Any
) -> None:
    first_updates = two_ranks[(layout, name, *precision)]["ratios"][::4]
    assert len(first_updates) == 3
    for ratios in first_updates:
        assert float((ratios - 1.0).abs().max()) == 0.0

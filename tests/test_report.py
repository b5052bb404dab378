"""What is written, read back, summed up and drawn."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_hacpo.config import dump, load
from megatron_hacpo.report import Meter, MetricsWriter, draw_curves, summarise, table, write_summary
from megatron_hacpo.report.curves import smooth
from megatron_hacpo.report.files import Tail, read_rows

PAIR = Path(__file__).parent.parent / "examples" / "tiny" / "pair.yaml"


def test_rows_are_json_lines_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "A", tensorboard=False)
    values = {
        "nan": math.nan,
        "inf": -math.inf,
        "none": None,
        "numpy": np.float32(0.5),
        "torch": torch.tensor(2),
    }
    writer.step({"step": 1, **values})
    lines = (tmp_path / "A" / "metrics.jsonl").read_text().splitlines()
    assert lines == ['{"step": 1, "nan": null, "inf": null, "none": null, "numpy": 0.5, "torch": 2}']
    writer.samples([{"step": 1, "prompt": "1+1=", "text": "zwei\n\u00fc", "reward": math.nan}])
    assert read_rows(tmp_path / "A" / "samples.jsonl")[0]["text"] == "zwei\n\u00fc"
    assert read_rows(tmp_path / "A" / "samples.jsonl")[0]["reward"] is None
    writer.evaluation({"step": 0, "sampled": 0.25})
    assert read_rows(tmp_path / "A" / "eval.jsonl") == [{"step": 0, "sampled": 0.25}]


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.step({"step": 3, "reward/mean": 0.5, "loss/kl": math.nan})
    writer.evaluation({"step": 3, "sampled": 0.75})
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["eval/sampled", "reward/mean"]
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(3, 0.5)]


def test_wandb_gets_the_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(log=logged.append, finish=lambda: logged.append("finished"))
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **settings: logged.append(settings) or run)
    )
    writer = MetricsWriter(tmp_path / "run" / "A", tensorboard=False, wandb=True)
    writer.step({"step": 3, "reward/mean": 0.5})
    writer.close()
    assert logged[0]["name"] == "run/A"
    assert logged[1:] == [{"reward/mean": 0.5, "step": 3}, "finished"]
    MetricsWriter(tmp_path / "run" / "A", tensorboard=False, wandb=True, after=3).close()
    MetricsWriter(tmp_path / "run" / "B", tensorboard=False, wandb=True).close()
    first, second, other = (
        settings["id"] for settings in logged if isinstance(settings, dict) and "id" in settings
    )
    assert first == second != other


def test_wandb_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"^report.wandb: true: wandb is not installed; "):
        MetricsWriter(tmp_path, tensorboard=False, wandb=True)


def test_a_tail_reads_on_and_waits_for_the_newline(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    tail = Tail(path)
    assert list(tail.new_rows()) == []
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert [row["step"] for row in tail.new_rows()] == [1, 2]
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')
    assert [row["step"] for row in tail.new_rows()] == [3]


def test_a_meter_averages_by_count_and_knows_what_it_has_not_seen() -> None:
    meter = Meter()
    meter.add("mean", 3.0, 2)
    meter.add("mean", 1.0, 6)
    meter.add("never", 0.0, 0)
    meter.maximum("max", 2.0)
    meter.maximum("max", 1.0)
    meter.maximum("none", None)
    meter.maximum("broken", 1.0)
    meter.maximum("broken", math.nan)
    meter.maximum("broken", 5.0)
    values = meter.values()
    assert math.isnan(values.pop("broken") or 0.0)
    assert values == {"mean": 0.5, "never": None, "max": 2.0, "none": None}


@given(st.lists(st.tuples(st.integers(-50, 50), st.integers(0, 9)), max_size=12), st.data())
def test_a_meter_does_not_care_for_the_split(pairs: list[tuple[int, int]], data: st.DataObject) -> None:
    whole, parts = Meter(), [Meter(), Meter(), Meter()]
    for total, count in pairs:
        for meter in (whole, data.draw(st.sampled_from(parts))):
            meter.add("mean", total, count)
            meter.maximum("max", total)
    merged = Meter()
    for part in parts:
        merged.merge(part)
    assert merged.values() == whole.values()


def a_run(folder: Path, evaluations: bool = True) -> Path:
    config = load(PAIR, [f"run.dir={folder}"])
    for index, name in enumerate(config.names):
        writer = MetricsWriter(config.path / name, tensorboard=False)
        for step in range(1, 5 + index):
            writer.step({"step": step, "reward/mean": step / 10, "time/step": 1.0 + index})
        for step in (0, 2, 4) if evaluations else ():
            accuracies = {"sampled": 0.25 + step / 10, "sampled/ci95": 0.1, "aime/avg@30": 0.5}
            writer.evaluation({"step": step, **accuracies, "aime/pass@8": 0.75})
        writer.close()
    (config.path / "config.yaml").write_text(dump(config))
    return config.path


def test_summary_holds_start_and_end(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    write_summary(run_dir, wall_seconds=12.5)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["method"] == "hacpo"
    assert (summary["steps"], summary["seconds"], summary["wall_seconds"]) == (4, 10.0, 12.5)
    assert summary["agents"]["A"] == {
        "model": "examples/tiny/A",
        "start": {"sampled": 0.25, "aime/avg@30": 0.5},
        "end": {"step": 4, "sampled": 0.65, "aime/avg@30": 0.5},
        "reward": {"first": 0.1, "last": 0.4},
    }
    assert summarise(run_dir) == summary, "the wall time of the run is kept"


def test_summary_of_a_run_that_has_only_begun(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, evaluations=False)
    (run_dir / "B" / "metrics.jsonl").unlink()
    summary = summarise(run_dir)
    assert (summary["steps"], summary["wall_seconds"]) == (0, None)
    assert summary["agents"]["B"]["end"] == {"step": None}
    assert summary["agents"]["B"]["reward"] == {"first": None, "last": None}
    table(summary)


def test_table_of_agents_of_which_one_was_not_measured_yet(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path)
    (run_dir / "B" / "eval.jsonl").write_text("")
    console = Console(width=120, record=True)
    console.print(table(summarise(run_dir)))
    assert "- -> -" in console.export_text()


def test_table_shows_start_and_end(tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table(summarise(a_run(tmp_path))))
    assert "0.250 -> 0.650" in shown.get()


@pytest.mark.parametrize("evaluations, panels", [(True, 2), (False, 1)])
def test_curves_are_drawn(tmp_path: Path, evaluations: bool, panels: int) -> None:
    pixels = image.imread(draw_curves(a_run(tmp_path, evaluations)))
    assert pixels.shape[:2] == (600, 900 * panels)
    for agent_colour in ((0, 114, 178), (213, 94, 0)):
        assert (np.rint(pixels[..., :3] * 255) == agent_colour).all(axis=-1).any()


def test_smoothing_is_a_trailing_mean() -> None:
    assert smooth([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
    assert smooth([1.0, 3.0], 1) == [1.0, 3.0]

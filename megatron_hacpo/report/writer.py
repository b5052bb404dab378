"""One agent's metrics on their way out: JSON lines always, TensorBoard and W&B where asked for."""

import importlib
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_hacpo.report.files import EVALUATION, METRICS, SAMPLES, plain, write_row

WANDB_ID = "wandb_id"
"""File with the name by which W&B knows an agent's run."""


class MetricsWriter:
    """Writes into one agent's folder; exactly one process of the agent has one. Rows carry their `step`."""

    def __init__(
        self, folder: str | Path, *, tensorboard: bool = True, wandb: bool = False, after: int = 0
    ) -> None:
        """folder: RUN_DIR/AGENT, made if missing. after: the step that the rows in it end with.

        Raises ValueError if there are rows and `after` is 0.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (METRICS, EVALUATION, SAMPLES):
            if after == 0 and (folder / name).exists() and (folder / name).stat().st_size > 0:
                raise ValueError(f"run.name: {folder / name} is an earlier run's; choose another name")
        self._metrics = (folder / METRICS).open("a", encoding="utf-8")
        self._evaluations = (folder / EVALUATION).open("a", encoding="utf-8")
        self._samples = (folder / SAMPLES).open("a", encoding="utf-8")
        self._tensorboard = _open_tensorboard(folder, after) if tensorboard else None
        self._wandb = _open_wandb(folder, after) if wandb else None

    def step(self, row: Mapping[str, Any]) -> None:
        """A step's metrics: `step` and name -> number or None."""
        write_row(self._metrics, row)
        self._scalars(row, prefix="")

    def evaluation(self, row: Mapping[str, Any]) -> None:
        """An evaluation: `step` (0 before training) and the metrics of docs/evaluation.md."""
        write_row(self._evaluations, row)
        self._scalars(row, prefix="eval/")

    def samples(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Responses: `step`, `prompt`, `text`, `reward`, `source`, `ratio`, `advantage`."""
        for row in rows:
            write_row(self._samples, row)

    def sync(self) -> None:
        """Put all rows on the disk itself, as a checkpoint that follows them will be."""
        for file in (self._metrics, self._evaluations, self._samples):
            os.fsync(file.fileno())

    def close(self) -> None:
        """Write out what is buffered; the writer is of no use afterwards."""
        for file in (self._metrics, self._evaluations, self._samples):
            file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def _scalars(self, row: Mapping[str, Any], prefix: str) -> None:
        step = int(row["step"])
        numbers = {
            prefix + name: float(value)
            for name, value in plain(row).items()
            if name != "step" and isinstance(value, int | float)
        }
        if self._tensorboard is not None:
            for name, number in numbers.items():
                self._tensorboard.add_scalar(name, number, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(numbers | {"step": step})


def _open_tensorboard(folder: Path, after: int) -> Any:
    """With what an attempt before wrote of later steps declared void."""
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1 if after else 0)


def _open_wandb(folder: Path, after: int) -> Any:
    """The same run for all attempts. W&B keeps what an attempt before logged of later steps; the metric
    `step` tells which is which."""
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError:
        raise ValueError(
            "report.wandb: true: wandb is not installed; install megatron-hacpo[wandb] or write false"
        ) from None
    run = f"{folder.resolve().parent.name}/{folder.name}"
    known = folder / WANDB_ID
    if after == 0 or not known.is_file():
        known.write_text(secrets.token_hex(8), encoding="utf-8")
    return wandb.init(
        project="megatron-hacpo",
        name=run,
        dir=str(folder),
        id=known.read_text(encoding="utf-8"),
        resume="allow",
    )

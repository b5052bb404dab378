"""The launcher's screen: how far the run is, how good the agents are, and where the time goes."""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megatron_hacpo.config import RunConfig
from megatron_hacpo.launch.placement import Placement
from megatron_hacpo.report.files import EVALUATION, METRICS, Tail, headlines

PARTS = ("rollout", "reward", "logprob", "exchange", "waiting", "update", "sync")
"""Parts of a step, as in the metrics time/PART."""

RECENT = 10
"""Steps that shown times and rewards are means of."""


class AgentView:
    """What one agent has reported so far, read from its files as they grow."""

    def __init__(self, folder: Path) -> None:
        self._metrics = Tail(folder / METRICS)
        self._evaluations = Tail(folder / EVALUATION)
        self._recent: deque[dict[str, Any]] = deque(maxlen=RECENT)
        self.steps = 0
        self.evaluation: dict[str, Any] = {}

    def update(self) -> list[dict[str, Any]]:
        """Read on; returns new evaluations."""
        for row in self._metrics.new_rows():
            self._recent.append(row)
            self.steps = row["step"]
        evaluations = list(self._evaluations.new_rows())
        if evaluations:
            self.evaluation = evaluations[-1]
        return evaluations

    def mean(self, name: str) -> float | None:
        """Mean of a metric over the most recent steps that have it."""
        values = [row[name] for row in self._recent if row.get(name) is not None]
        return sum(values) / len(values) if values else None


class WarningTail:
    """Follows the processes' logs for lines that begin with `warning: `."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    def new_lines(self) -> list[str]:
        """The warnings completed since the last call."""
        found = []
        for path in sorted(self._folder.glob("*.log")):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                complete, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] = self._offsets.get(path, 0) + len(complete) + len(newline)
            lines = complete.decode("utf-8", errors="replace").splitlines()
            found += [line for line in lines if line.startswith("warning: ")]
        return found


class RunView:
    """A live table on a terminal, elsewhere a plain line every few seconds. A context, to be ticked often."""

    def __init__(
        self, run_dir: Path, agents: Sequence[str], steps: int, console: Console, line_seconds: float = 5.0
    ) -> None:
        """steps: of the whole run. line_seconds: between plain lines."""
        self._agents = {name: AgentView(run_dir / name) for name in agents}
        self._warnings = WarningTail(run_dir / "logs")
        self._steps = steps
        self._console = console
        self._line_seconds = line_seconds
        self._last_line, self._last_step = -line_seconds, 0
        self._progress = Progress(
            TextColumn("step"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
        )
        self._task = self._progress.add_task("", total=steps)
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "RunView":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.tick(final=True)
        if self._live:
            self._live.stop()

    def lose(self, agent: str) -> None:
        """Wait no more for an agent that has ended."""
        del self._agents[agent]

    def tick(self, final: bool = False) -> None:
        """Show what is new. final: also what a plain line would still wait with."""
        for line in self._warnings.new_lines():
            self._console.print(line, highlight=False, markup=False, soft_wrap=True)
        for name, agent in self._agents.items():
            for row in agent.update():
                self._console.print(_evaluation_line(name, row), highlight=False)
        step = min(agent.steps for agent in self._agents.values())
        if self._live:
            self._progress.update(self._task, completed=step)
            self._live.update(Group(self._progress, time_table(self._agents)), refresh=True)
            return
        now = time.monotonic()
        if step > self._last_step and (final or now - self._last_line >= self._line_seconds):
            self._last_line, self._last_step = now, step
            line = f"step {step}/{self._steps}  {plain_line(self._agents)}"
            self._console.print(line, highlight=False, soft_wrap=True)


def placement_table(config: RunConfig, placements: Sequence[Placement]) -> Table:
    """One line an agent: its sizes, and which devices of which nodes its processes and its servers have."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("agent", style="bold")
    for title in ("processes", "tensor x pipeline x context x data", "devices", "servers' devices"):
        table.add_column(title)
    for placement in placements:
        parallel = config.agents[placement.agent].parallel
        sizes = (parallel.tensor, parallel.pipeline, parallel.context, parallel.data)
        table.add_row(
            placement.agent,
            str(placement.world_size),
            " x ".join(map(str, sizes)),
            " ".join(map(str, placement.ranks)),
            " ".join(map(str, placement.servers)) or "-",
        )
    return table


def time_table(agents: Mapping[str, AgentView]) -> Table:
    """One line an agent: steps, reward, latest accuracy, seconds a step and their parts."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    table.add_column("agent", style="bold")
    for title in ("step", "reward", "accuracy", "s/step", *PARTS):
        table.add_column(title, justify="right")
    for name, agent in agents.items():
        times = [_number(agent.mean(f"time/{part}"), 2) for part in ("step", *PARTS)]
        accuracy = _number(next((agent.evaluation[key] for key in headlines([agent.evaluation])), None), 3)
        table.add_row(name, str(agent.steps), _number(agent.mean("reward/mean"), 3), accuracy, *times)
    return table


def plain_line(agents: Mapping[str, AgentView]) -> str:
    """Rewards of all agents, and the step's parts of the slowest one."""
    rewards = "  ".join(
        f"{name} reward {_number(agent.mean('reward/mean'), 3)}" for name, agent in agents.items()
    )
    slowest = max(agents.values(), key=lambda agent: agent.mean("time/step") or 0.0)
    parts = " ".join(f"{part} {_number(slowest.mean(f'time/{part}'), 2)}" for part in PARTS)
    return f"{rewards}  {_number(slowest.mean('time/step'), 2)} s/step: {parts}"


def _evaluation_line(name: str, row: Mapping[str, Any]) -> str:
    accuracies = ", ".join(f"{_number(row[key], 3)} {key}" for key in headlines([row]))
    return f"{name} at step {row['step']}: accuracy {accuracies}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"

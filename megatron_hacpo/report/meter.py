"""Means that stay right under any split: every metric is a sum and a count until the end."""

import math


class Meter:
    """Accumulates the metrics of one step. Micro-batches, mini-batches and ranks may come in any split."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._maxima: dict[str, float | None] = {}

    def add(self, name: str, total: float, count: float = 1) -> None:
        """`total` is a sum over `count` values. Count 0 makes the name known: its mean is null."""
        assert count >= 0
        old_total, old_count = self._sums.get(name, (0.0, 0.0))
        self._sums[name] = (old_total + float(total), old_count + float(count))

    def maximum(self, name: str, value: float | None) -> None:
        """Keep the largest value; NaN is above everything, and None only makes the name known."""
        old = self._maxima.setdefault(name, None)
        if value is not None and (old is None or math.isnan(value) or value > old):
            self._maxima[name] = float(value)

    def merge(self, other: "Meter") -> None:
        """Take in what another meter, such as another rank's, has seen."""
        for name, (total, count) in other._sums.items():
            self.add(name, total, count)
        for name, value in other._maxima.items():
            self.maximum(name, value)

    def values(self) -> dict[str, float | None]:
        """Means and maxima by name, null where nothing was seen."""
        means = {name: total / count if count else None for name, (total, count) in self._sums.items()}
        assert not means.keys() & self._maxima.keys(), "a name is either a mean or a maximum"
        return {**means, **self._maxima}

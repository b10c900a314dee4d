"""What wrappers measure with: counters, gauges and histograms by name, each bound to its labels once and then cheap to move.

Owns the checks of names and labels against the table, and a meter that remembers for tests. Knows no Ray. Invariant: a label's value is one
of its table's or `other`, so a meter never holds more instruments than the table has combinations.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from actors.observability.table import LABELS, METRICS, OTHER, Kind, Metric


class Counter(Protocol):
    def add(self, amount: float = 1.0) -> None:
        """Only up; 0 moves nothing."""
        ...


class Gauge(Protocol):
    def set(self, value: float) -> None: ...


class Histogram(Protocol):
    def observe(self, value: float, times: int = 1) -> None:
        """The same value so many times."""
        ...


class Meter(ABC):
    """Asking twice with equal labels gives the same instrument. A wrong name, kind or set of labels is our own bug: KeyError, or an assert."""

    def __init__(self) -> None:
        self._instruments: dict[tuple[str, tuple[str, ...]], Counter | Gauge | Histogram] = {}

    def counter(self, name: str, **labels: str) -> Counter:
        return self._bound(name, Kind.COUNTER, labels)  # type: ignore[return-value]  # by its kind

    def gauge(self, name: str, **labels: str) -> Gauge:
        return self._bound(name, Kind.GAUGE, labels)  # type: ignore[return-value]

    def histogram(self, name: str, **labels: str) -> Histogram:
        return self._bound(name, Kind.HISTOGRAM, labels)  # type: ignore[return-value]

    @property
    def instruments(self) -> int:
        """How many series there are."""
        return len(self._instruments)

    def _bound(self, name: str, kind: Kind, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        metric = METRICS[name]
        assert metric.kind is kind, f"{name} is a {metric.kind}, not a {kind}"
        assert labels.keys() == set(metric.labels), f"{name} has the labels {metric.labels}, not {tuple(labels)}"
        values = tuple(labels[label] if labels[label] in LABELS[label] else OTHER for label in metric.labels)
        bound = self._instruments.get((name, values))
        if bound is None:
            known = {label: str(value) for label, value in zip(metric.labels, values, strict=True)}
            bound = self._instruments[name, values] = self._bind(metric, known)
        return bound

    @abstractmethod
    def _bind(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram: ...


@dataclass(slots=True)
class Remembered:
    """`value`: a counter's or gauge's; `observed`: a histogram's values."""

    value: float = 0.0
    observed: list[float] = field(default_factory=list)

    def add(self, amount: float = 1.0) -> None:
        assert amount >= 0, "a counter went down"
        self.value += amount

    def set(self, value: float) -> None:
        self.value = value

    def observe(self, value: float, times: int = 1) -> None:
        self.observed += [value] * times


class MemoryMeter(Meter):
    """For tests: remembers everything."""

    def _bind(self, metric: Metric, labels: dict[str, str]) -> Remembered:
        return Remembered()

    def read(self, name: str) -> dict[tuple[str, ...], float]:
        """A counter's or gauge's values by label values, in the table's order of labels; those that never moved are left out."""
        return {values: bound.value for values, bound in self._of(name) if bound.value}

    def observed(self, name: str) -> dict[tuple[str, ...], list[float]]:
        """A histogram's observations by label values."""
        return {values: list(bound.observed) for values, bound in self._of(name) if bound.observed}

    def _of(self, name: str) -> list[tuple[tuple[str, ...], Remembered]]:
        found = []
        for (known, values), bound in self._instruments.items():
            if known == name:
                assert isinstance(bound, Remembered)
                found.append((values, bound))
        return found

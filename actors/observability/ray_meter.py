"""The meter over Ray's metrics, which each node's Ray agent exposes to Prometheus.

Owns all that this project knows of `ray.util.metrics`. Invariant: a counter's series of its side is there from the start, at 0, so that a
rate can be taken of its first move.

One call costs 2-3 us here, and about as much in Ray's agent, which is another process.
"""

from __future__ import annotations

from typing import Any

from ray.util import metrics as ray_metrics

from actors.observability.metrics import Counter, Gauge, Histogram, Meter
from actors.observability.table import COMMON_LABELS, Kind, Metric, Side, of_side


class RayMeter(Meter):
    """Of one process. `app`, `model`, `role`: the labels that all its metrics have."""

    def __init__(self, side: Side, *, app: str, model: str, role: str) -> None:
        super().__init__()
        self._common = {"app": app, "model": model, "role": role}
        self._made: dict[str, Any] = {}
        for metric in of_side(side):
            for labels in metric.label_sets() if metric.kind is Kind.COUNTER else ():
                self.counter(metric.name, **labels)

    def _bind(self, metric: Metric, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        made = self._made.get(metric.name)
        if made is None:
            made = self._made[metric.name] = _make(metric)
        tags = {**self._common, **labels}
        if metric.kind is Kind.COUNTER:
            return _RayCounter(made, tags)
        return _RayGauge(made, tags) if metric.kind is Kind.GAUGE else _RayHistogram(made, tags)


def _make(metric: Metric) -> Any:
    keys = (*COMMON_LABELS, *metric.labels)
    if metric.kind is Kind.COUNTER:
        return ray_metrics.Counter(metric.name, metric.help, keys)
    if metric.kind is Kind.GAUGE:
        return ray_metrics.Gauge(metric.name, metric.help, keys)
    return ray_metrics.Histogram(metric.name, metric.help, list(metric.buckets), keys)


class _RayCounter:
    def __init__(self, made: Any, tags: dict[str, str]) -> None:
        self._made = made
        self._tags = tags
        made._record(0.0, tags)  # `inc` refuses 0, and without it the series begins at its first move

    def add(self, amount: float = 1.0) -> None:
        assert amount >= 0, "a counter went down"
        if amount:
            self._made.inc(amount, self._tags)


class _RayGauge:
    def __init__(self, made: Any, tags: dict[str, str]) -> None:
        self._made = made
        self._tags = tags

    def set(self, value: float) -> None:
        self._made.set(value, self._tags)


class _RayHistogram:
    def __init__(self, made: Any, tags: dict[str, str]) -> None:
        self._made = made
        self._tags = tags

    def observe(self, value: float, times: int = 1) -> None:
        for _ in range(times):
            self._made.observe(value, self._tags)

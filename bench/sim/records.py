"""What became of each request, and what that says of a run.

Owns the statistics. Invariant: every request that arrived in the measured window counts; one that never got its first token has a
time to first token of infinity, so that it misses every objective.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from cpd_ray.types import Role
from placement.routing.types import Route


@dataclass(slots=True)
class Record:
    """Filled in as the request goes along. `ttft_s` infinite: not served (yet)."""

    name: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    route: Route | None = None
    role: Role | None = None
    believed_cached_tokens: int = 0
    cached_tokens: int = 0
    computed_tokens: int = 0
    predicted_ttft_s: float = math.nan
    ttft_s: float = math.inf
    end_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Objective:
    """The service level: time to first token at two quantiles."""

    p50_s: float = 1.0
    p90_s: float = 8.0

    def met_by(self, ttft_s: Sequence[float]) -> bool:
        return quantile(ttft_s, 0.5) <= self.p50_s and quantile(ttft_s, 0.9) <= self.p90_s


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; infinite when those that never ended reach in; 0 for none."""
    ordered = sorted(values)
    if not ordered:
        return 0.0
    return ordered[min(len(ordered) - 1, max(0, math.ceil(share * len(ordered)) - 1))]


@dataclass(slots=True)
class Outcome:
    """One run. `records`: of the measured window. `aborted`: stopped early, as the objective could no longer be met."""

    system: str
    workload: str
    qps: float
    seed: int
    window_s: float
    gpus: int
    records: list[Record] = field(default_factory=list)
    aborted: bool = False
    computed_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens_served: int = 0
    wall_s: float = 0.0

    def ttft_s(self, keep: Callable[[Record], bool] = lambda _: True) -> list[float]:
        return [r.ttft_s for r in self.records if keep(r)]

    def of_route(self, route: Route) -> list[float]:
        return self.ttft_s(lambda r: r.route is route)

    @property
    def warm_on_prefill_share(self) -> float:
        """Of the warm requests that were placed, the share that ran on the prefill pool."""
        placed = [r for r in self.records if r.route is Route.WARM and r.role is not None]
        return sum(r.role is Role.PREFILL for r in placed) / len(placed) if placed else math.nan

    def meets(self, objective: Objective) -> bool:
        return bool(self.records) and not self.aborted and objective.met_by(self.ttft_s())

    @property
    def prediction_error(self) -> float:
        """Median |predicted - actual| / actual time to first token."""
        errors = [abs(r.predicted_ttft_s - r.ttft_s) / r.ttft_s for r in self.records if math.isfinite(r.ttft_s) and r.ttft_s > 0]
        return float(np.median(errors)) if errors else math.nan

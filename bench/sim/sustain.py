"""The largest rate that a system sustains under the objective, by bisection, seed by seed.

Owns the search. Invariant: the answer is a multiple of the tolerance at which the run met the objective, while the next multiple did
not (or 0 when even the lowest rate failed).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from scipy import stats

from bench.sim.records import Objective
from bench.sim.run import Window, simulate
from bench.sim.systems import Setup, System
from bench.workload.types import Workload

MOST_QPS = 64.0


@dataclass(frozen=True, slots=True)
class Sustained:
    """`by_seed[i]` belongs to seed `seeds[i]`; `runs`: how many simulations it took."""

    system: str
    workload: str
    seeds: tuple[int, ...]
    by_seed: tuple[float, ...]
    runs: int

    @property
    def mean(self) -> float:
        return sum(self.by_seed) / len(self.by_seed)


def largest(meets: Callable[[float], bool], tolerance: float, guess: float) -> float:
    """The largest multiple of `tolerance` that `meets`, for a condition that holds up to some rate: from `guess` outwards in doubling
    steps, then bisection."""

    def ask(n: int) -> bool:
        return meets(n * tolerance)

    low: int = 0
    high: int | None = None
    at, step = max(1, round(guess / tolerance)), max(1, round(0.08 * guess / tolerance))
    while high is None or high - low > 1:
        if ask(at):
            low = at
        else:
            high = at
        if high is None:
            if low * tolerance >= MOST_QPS:
                break
            at, step = low + step, step * 2
        elif low == 0:
            at, step = max(1, high - step), step * 2
            if high == 1:
                break
        else:
            at = (low + high) // 2
    return low * tolerance


def sustained(
    system: System,
    workload: Workload,
    seeds: tuple[int, ...],
    *,
    tolerance: float,
    setup: Setup,
    window: Window,
    objective: Objective | None = None,
    guess: float = 1.0,
) -> Sustained:
    """Bisection for each seed, beginning at the previous seed's answer."""
    objective = objective or Objective()
    runs = 0
    found: list[float] = []
    for seed in seeds:

        def meets(qps: float, seed: int = seed) -> bool:
            nonlocal runs
            runs += 1
            return simulate(system, workload, qps, seed, setup=setup, window=window, give_up_on=objective).meets(objective)

        guess = largest(meets, tolerance, guess)
        found.append(round(guess, 6))
        guess = max(guess, 4 * tolerance)
    return Sustained(system.name, workload.name, seeds, tuple(found), runs)


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean and two-sided 95 % Student interval over seeds; with one seed the interval is the point."""

    mean: float
    low: float
    high: float


def interval(values: list[float]) -> Interval:
    """Raises ValueError for no values."""
    if not values:
        raise ValueError("an interval of no values")
    mean = sum(values) / len(values)
    if len(values) == 1:
        return Interval(mean, mean, mean)
    deviation = math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1))
    half = float(stats.t.ppf(0.975, len(values) - 1)) * deviation / math.sqrt(len(values))
    return Interval(mean, mean - half, mean + half)


def paired_ratio(ours: tuple[float, ...], theirs: tuple[float, ...]) -> Interval:
    """Of rates on the same seeds: the ratio's mean over seeds; infinite where theirs sustains nothing."""
    return interval([a / b if b else math.inf for a, b in zip(ours, theirs, strict=True)])

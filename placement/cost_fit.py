"""How long a step takes, learnt while serving: the coefficients of `StepCost` from the steps that were run.

Owns the fit only; it measures nothing and decides nothing. Recursive least squares in information form: each observation adds to a
4x4 matrix whose older part fades, and every few of them the coefficients are solved for anew. Invariant: none is ever negative.

Errors are counted relative to what was measured, so that a 20 ms decode step weighs as much as a 2 s chunk, and a stall of any
length errs by less than one; beyond three times the usual error a step weighs less (Huber), so that a first step's warm-up
does not bend the fit. What the recent steps do not tell apart (a long run of equal decode steps) stays where the last solution
had it, instead of fading.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import nnls

from cpd_ray.messages import StepCost

PRIOR = StepCost(base_s=1e-2, per_token_s=1e-3, per_attention_s=1e-7, per_sequence_s=1e-3, samples=0)
"""A 135M-parameter model on two CPU cores, to an order of magnitude: what is believed before anything is measured."""

_HUBER = 3.0
_FIRST_SPREAD = 0.5
_LEAST_SPREAD = 0.01
_SPREAD_RATE = 0.05
_ANCHOR = 1e-3
_SOLVE_EVERY = 8
"""Observations between two solutions, once there are as many as that."""
_FLOOR_S = 1e-9


class StepCostFit:
    """`memory_steps`: an observation's weight falls to 1/e after that many more."""

    def __init__(self, prior: StepCost = PRIOR, *, memory_steps: int = 1000) -> None:
        if memory_steps < 1:
            raise ValueError(f"a fit must remember at least one step, not {memory_steps}")
        self._keep = math.exp(-1 / memory_steps)
        self._coefficients = np.array([prior.base_s, prior.per_token_s, prior.per_attention_s, prior.per_sequence_s])
        if (self._coefficients < 0).any():
            raise ValueError("a step's prior costs can't be negative")
        self._information = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._spread = _FIRST_SPREAD
        self._samples = prior.samples
        self._unsolved = 0
        self._cost = prior

    @property
    def cost(self) -> StepCost:
        """The coefficients as they are believed now."""
        return self._cost

    def observe(self, new_tokens: int, attention: float, sequences: int, seconds: float) -> None:
        """Learn from one step; raises ValueError for a time that is not positive and finite."""
        if not (seconds > 0 and math.isfinite(seconds)):
            raise ValueError(f"a step can't have taken {seconds} s")
        predicted = max(self._cost.predict_s(new_tokens, attention, sequences), _FLOOR_S)
        deviation = abs(math.log(seconds / predicted))
        weight = min(1.0, _HUBER * self._spread / deviation) if deviation else 1.0
        row = np.array([1.0, new_tokens, attention, sequences]) / seconds
        self._information = self._keep * self._information + weight * np.outer(row, row)
        self._moment = self._keep * self._moment + weight * row
        self._spread += _SPREAD_RATE * (min(deviation, 2 * _HUBER * self._spread) - self._spread)
        self._spread = max(self._spread, _LEAST_SPREAD)
        self._samples += 1
        self._unsolved += 1
        if self._samples <= _SOLVE_EVERY or self._unsolved >= _SOLVE_EVERY:
            self._solve()

    def _solve(self) -> None:
        """Least squares under non-negativity, held to the last solution where the observations say nothing."""
        self._unsolved = 0
        unit = np.sqrt(np.diag(self._information))
        unit[unit == 0] = 1.0  # nothing seen of it yet: only the anchor counts
        matrix = self._information / np.outer(unit, unit) + _ANCHOR * np.eye(4)
        lower = np.linalg.cholesky(matrix)
        target = np.linalg.solve(lower, self._moment / unit + _ANCHOR * self._coefficients * unit)
        solution, _ = nnls(lower.T, target)
        self._coefficients = solution / unit
        base, token, pair, sequence = (float(c) for c in self._coefficients)
        self._cost = StepCost(base, token, pair, sequence, samples=self._samples)

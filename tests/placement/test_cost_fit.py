"""The step-time fit against known machines, with noise, stalls, a slow first step and long monotonous stretches."""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd_ray.messages import StepCost
from placement.cost_fit import PRIOR, StepCostFit

Step = tuple[int, float, int]

MACHINES = [
    StepCost(0.03, 1.2e-3, 3e-7, 2e-3),
    StepCost(0.02, 2e-5, 1e-10, 1e-4),
    StepCost(0.0, 5e-1, 1e-4, 0.0),
]


def decode(rng: np.random.Generator, batch: int | None = None) -> Step:
    n = batch or int(rng.integers(1, 17))
    return n, float((rng.integers(1, 4000, size=n) + 0.5).sum()), n


def prefill(rng: np.random.Generator) -> Step:
    n = int(rng.integers(16, 512))
    return n, float(n * (rng.integers(0, 8000) + n / 2)), int(rng.integers(1, 5))


def error(fit: StepCostFit, machine: StepCost, steps: list[Step]) -> float:
    """Median relative error of prediction."""
    return statistics.median(abs(fit.cost.predict_s(*step) / machine.predict_s(*step) - 1) for step in steps)


@pytest.mark.parametrize(("stall_share", "stall_factor"), [(0.03, 10), (0.1, 3)])
@pytest.mark.parametrize("machine", MACHINES)
def test_it_learns_any_machine_through_noise_stalls_and_a_cold_start(
    machine: StepCost, stall_share: float, stall_factor: float
) -> None:
    rng = np.random.default_rng(1)
    fit = StepCostFit()
    probe = [decode(rng) for _ in range(50)] + [prefill(rng) for _ in range(50)]
    assert fit.cost == PRIOR
    for i in range(400):
        step = decode(rng) if rng.random() < 0.5 else prefill(rng)
        seconds = machine.predict_s(*step) * float(np.exp(rng.normal(0, 0.05)))
        if i == 0:
            seconds *= 30
        elif rng.random() < stall_share:
            seconds *= stall_factor
        fit.observe(*step, seconds)
        if i == 30:
            assert error(fit, machine, probe) < 0.2, "useful after thirty steps"
    assert error(fit, machine, probe) < 0.01
    assert fit.cost.samples == pytest.approx(400, abs=8)


def test_a_long_stretch_of_decodes_does_not_unlearn_prompts() -> None:
    rng = np.random.default_rng(2)
    machine = MACHINES[0]
    fit = StepCostFit(memory_steps=200)
    for _ in range(400):
        step = decode(rng) if rng.random() < 0.5 else prefill(rng)
        fit.observe(*step, machine.predict_s(*step) * float(np.exp(rng.normal(0, 0.03))))
    for _ in range(5000):
        step = decode(rng, batch=16)
        fit.observe(*step, machine.predict_s(*step) * float(np.exp(rng.normal(0, 0.03))))
    assert error(fit, machine, [prefill(rng) for _ in range(100)]) < 0.25
    assert error(fit, machine, [decode(rng, batch=16) for _ in range(100)]) < 0.02


def test_it_follows_a_machine_that_changes() -> None:
    rng = np.random.default_rng(3)
    fit = StepCostFit(memory_steps=200)
    probe = [decode(rng) for _ in range(50)] + [prefill(rng) for _ in range(50)]
    for machine in (MACHINES[0], StepCost(0.06, 2.4e-3, 6e-7, 4e-3)):
        for _ in range(1500):
            step = decode(rng) if rng.random() < 0.5 else prefill(rng)
            fit.observe(*step, machine.predict_s(*step) * float(np.exp(rng.normal(0, 0.05))))
        assert error(fit, machine, probe) < 0.03


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1e9), st.integers(1, 256), st.floats(1e-6, 1e4)), max_size=60))
def test_no_coefficient_is_ever_negative_or_not_a_number(steps: list[tuple[int, float, int, float]]) -> None:
    fit = StepCostFit()
    for new, attention, sequences, seconds in steps:
        fit.observe(new, attention, sequences, seconds)
        cost = fit.cost
        values = np.array([cost.base_s, cost.per_token_s, cost.per_attention_s, cost.per_sequence_s])
        assert np.isfinite(values).all()
        assert (values >= 0).all()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_time_is_refused(seconds: float) -> None:
    fit = StepCostFit()
    with pytest.raises(ValueError, match="can't have taken"):
        fit.observe(1, 1.0, 1, seconds)
    assert fit.cost == PRIOR


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        StepCostFit(StepCost(-1.0, 0.0, 0.0, 0.0))
    with pytest.raises(ValueError, match="at least one step"):
        StepCostFit(memory_steps=0)

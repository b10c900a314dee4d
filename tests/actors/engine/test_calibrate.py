"""A fresh worker knows what a step takes before its first request."""

from __future__ import annotations

import pytest

from actors.engine.calibrate import calibrate
from actors.engine.plan import StepPlan, StepResult
from actors.engine.validation import EngineShape
from cpd_ray.messages import StepCost
from placement.cost_fit import StepCostFit

TRUE = StepCost(base_s=0.02, per_token_s=0.0012, per_attention_s=2e-7, per_sequence_s=0.001)


class Machine:
    """Takes as long as `TRUE` says, but ten times that for its first two steps."""

    def __init__(self, blocks: int, block_size: int) -> None:
        self.plans: list[StepPlan] = []
        self._blocks, self._block_size = blocks, block_size

    def run(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        for sequence in plan.sequences:
            assert len(sequence.block_table) * self._block_size >= sequence.start + len(sequence.tokens)
            assert max(sequence.block_table) < self._blocks
        seconds = TRUE.predict_s(plan.new_tokens, plan.attention, len(plan.sequences))
        return StepResult((), seconds * (10 if len(self.plans) <= 2 else 1))


def test_slow_first_steps_do_not_count_and_a_long_prompt_is_foreseen() -> None:
    machine, fit = Machine(256, 64), StepCostFit()
    calibrate(machine, EngineShape(64, 300, 8192), 256, fit.observe)
    assert fit.cost.samples == len(machine.plans) - 2
    for new, context in ((2048, 0), (1, 2048), (512, 4096)):
        attention = new * (context + new / 2)
        assert fit.cost.predict_s(new, attention, 1) == pytest.approx(TRUE.predict_s(new, attention, 1), rel=0.3)


@pytest.mark.parametrize(("blocks", "block_size", "longest"), [(2, 4, 8), (4, 1, 2), (8, 256, 512), (1000, 16, 20)])
def test_small_pools_and_short_models_are_kept_to(blocks: int, block_size: int, longest: int) -> None:
    machine = Machine(blocks, block_size)
    calibrate(machine, EngineShape(block_size, 300, longest), blocks, StepCostFit().observe)
    for plan in machine.plans:
        assert all(s.start + len(s.tokens) <= longest for s in plan.sequences)

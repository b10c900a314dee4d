"""A few steps before a worker serves: they warm the kernels up, and tell the cost model what a step takes here.

Owns the choice of steps. Without them the first real steps, slow for once, would be all that a router knows of a worker, and a worker that is
then avoided never learns better. Invariant: it runs before anything else uses the pool, whose blocks it writes to.
"""

from __future__ import annotations

from collections.abc import Callable

from actors.engine.plan import SequenceStep, StepPlan, StepRunner
from actors.engine.validation import EngineShape
from cpd_ray import tokens as token_buffers
from cpd_ray.ids import BlockId, RequestId
from cpd_ray.types import SamplingParams

CHUNK_TOKENS = 256
SHORT_TOKENS = 64
BATCH = 4

Observe = Callable[[int, float, int, float], None]
"""New tokens, attention, sequences, seconds: see `StepCost`."""


def calibrate(runner: StepRunner, shape: EngineShape, blocks: int, observe: Observe) -> None:
    """Run prompts of two lengths, one of them after a context, and decode steps of two batches; about 700 tokens in all. Blocking."""
    room = min(shape.max_model_len, blocks * shape.block_size // BATCH) - 1
    chunk, short = min(CHUNK_TOKENS, room // 2), min(SHORT_TOKENS, room // 2)
    if chunk < 1:
        return

    def step(sequences: int, context: int, new: int) -> StepPlan:
        per_sequence = -(-(context + new) // shape.block_size)
        history = token_buffers.unpack(token_buffers.pack([0] * (context + new)))
        return StepPlan(
            tuple(
                SequenceStep(
                    request_id=RequestId(f"calibration-{i}"),
                    start=context,
                    tokens=history[context:],
                    block_table=[BlockId(i * per_sequence + b) for b in range(per_sequence)],
                    sample=True,
                    sampling=SamplingParams(temperature=0.0),
                    output_index=0,
                    history=history,
                    prompt_tokens=context + new,
                )
                for i in range(sequences)
            )
        )

    for plan in (step(1, 0, short), step(1, short, 1)):
        runner.run(plan)  # first calls allocate and compile: they say nothing of later ones
    for plan in (step(1, 0, short), step(1, 0, chunk), step(1, chunk, chunk), step(1, chunk, 1), step(BATCH, chunk, 1)):
        observe(plan.new_tokens, plan.attention, len(plan.sequences), runner.run(plan).seconds)

"""A step: what the scheduler decided, and what the model runner gave back. No torch: the scheduler and the simulator import it.

Invariant: within a plan, sequences with one new token that have all their other KV (decodes) come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cpd_ray.errors import CPDError
from cpd_ray.ids import BlockId, RequestId
from cpd_ray.types import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Compute KV for tokens `[start, start + len(tokens))` of a request, whose blocks are `block_table` (token t lives in block
    `block_table[t // block_size]` at offset `t % block_size`). When `sample`, also choose the token after the last one.

    `output_index`: position of that token in the answer (the counter of the counter-based randomness). `history`: all tokens
    known so far (a uint32 view), `prompt_tokens` of them the client's: what penalties look at.
    """

    request_id: RequestId
    start: int
    tokens: memoryview
    block_table: Sequence[BlockId]
    sample: bool
    sampling: SamplingParams
    output_index: int
    history: memoryview
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    sequences: tuple[SequenceStep, ...]

    @property
    def new_tokens(self) -> int:
        return sum(len(s.tokens) for s in self.sequences)

    @property
    def attention(self) -> float:
        """Sum over sequences of new * (context before + new / 2): see `StepCost`."""
        return sum(len(s.tokens) * (s.start + len(s.tokens) / 2) for s in self.sequences)


@dataclass(frozen=True, slots=True)
class Sampled:
    """`token` is None when the sequence failed alone (`error`)."""

    request_id: RequestId
    token: int | None
    logprobs: TokenLogprobs | None = None
    error: CPDError | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One `Sampled` for each sequence of the plan with `sample`, in order. `seconds`: the step's wall time."""

    sampled: tuple[Sampled, ...]
    seconds: float


class StepRunner(Protocol):
    """Runs a plan to its end, blocking (the engine calls it off the event loop). One step at a time."""

    def run(self, plan: StepPlan) -> StepResult: ...

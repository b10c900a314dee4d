"""Who computes next, and how much: the pure arithmetic of the step's order and of its chunks.

Owns the formulas; reads no clock and changes nothing. Invariant: between two sequences that do not compute, the order never changes
while they wait, because both age alike; so what arrives more than `aging_s` * its remaining seconds after a sequence is behind it
for ever, and nobody starves.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.config import EngineConfig
from cpd_ray.messages import StepCost
from placement.cost_model import prefill_s

PRIORITY_S = 10.0
"""One level of priority outweighs so many seconds of work ..."""
PRIORITY_LEVELS = 10
"""... up to so many levels: an unbounded head start would starve the others."""

Standing = tuple[float, int]
"""Smaller goes first; the second part is the order of arrival and makes it unique."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a sequence still has to compute: tokens [start, stop)."""

    start: int
    stop: int

    def predict_s(self, cost: StepCost, chunk_tokens: int) -> float:
        """Seconds of computing it in chunks with nothing else in the way."""
        return prefill_s(cost, self.start, self.stop - self.start, chunk_tokens) if self.stop > self.start else 0.0


def standing(work: Work, arrival_s: float, priority: int, serial: int, config: EngineConfig, cost: StepCost) -> Standing:
    """A sequence's place: remaining seconds (none in `fcfs`), less what it has waited and what its priority is worth."""
    remaining_s = work.predict_s(cost, config.chunk_tokens) if config.order == "shortest" else 0.0
    level = max(-PRIORITY_LEVELS, min(PRIORITY_LEVELS, priority))
    return (remaining_s + arrival_s / config.aging_s - level * PRIORITY_S, serial)


def prefill_budget(config: EngineConfig, block_size: int, decodes: int, alone: bool) -> int:
    """Prompt tokens that a step may compute: a short chunk when others wait for its end, a long one when nobody does. At least a block,
    so that a batch of decodes does not shut prompts out."""
    return max(block_size, min(config.step_tokens if alone else config.chunk_tokens, config.step_tokens - decodes))


def worthwhile_tokens(cost: StepCost, start: int, finishing: int, behind: int) -> int | None:
    """How many tokens of a prompt at `start` may join a step in which `finishing` better-placed prompts get their first token; None:
    any number. They delay those by their own time, and spare the `behind` ones from here on the fixed cost of a step."""
    per_token_s = cost.per_token_s + cost.per_attention_s * start
    if not finishing or per_token_s <= 0:
        return None
    return int((cost.base_s * behind / finishing - cost.per_sequence_s) / per_token_s)


def chunk_length(work: Work, limit: int, block_size: int) -> int:
    """Tokens of the next chunk, at most `limit`: to the prompt's end, or to a block border, where a prompt can yield without a block
    half computed; 0 when neither is within reach (a limit of `block_size` always reaches one)."""
    if work.stop - work.start <= limit:
        return work.stop - work.start
    return max((work.start + limit) // block_size * block_size - work.start, 0)

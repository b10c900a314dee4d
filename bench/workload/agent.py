"""The paper's coding agent: sessions over a large shared code base that read, analyse, edit and iterate, beside one-off prompts.

Parameters are the benchmark's fixed definition (issue C of the plan; the blog post that introduced CPD describes the workload in
words only). Closed loop within a session, Poisson between sessions. Invariant: every prompt and its answer fit in `max_context_tokens`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.workload.types import Session, Turn, check_rate, stream_keys


@dataclass(frozen=True, slots=True)
class AgentMix:
    """`one_off`: share of arrivals that are a single unrelated long prompt; the others are sessions of `turns` turns. Ranges are uniform.
    `context_tokens`: the first prompt of a session, shortened where the session would outgrow `max_context_tokens` (Llama 3.1's limit).
    `shared_tokens`: the head (system prompt and tools) that all sessions have in common."""

    name: str
    one_off: float = 0.25
    turns: int = 6
    one_off_tokens: tuple[int, int] = (60_000, 130_000)
    context_tokens: tuple[int, int] = (30_000, 110_000)
    added_tokens: tuple[int, int] = (500, 5_000)
    output_tokens: tuple[int, int] = (150, 600)
    think_s: tuple[float, float] = (4.0, 20.0)
    shared_tokens: int = 2_048
    max_context_tokens: int = 131_072

    def __post_init__(self) -> None:
        if not 0 <= self.one_off <= 1 or self.turns < 1:
            raise ValueError(f"{self.name}: a share of {self.one_off} one-off prompts and {self.turns} turns can't be")

    @property
    def requests_per_session(self) -> float:
        return self.one_off + (1 - self.one_off) * self.turns

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        rng = random.Random(f"{self.name} {seed}")
        rate = qps / self.requests_per_session
        shared_blocks = self.shared_tokens // block_tokens
        head = tuple(stream_keys(1, 0, shared_blocks))
        unit_s = 0.0
        stream = 1
        while True:
            unit_s += rng.expovariate(1.0)
            stream += 1
            if rng.random() < self.one_off:
                tokens = rng.randint(*self.one_off_tokens)
                turns: tuple[Turn, ...] = (Turn(tokens, rng.randint(*self.output_tokens)),)
                keys = tuple(stream_keys(stream, 0, tokens // block_tokens))
            else:
                turns = self._turns(rng)
                rest = stream_keys(stream, shared_blocks, turns[-1].prompt_tokens // block_tokens - shared_blocks)
                keys = (*head, *rest)
            yield Session(f"{self.name}-{stream - 2}", unit_s / rate, turns, keys, block_tokens)

    def _turns(self, rng: random.Random) -> tuple[Turn, ...]:
        added = [0] + [rng.randint(*self.added_tokens) for _ in range(self.turns - 1)]
        outputs = [rng.randint(*self.output_tokens) for _ in range(self.turns)]
        growth = sum(added) + sum(outputs)
        context = min(rng.randint(*self.context_tokens), self.max_context_tokens - growth)
        turns = []
        for i in range(self.turns):
            context += added[i] + (outputs[i - 1] if i else 0)
            turns.append(Turn(context, outputs[i], rng.uniform(*self.think_s) if i else 0.0))
        return tuple(turns)


AGENT_MIXES = {
    "agent_25_6": AgentMix("agent_25_6", one_off=0.25, turns=6),
    "agent_10_12": AgentMix("agent_10_12", one_off=0.10, turns=12),
    "agent_50_6": AgentMix("agent_50_6", one_off=0.50, turns=6),
}

"""Mixes that no policy likes: all cold, all warm, alternating bursts, many agents on one new context.

Invariant: as for every workload, the same seed gives the same sessions at every rate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bench.workload.types import Session, Turn, check_rate, stream_keys


@dataclass(frozen=True, slots=True)
class AllCold:
    """Unrelated prompts only."""

    name: str = "all_cold"
    tokens: tuple[int, int] = (60_000, 130_000)
    output_tokens: tuple[int, int] = (150, 600)
    requests_per_session: float = 1.0

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        rng = random.Random(f"{self.name} {seed}")
        now_s, stream = 0.0, 1
        while True:
            now_s += rng.expovariate(qps)
            stream += 1
            tokens = rng.randint(*self.tokens)
            keys = tuple(stream_keys(stream, 0, tokens // block_tokens))
            yield Session(f"{self.name}-{stream}", now_s, (Turn(tokens, rng.randint(*self.output_tokens)),), keys, block_tokens)


@dataclass(frozen=True, slots=True)
class AllWarm:
    """Questions about a few long documents that were read before: cold only the first time."""

    name: str = "all_warm"
    documents: int = 8
    document_tokens: int = 64_000
    question_tokens: tuple[int, int] = (100, 2_000)
    output_tokens: tuple[int, int] = (150, 600)
    requests_per_session: float = 1.0

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        rng = random.Random(f"{self.name} {seed}")
        blocks = self.document_tokens // block_tokens
        documents = [stream_keys(2 + i, 0, blocks) for i in range(self.documents)]
        now_s, stream = 0.0, 2 + self.documents
        while True:
            now_s += rng.expovariate(qps)
            stream += 1
            tokens = blocks * block_tokens + rng.randint(*self.question_tokens)
            tail = stream_keys(stream, blocks, tokens // block_tokens - blocks)
            keys = (*rng.choice(documents), *tail)
            yield Session(f"{self.name}-{stream}", now_s, (Turn(tokens, rng.randint(*self.output_tokens)),), keys, block_tokens)


@dataclass(frozen=True, slots=True)
class AlternatingBursts:
    """Cold prompts only, then warm ones only, each for `period_s`, at the same rate of requests."""

    name: str = "alternating_bursts"
    period_s: float = 60.0
    cold: AllCold = AllCold("burst_cold")
    warm: AllWarm = AllWarm("burst_warm")
    requests_per_session: float = 1.0

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        cold = self.cold.sessions(qps, seed, block_tokens)
        warm = self.warm.sessions(qps, seed, block_tokens)
        rng = random.Random(f"{self.name} {seed}")
        now_s, count = 0.0, 0
        while True:
            now_s += rng.expovariate(qps)
            count += 1
            is_cold = int(now_s / self.period_s) % 2 == 0
            base = next(cold if is_cold else warm)
            # streams of the two must not meet
            keys = base.keys if not is_cold else tuple(stream_keys(1_000_000 + count, 0, len(base.keys)))
            yield Session(f"{self.name}-{count}", now_s, base.turns, keys, block_tokens)


@dataclass(frozen=True, slots=True)
class FanOut:
    """`agents` requests arrive at once, each on the same context that nobody has seen and with a question of its own; the next
    context follows after `gap_s` on average."""

    name: str = "fan_out"
    agents: int = 16
    context_tokens: int = 100_000
    question_tokens: tuple[int, int] = (100, 400)
    output_tokens: tuple[int, int] = (150, 600)
    requests_per_session: float = 1.0

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        rng = random.Random(f"{self.name} {seed}")
        blocks = self.context_tokens // block_tokens
        now_s, stream = 0.0, 1
        while True:
            now_s += rng.expovariate(qps / self.agents)
            stream += 1
            context = stream_keys(stream, 0, blocks)
            for agent in range(self.agents):
                tokens = blocks * block_tokens + rng.randint(*self.question_tokens)
                tail = stream_keys(stream * 1000 + 10**9 + agent, blocks, tokens // block_tokens - blocks)
                turn = Turn(tokens, rng.randint(*self.output_tokens))
                yield Session(f"{self.name}-{stream}-{agent}", now_s, (turn,), (*context, *tail), block_tokens)


ADVERSARIAL = {w.name: w for w in (AllCold(), AllWarm(), AlternatingBursts(), FanOut())}

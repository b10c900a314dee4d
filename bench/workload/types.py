"""What a workload is: sessions that arrive by themselves, each a closed loop of turns.

Owns no randomness and no time: generators make sessions, the driver plays them. Invariant: within a session a turn's prompt begins
with the whole prompt of the turn before it (when `keys` says so), and sessions come in order of arrival.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from cpd_ray.ids import KEY_BYTES, BlockKey


@dataclass(frozen=True, slots=True)
class Turn:
    """`think_s`: pause between the end of the answer before and this prompt (0 in the first turn)."""

    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Session:
    """`keys`: what the last turn's prompt is made of, one key a full block of `block_tokens`; earlier turns' prompts are its heads."""

    name: str
    arrival_s: float
    turns: tuple[Turn, ...]
    keys: tuple[BlockKey, ...]
    block_tokens: int

    def turn_keys(self, turn: int) -> tuple[BlockKey, ...]:
        """One key a full block of that turn's prompt."""
        return self.keys[: self.turns[turn].prompt_tokens // self.block_tokens]


class Workload(Protocol):
    """`requests_per_session` on average, so that a rate of requests can be turned into one of sessions."""

    @property
    def name(self) -> str: ...

    @property
    def requests_per_session(self) -> float: ...

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        """Sessions without end (or as many as there are), in order of arrival, that together offer `qps` requests a second. The same
        seed gives the same sessions at every rate, only their arrivals are stretched."""
        ...


def stream_key(stream: int, index: int) -> BlockKey:
    """A key that stands for block `index` of a never-branching stream of text: as unique as a hash, without hashing."""
    return BlockKey((stream << 32 | index).to_bytes(KEY_BYTES, "big"))


def stream_keys(stream: int, first: int, count: int) -> list[BlockKey]:
    """Keys of blocks `[first, first + count)` of a stream."""
    base = stream << 32
    return [BlockKey((base | index).to_bytes(KEY_BYTES, "big")) for index in range(first, first + count)]


def check_rate(qps: float) -> None:
    """Raises ValueError for a rate that can't be."""
    if not 0 < qps < float("inf"):
        raise ValueError(f"a rate of {qps} requests a second can't be offered; it must be above 0 and finite")

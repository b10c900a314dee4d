"""The engine as the rest sees it. Another engine is put in its place by implementing `Engine` over the same `BlockPool`.

Owns the types that cross that border; knows no role, no HTTP, no router. No torch here: the simulator imports it.
Invariant: each submitted request ends with exactly one output whose `finish_reason` or `error` is set.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cpd_ray.config import EngineConfig
from cpd_ray.errors import CPDError
from cpd_ray.ids import BlockId, BlockKey, RequestId
from cpd_ray.messages import StepCost
from cpd_ray.types import CachedTokens, FinishReason, SamplingParams, TokenLogprobs
from kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """`tokens` (uint32 buffer) are known; those from `prompt_tokens` on were generated earlier (a handed-over or resumed answer).

    `keys`: one a full block of `tokens`. `may_fetch_blocks`: how many leading blocks are worth asking the lower tiers for.
    `fetch_tail`: the port can also deliver the last, partly filled block (a handover). `max_new_tokens` counts from here.
    `hold`: when finished, keep the blocks referenced for the caller (`held_blocks` of the last output) instead of releasing them.
    `sample`: False computes KV only.
    """

    request_id: RequestId
    tokens: bytes
    prompt_tokens: int
    root: bytes
    keys: tuple[BlockKey, ...]
    sampling: SamplingParams
    max_new_tokens: int
    may_fetch_blocks: int = 0
    fetch_tail: bool = False
    hold: bool = False
    sample: bool = True
    priority: int = 0


@dataclass(frozen=True, slots=True)
class FetchPlan:
    """Bring blocks `[first, first + len(blocks))` of the request: `blocks[i]` is where block first+i goes, `keys[i]` its key.
    When `tail_block` is given, the partly filled block after the last full one goes there."""

    request_id: RequestId
    first: int
    blocks: tuple[BlockId, ...]
    keys: tuple[BlockKey, ...]
    tail_block: BlockId | None = None


@dataclass(frozen=True, slots=True)
class FetchResult:
    """`landed[i]` is the tier that block first+i came from; only a leading run counts, so `len(landed)` blocks are usable.
    `tail`: the tail block landed as well. `poisoned`: destination blocks that a transfer may still write to."""

    landed: tuple[str, ...] = ()
    tail: bool = False
    poisoned: tuple[BlockId, ...] = ()


class KvPort(Protocol):
    """The engine's way to the tiers below its pool."""

    async def fetch(self, plan: FetchPlan) -> FetchResult:
        """Never raises for a miss or a fault below: what did not land is computed."""
        ...

    def committed(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        """These computed blocks (a run in chain order) may be written down now. Returns at once; the port takes its own pool references
        for as long as it reads the blocks."""
        ...


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """What one step gave one request. `cached` and `phases_s` (`queue`, `fetch`, `compute`) come with its first token or its end."""

    request_id: RequestId
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: CPDError | None = None
    cached: CachedTokens | None = None
    phases_s: dict[str, float] | None = None
    held_blocks: tuple[BlockId, ...] = ()
    computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """`backlog_tokens`: accepted prompt tokens not yet in the pool; `backlog_s`: predicted seconds of computing them.
    `queue_s`: the same for each such prompt, `queue_age_s`: seconds since it was submitted (same order)."""

    running: int
    waiting: int
    backlog_tokens: int
    backlog_s: float
    step_cost: StepCost
    queue_s: tuple[float, ...] = ()
    queue_age_s: tuple[float, ...] = ()


class Engine(Protocol):
    @property
    def pool(self) -> BlockPool: ...
    @property
    def block_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...

    @property
    def healthy(self) -> bool:
        """Whether requests are answered."""
        ...

    def reconfigure(self, config: EngineConfig) -> None:
        """Other knobs from the next step on."""
        ...

    async def start(self) -> None: ...

    def generate(self, request: EngineRequest) -> AsyncIterator[EngineOutput]:
        """Runs the request; closing the iterator aborts it. Raises DuplicateRequest, ContextLengthExceeded or InvalidRequest at
        once; faults of this request alone arrive as an output with `error`."""
        ...

    def load(self) -> EngineLoad: ...

    async def stop(self) -> None:
        """Abort everything, join the compute thread."""
        ...

"""What the HTTP layer asks of whoever answers: the router, or a fake of it. Token buffers go in, token chunks come out.

Owns the interface, which is this layer's own; text, limits, identity and shapes are above it. Invariant: nothing here names HTTP.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Protocol

from actors.text.codec import TextCodec
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.messages import NodeReport, WorkerReport
from cpd_ray.types import GenerateRequest, Tier, TokenChunk
from placement.routing.types import Decision


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A name that requests may ask for. `adapter` separates its cache from the base model's."""

    id: str
    max_model_len: int
    vocab_size: int
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """What operators look at. `workers` and `nodes`: the last report of each that is alive."""

    in_flight: int
    queued: int
    workers: tuple[WorkerReport, ...]
    nodes: tuple[NodeReport, ...]
    directory_keys: int


class Warmed(Protocol):
    """What warming a context came to: `pinned_blocks` of its `blocks` full blocks stay for the time asked."""

    @property
    def tokens(self) -> int: ...
    @property
    def cached_tokens(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def pinned_blocks(self) -> int: ...
    @property
    def worker(self) -> WorkerId: ...
    @property
    def node(self) -> NodeId: ...


class Face(Protocol):
    """Raises CPDErrors; anything else is a bug and reaches the client as a bare 500."""

    @property
    def codec(self) -> TextCodec: ...

    def models(self) -> tuple[ModelCard, ...]:
        """At least one; the first is what a request without a model name gets."""
        ...

    def healthy(self) -> bool:
        """Whether a request would be answered now."""
        ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answer; closing the generator aborts it everywhere. The last chunk has finish_reason, usage and trace."""
        ...

    async def plan(self, request: GenerateRequest) -> Decision:
        """What would be decided for this request now; runs nothing."""
        ...

    async def status(self) -> Status: ...

    async def reset(self, tiers: frozenset[Tier]) -> Mapping[Tier, int]:
        """Drop what is cached in these tiers and not in use; how many blocks were dropped, by tier."""
        ...

    async def warm(self, request: GenerateRequest, ttl_s: float) -> Warmed:
        """Compute and commit the prompt's KV, and keep it for `ttl_s` within the pin budget."""
        ...

"""A node's slab as a worker (or another node) sees it, whatever lies between: a direct object, a socket or a Ray handle.

The one interface through which slots are reserved and leased. Invariant: every call is batched (one call for a thousand
blocks) and idempotent enough to be abandoned: what is reserved or leased and never ended lapses by itself.
"""

from __future__ import annotations

from typing import Protocol

from cpd_ray.ids import LeaseId, NodeId
from cpd_ray.messages import (
    CommitBlocks,
    EventsAfter,
    EventsPage,
    LeaseBlocks,
    LeaseGrant,
    NodeReport,
    PeerDescriptor,
    PinBlocks,
    Reservation,
    ReserveBlocks,
)


class KvNode(Protocol):
    """Raises PeerGone from any call when the node's KV-cache actor is dead; every other error is a KVError."""

    node: NodeId

    async def describe(self) -> PeerDescriptor: ...

    async def match(self, keys: bytes) -> int:
        """How many leading keys (joined) are committed here now."""
        ...

    async def reserve(self, request: ReserveBlocks) -> Reservation: ...

    async def commit(self, request: CommitBlocks) -> None: ...

    async def lease(self, request: LeaseBlocks) -> LeaseGrant: ...

    async def release(self, lease_id: LeaseId, epoch: int) -> None:
        """End a lease. Releasing one that lapsed raises UnknownLease."""
        ...

    async def writer_gone(self, writer: str) -> None:
        """`writer`'s process is confirmed dead: free what it had reserved, quarantined slots included."""
        ...

    async def pin(self, request: PinBlocks) -> int:
        """Keep blocks from eviction; returns how many of them are pinned (the budget or a missing block may leave fewer)."""
        ...

    async def clear(self) -> int:
        """Drop every block that is not leased, reserved or quarantined; returns how many."""
        ...

    async def refute(self, keys: bytes, epoch: int) -> int:
        """A reader found that the bytes here are not these keys': drop those that nobody holds. Returns how many."""
        ...

    async def note_remote_reads(self, source: NodeId, keys: bytes, parent: bytes) -> None:
        """A worker of this node has read `keys` (a run, `parent` before the first) from `source`'s slab: often enough, and the node
        pulls a copy."""
        ...

    async def events(self, after: EventsAfter) -> EventsPage:
        """What the slab gained and lost since; waits up to `wait_s` for news."""
        ...

    async def report(self) -> NodeReport: ...

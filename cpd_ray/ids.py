"""The names of things: small distinct types for what would otherwise all be strings, integers and bytes.

Invariant: a `BlockId` is a place (a slot in one pool), a `SlotId` a place in one slab, a `BlockKey` a content. They never mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

RequestId = NewType("RequestId", str)
WorkerId = NewType("WorkerId", str)
NodeId = NewType("NodeId", str)
SourceId = NewType("SourceId", str)
"""Whoever tells the directory what it holds: `pool:<worker>` or `slab:<node>` (see `pool_source`, `slab_source`)."""

BlockId = NewType("BlockId", int)
"""A block's place in one worker's pool, 0 <= id < pool blocks."""
SlotId = NewType("SlotId", int)
"""A block's place in one node's slab, 0 <= id < slab slots."""
BlockKey = NewType("BlockKey", bytes)
"""What is in a block: KEY_BYTES bytes of chained SHA-256 (see `kv.keys`)."""
LeaseId = NewType("LeaseId", str)
ReservationId = NewType("ReservationId", str)

KEY_BYTES = 16


def pool_source(worker: WorkerId) -> SourceId:
    """The directory's name for a worker's own pool."""
    return SourceId(f"pool:{worker}")


def slab_source(node: NodeId) -> SourceId:
    """The directory's name for a node's slab."""
    return SourceId(f"slab:{node}")


def join_keys(keys: Sequence[BlockKey]) -> bytes:
    """Concatenate keys, KEY_BYTES each: how they travel."""
    return b"".join(keys)


def split_keys(blob: bytes) -> list[BlockKey]:
    """The inverse of `join_keys`; raises ValueError when the length is no multiple of KEY_BYTES."""
    if len(blob) % KEY_BYTES:
        raise ValueError(f"{len(blob)} bytes of keys: not a multiple of {KEY_BYTES}")
    return [BlockKey(blob[i : i + KEY_BYTES]) for i in range(0, len(blob), KEY_BYTES)]

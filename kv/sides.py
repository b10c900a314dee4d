"""The two ends of a copy between a worker's pool and its node's slab, as the worker sees them.

Owns nothing. Invariant: a `SlabSide`'s memory is that of `epoch`; slots granted in another epoch mean other bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.messages import RegionRef
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.pool import BlockPool


@dataclass(frozen=True, slots=True)
class PoolSide:
    """The worker's pool: its books, its bytes, and the region that they are registered under with the transport."""

    pool: BlockPool
    memory: SlottedMemory
    region: RegionRef


@dataclass(frozen=True, slots=True)
class SlabSide:
    """The own node's slab: who keeps its books, and its bytes as mapped here when the slab was in `epoch`."""

    node: KvNode
    memory: SlottedMemory
    epoch: int

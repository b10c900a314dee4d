"""A node of the simulated cluster: the real slab and its feed, and the links that bytes move over.

Owns transfer times and the order on each link. What is kept, leased or dropped is `kv.slab`'s. Invariant: a link moves one transfer
at a time, in the order of asking, and a lease lasts until its transfer has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.sim.loop import EventLoop
from cpd_ray.errors import SlabFull, UnknownLease
from cpd_ray.ids import BlockKey, LeaseId, NodeId, slab_source
from cpd_ray.types import Tier
from kv.events import EventLog
from kv.eviction.base import EvictionPolicy
from kv.slab import Slab
from kv.slab_types import SlabLimits

EPOCH = 1
MOST_SOURCES = 2
"""Other nodes asked in one fetch (the default of `kv.tiers`)."""
TTL_S = 3600.0
"""Transfers here always end: leases and reservations need no deadline."""


class Link:
    """One direction of one wire."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.moved_bytes = 0.0


def occupy(now_s: float, nbytes: float, *links: Link) -> float:
    """Take all `links` for one transfer from the moment when all are free; returns when it ends."""
    start_s = max(now_s, *(link.free_s for link in links))
    end_s = start_s + nbytes / min(link.bytes_per_s for link in links)
    for link in links:
        link.free_s = end_s
        link.moved_bytes += nbytes
    return end_s


@dataclass(frozen=True, slots=True)
class CacheShape:
    slots: int
    block_bytes: int
    host_rate: float
    network_rate: float


class SimNode:
    """`up`, `down`: from slab to pool and back. `out`, `into`: the network."""

    def __init__(self, name: NodeId, shape: CacheShape, policy: EvictionPolicy, loop: EventLoop) -> None:
        self.name = name
        self.block_bytes = shape.block_bytes
        self.events = EventLog(slab_source(name), name, EPOCH)
        limits = SlabLimits(shape.slots, shape.block_bytes, shape.slots, 0, TTL_S, TTL_S, 0.0)
        self.slab = Slab(limits, policy, epoch=EPOCH, clock=loop, events=self.events)
        self.up, self.down = Link(shape.host_rate), Link(shape.host_rate)
        self.out, self.into = Link(shape.network_rate), Link(shape.network_rate)
        self._loop = loop

    def store(self, parent: BlockKey | None, keys: Sequence[BlockKey], done: Callable[[], None]) -> None:
        """Write blocks down as a worker's port does: reserve, copy, commit; `done` when the copy has ended (or there is none)."""
        try:
            granted = self.slab.reserve("worker", keys, parent)
        except SlabFull:
            done()
            return
        written = [key for key, slot in zip(keys, granted.slots, strict=True) if slot is not None]
        if not written:
            done()
            return

        def commit() -> None:
            self.slab.commit(granted.reservation_id, EPOCH, written)
            done()

        self._loop.at(occupy(self._loop.now_s(), len(written) * self.block_bytes, self.down), commit)

    def release(self, leases: Sequence[LeaseId]) -> None:
        for lease in leases:
            try:
                self.slab.release(lease, EPOCH)
            except UnknownLease as gone:
                raise AssertionError("a lease lapsed before its transfer ended") from gone


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a fetch will have brought, by tier, and when."""

    landed: tuple[str, ...]
    end_s: float
    leases: tuple[tuple[SimNode, LeaseId], ...]


def fetch(now_s: float, own: SimNode, others: Sequence[SimNode], keys: Sequence[BlockKey]) -> Fetched:
    """The leading run of `keys` that the own slab and then the others hold, each asked for what is still missing, as `kv.tiers` does."""
    landed: list[str] = []
    leases: list[tuple[SimNode, LeaseId]] = []
    end_s = now_s
    for node in (own, *others[:MOST_SOURCES]):
        if len(landed) == len(keys):
            break
        leased = node.slab.lease("fetch", keys[len(landed) :])
        if leased.lease_id is None:
            continue
        count = len(leased.slots)
        leases.append((node, leased.lease_id))
        nbytes = count * own.block_bytes
        near = node is own
        end_s = max(end_s, occupy(now_s, nbytes, own.up) if near else occupy(now_s, nbytes, node.out, own.into))
        landed += [Tier.NODE if near else Tier.CLUSTER] * count
    return Fetched(tuple(landed), end_s, tuple(leases))

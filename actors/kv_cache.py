"""One node's KV cache: keeps the slab's books for all who read and write it, and pulls copies of what the node often reads from afar.

A plain class; Ray or a socket is put around it elsewhere. Owns the slab's bookkeeping and its registration with the transport; the
memory belongs to whoever made it. Invariant: no call blocks on another node: copies are pulled beside.
"""

from __future__ import annotations

import asyncio
import contextlib

from actors.copy_near import CopyNear, CopySettings
from cpd_ray.clock import Clock
from cpd_ray.errors import KVError
from cpd_ray.ids import BlockKey, LeaseId, NodeId, split_keys
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
from kv.events import EventLog
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.patience import Patience
from kv.remote import RemoteSlabs
from kv.slab import Slab
from kv.transport.base import Transport

MOST_WAIT_S = 30.0
"""The longest that a question for events may wait for news."""


class KvCacheNode:
    """Implements `kv.node.KvNode`. Event-loop thread only. The owner calls `tick` several times a second."""

    def __init__(
        self,
        slab: Slab,
        memory: SlottedMemory,
        events: EventLog,
        transport: Transport,
        *,
        clock: Clock,
        copies: CopySettings | None = None,
    ) -> None:
        if memory.slots != slab.limits.slots or memory.slot_bytes != slab.limits.slot_bytes:
            raise ValueError("the slab's books and its memory differ in size")
        self.node = events.node
        self.slab = slab
        self.transport = transport
        self.region = transport.register("slab", memory, slab.epoch)
        self._memory = memory
        self._events = events
        self._news = asyncio.Event()
        self._nodes: dict[NodeId, KvNode] = {}
        self._patience = Patience(clock)
        remote = RemoteSlabs(f"node:{self.node}", self._nodes, transport, self._patience, clock)
        self.copies = CopyNear(self.node, slab, self.region, remote, copies or CopySettings())

    # -- the owner's side --------------------------------------------------------------------------------------------

    def connect_node(self, peer: PeerDescriptor, node: KvNode) -> None:
        """Copies may be pulled from `node` from now on. Raises LayoutMismatch, PeerGone."""
        self.transport.connect(peer)
        self._nodes[node.node] = node

    def forget_node(self, node: NodeId) -> None:
        """`node` has left."""
        self._nodes.pop(node, None)

    def tick(self) -> None:
        """End what is past its time."""
        self.copies.tick()
        self.slab.expire()
        self._tell()

    async def close(self) -> None:
        """Pull nothing more. The transport is closed by whoever made it."""
        await self.copies.close()
        await self._patience.drain()

    # -- KvNode ------------------------------------------------------------------------------------------------------

    async def describe(self) -> PeerDescriptor:
        return self.transport.describe()

    async def match(self, keys: bytes) -> int:
        return self.slab.match(_keys(keys))

    async def reserve(self, request: ReserveBlocks) -> Reservation:
        keys, parent = _keys(request.keys), _parent(request.parent)
        granted = self.slab.reserve(request.writer, keys, parent)
        self._tell()
        return Reservation(granted.reservation_id, self.slab.epoch, granted.ttl_s, granted.slots)

    async def commit(self, request: CommitBlocks) -> None:
        self.slab.commit(request.reservation_id, request.epoch, _keys(request.written), request.checksums)
        self._tell()

    async def lease(self, request: LeaseBlocks) -> LeaseGrant:
        leased = self.slab.lease(request.holder, _keys(request.keys))
        sums = tuple(known for known in leased.checksums if known is not None)
        return LeaseGrant(
            lease_id=leased.lease_id,
            epoch=self.slab.epoch,
            ttl_s=leased.ttl_s,
            slots=leased.slots,
            region=self.region,
            checksums=sums if len(sums) == len(leased.slots) else (),
        )

    async def release(self, lease_id: LeaseId, epoch: int) -> None:
        self.slab.release(lease_id, epoch)

    async def writer_gone(self, writer: str) -> None:
        """What it had reserved is free, and its leases are over."""
        self.slab.writer_gone(writer)
        self.slab.holder_gone(writer)

    async def pin(self, request: PinBlocks) -> int:
        return self.slab.pin(request.pin_id, _keys(request.keys), request.ttl_s)

    async def refute(self, keys: bytes, epoch: int) -> int:
        dropped = self.slab.drop(_keys(keys)) if epoch == self.slab.epoch else 0
        self._tell()
        return dropped

    async def note_remote_reads(self, source: NodeId, keys: bytes, parent: bytes) -> None:
        self.copies.note(source, _keys(keys), _parent(parent))

    async def clear(self) -> int:
        dropped = self.slab.clear()
        self._tell()
        return dropped

    async def events(self, after: EventsAfter) -> EventsPage:
        """The batches since; when there are none even after `wait_s`, a heartbeat."""
        page = self._events.page(after.epoch, after.sequence)
        if after.wait_s > 0 and not any(batch.stored or batch.removed or batch.cleared for batch in page.batches):
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(after.wait_s, MOST_WAIT_S)):
                    await self._news.wait()
            page = self._events.page(after.epoch, after.sequence)
        return page

    async def report(self) -> NodeReport:
        slab = self.slab
        return NodeReport(
            self.node,
            slab.epoch,
            slab.counts(),
            evictions=slab.evictions,
            copies_in=self.copies.copied_blocks,
            copying=self.copies.copying,
            leases_lapsed=slab.leases_lapsed,
        )

    def _tell(self) -> None:
        """Wake whoever waits for events, if there are any."""
        if self._events.pending:
            self._news.set()


def _keys(joined: bytes) -> list[BlockKey]:
    try:
        return split_keys(joined)
    except ValueError as error:
        raise KVError("keys that are not whole") from error


def _parent(key: bytes) -> BlockKey | None:
    keys = _keys(key)
    if len(keys) > 1:
        raise KVError("a block has one parent")
    return keys[0] if keys else None

"""Reading blocks out of other nodes' slabs: lease, one-sided read, deadline rechecked, lease released.

Owns who is connected; decides neither what to read nor from whom. Invariant: when `move` returns, the destination holds the keys' bytes as
the source held them under a lease that had not lapsed when the last byte arrived.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cpd_ray.clock import Clock
from cpd_ray.errors import LeaseLapsed, PeerGone, StaleRegion
from cpd_ray.ids import BlockKey, NodeId, join_keys
from cpd_ray.messages import LeaseBlocks, LeaseGrant, PeerDescriptor, RegionRef
from kv.node import KvNode
from kv.patience import Patience
from kv.transport.base import Transport


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """The right to read `grant.slots` of a node until `deadline_s` of this process's clock."""

    node: NodeId
    grant: LeaseGrant
    deadline_s: float

    @property
    def blocks(self) -> int:
        return len(self.grant.slots)

    def part(self, indices: Sequence[int]) -> RemoteLease:
        """The same lease, seen as if it were of these blocks only."""
        grant = self.grant
        sums = tuple(grant.checksums[i] for i in indices) if grant.checksums else ()
        return replace(self, grant=replace(grant, slots=tuple(grant.slots[i] for i in indices), checksums=sums))


async def end_lease(node: KvNode, grant: LeaseGrant, wrong: Sequence[BlockKey]) -> None:
    """Give a lease back, then say which of its keys' blocks hold other bytes, so that nobody reads them again."""
    try:
        if grant.lease_id is not None:
            await node.release(grant.lease_id, grant.epoch)
    finally:
        if wrong:
            await node.refute(join_keys(wrong), grant.epoch)


class RemoteSlabs:
    """The other nodes' slabs, read on behalf of `holder`. `nodes` may change under our feet."""

    def __init__(self, holder: str, nodes: Mapping[NodeId, KvNode], transport: Transport, patience: Patience, clock: Clock) -> None:
        self.nodes = nodes
        self._holder = holder
        self._transport = transport
        self._patience = patience
        self._clock = clock
        self._connected: dict[NodeId, PeerDescriptor] = {}

    async def lease(self, node: NodeId, keys: Sequence[BlockKey]) -> RemoteLease | None:
        """Lease the leading run of `keys` that the node holds; None when it holds none. Connects first, so that the lease's time is not
        spent on that. Raises KVError. To be ended with `release`."""
        actor = self._actor(node)
        await self._connect(node)
        asked_s = self._clock.now_s()
        request = LeaseBlocks(self._holder, join_keys(keys), remote=True)
        grant = await self._patience.ask(node, lambda: actor.lease(request))
        if grant.lease_id is None:
            return None
        return RemoteLease(node, grant, asked_s + grant.ttl_s)

    async def move(self, lease: RemoteLease, into: RegionRef, into_slots: Sequence[int], *, timeout_s: float) -> None:
        """Bring the leased blocks. Raises LeaseLapsed when they came too late, StillMoving when they may still come, any other KVError:
        all but StillMoving leave the destination free for use."""
        left_s = min(timeout_s, lease.deadline_s - self._clock.now_s())
        if left_s <= 0 or lease.grant.region is None:
            raise LeaseLapsed(f"the lease on {lease.blocks} blocks of {lease.node} came too late")
        try:
            await self._transport.read(lease.grant.region, lease.grant.slots, into, into_slots, timeout_s=left_s)
        except (StaleRegion, PeerGone):
            self.forget(lease.node)
            raise
        if self._clock.now_s() >= lease.deadline_s:
            raise LeaseLapsed(f"{lease.blocks} blocks arrived from {lease.node} after their lease")

    def release(self, lease: RemoteLease, wrong: Sequence[BlockKey] = ()) -> None:
        """Give the lease back, beside whatever comes next; `wrong`: keys whose bytes these were not."""
        actor = self.nodes.get(lease.node)
        if actor is not None:
            self._patience.tell(lease.node, lambda: end_lease(actor, lease.grant, wrong))

    async def match(self, node: NodeId, keys: bytes) -> int:
        """How many leading keys (joined) the node holds. Raises KVError when it can't be asked."""
        actor = self._actor(node)
        return await self._patience.ask(node, lambda: actor.match(keys))

    def forget(self, node: NodeId) -> None:
        """The node has left, or must be connected anew before its next read."""
        peer = self._connected.pop(node, None)
        if peer is not None:
            self._transport.disconnect(peer.peer)

    def _actor(self, node: NodeId) -> KvNode:
        actor = self.nodes.get(node)
        if actor is None:
            raise PeerGone(f"there is no node {node}")
        return actor

    async def _connect(self, node: NodeId) -> None:
        if node in self._connected:
            return
        peer = await self._patience.ask(node, self._actor(node).describe)
        await asyncio.to_thread(self._transport.connect, peer)
        self._connected[node] = peer

"""A small cluster in one process: nodes with real slabs and books, workers with real pools, one switchboard between them.

The bytes of a key are a function of the key, so that any block that claims to hold it can be told true or false.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from actors.copy_near import CopySettings
from actors.kv_cache import KvCacheNode
from cpd_ray.clock import Clock
from cpd_ray.ids import BlockId, BlockKey, NodeId, SourceId
from kv.events import EventLog
from kv.eviction import new_policy
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.pool import BlockPool
from kv.sides import PoolSide, SlabSide
from kv.slab import Slab, SlabLimits
from kv.tiers import TieredKv, TierSettings
from kv.transport.base import Transport
from kv.transport.inprocess import InProcessTransport, Switchboard

SLOT_BYTES = 256
LAYOUT = b"one layout"


def key_of(chain: int, i: int) -> BlockKey:
    return BlockKey(hashlib.sha256(f"{chain}/{i}".encode()).digest()[:16])


def chain_of(chain: int, count: int) -> list[BlockKey]:
    return [key_of(chain, i) for i in range(count)]


def bytes_of(key: BlockKey) -> np.ndarray:
    return np.frombuffer(hashlib.shake_128(key).digest(SLOT_BYTES), dtype=np.uint8)


class Node:
    """One node: slab, bytes, books."""

    def __init__(
        self,
        name: str,
        transport: Transport,
        clock: Clock,
        *,
        slots: int = 32,
        epoch: int = 1,
        copies: CopySettings | None = None,
        policy: str = "lru",
    ) -> None:
        self.name = NodeId(name)
        self.rows = np.zeros((slots, SLOT_BYTES), dtype=np.uint8)
        self.memory = SlottedMemory.over([self.rows[: slots // 2], self.rows[slots // 2 :]], SLOT_BYTES)
        self.log = EventLog(SourceId(f"slab:{name}"), self.name, epoch)
        limits = SlabLimits(slots, SLOT_BYTES, writer_slots=slots // 2, pin_slots=slots // 4)
        self.slab = Slab(limits, new_policy(policy, slots), epoch=epoch, clock=clock, events=self.log)
        self.cache = KvCacheNode(
            self.slab, self.memory, self.log, transport, clock=clock, copies=copies or CopySettings(after_reads=2, share=0.5)
        )

    def side(self, node: KvNode | None = None) -> SlabSide:
        return SlabSide(node or self.cache, self.memory, self.slab.epoch)


class Worker:
    """One worker's pool and its tiers."""

    def __init__(
        self,
        name: str,
        own: SlabSide | None,
        others: dict[NodeId, KvNode],
        transport: Transport,
        clock: Clock,
        *,
        blocks: int = 64,
        settings: TierSettings | None = None,
    ) -> None:
        self.name = name
        self.rows = np.zeros((blocks, SLOT_BYTES), dtype=np.uint8)
        self.memory = SlottedMemory.over([self.rows], SLOT_BYTES)
        self.pool = BlockPool(blocks, clock=clock)
        self.transport = transport
        region = transport.register("pool", self.memory, 1)
        side = PoolSide(self.pool, self.memory, region)
        self.tiers = TieredKv(name, side, own, others, transport, clock=clock, settings=settings or TierSettings(checksums=True))

    def compute(self, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> list[BlockId]:
        """What a prefill does: blocks with the keys' bytes, committed; the references are the caller's."""
        blocks = self.pool.allocate(len(keys))
        for key, block in zip(keys, blocks, strict=True):
            self.rows[block] = bytes_of(key)
            self.pool.commit(block, key, parent)
            parent = key
        return blocks

    def holds(self, blocks: Sequence[BlockId], keys: Sequence[BlockKey]) -> bool:
        return all((self.rows[block] == bytes_of(key)).all() for key, block in zip(keys, blocks, strict=True))

    def all_free(self) -> bool:
        """No block is in use: all references were given back."""
        counts = self.pool.counts()
        return counts.free + counts.cached == counts.total

    async def write_down(self, keys: Sequence[BlockKey]) -> None:
        """Compute, store, forget."""
        blocks = self.compute(keys)
        self.tiers.store(None, keys, blocks)
        self.pool.release(blocks)
        await self.tiers.drain()
        self.pool.clear()


class Cluster:
    """Nodes n0.. and a worker on each, w0.., in one process."""

    def __init__(self, count: int, clock: Clock, *, slots: int = 32, settings: TierSettings | None = None) -> None:
        self.board = Switchboard()
        self.clock = clock
        self.nodes = [Node(f"n{i}", self.transport(f"slab-n{i}"), clock, slots=slots) for i in range(count)]
        self.actors: dict[NodeId, KvNode] = {node.name: node.cache for node in self.nodes}
        self.workers = [
            Worker(f"w{i}", node.side(), self.actors, self.transport(f"pool-w{i}"), clock, settings=settings)
            for i, node in enumerate(self.nodes)
        ]
        for node in self.nodes:
            for other in self.nodes:
                if other is not node:
                    node.cache.connect_node(other.cache.transport.describe(), other.cache)

    def transport(self, peer: str) -> Transport:
        return InProcessTransport(self.board, peer, LAYOUT)

    def check(self) -> None:
        for node in self.nodes:
            node.slab.check()
            node.log.check()
        for worker in self.workers:
            worker.pool.check()

    async def close(self) -> None:
        for worker in self.workers:
            await worker.tiers.close()
        for node in self.nodes:
            await node.cache.close()
        self.check()
        assert all(worker.all_free() for worker in self.workers), "a block is still referenced"

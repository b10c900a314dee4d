"""Many workers and nodes, with faults injected, against the one truth: the bytes of a key are the key's, wherever they are said to be.

Random walks: workers compute, write down, fetch and hand over at once, while nodes freeze, die and come back in a new epoch, clocks run
past leases and reservations, and bytes are spoilt. After each step every book is checked, and everything that landed is compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from cpd_ray.clock import ManualClock
from cpd_ray.errors import SlabFull
from cpd_ray.ids import BlockId, BlockKey, LeaseId, NodeId, WorkerId
from cpd_ray.messages import Handover, NodeRun
from kv.copying import checksums as checksums_of
from kv.node import KvNode
from kv.tiers import TierSettings
from tests.kv.tier_world import Cluster, Node, Worker, bytes_of, key_of

SETTINGS = TierSettings(checksums=True, timeout_s=0.005, answer_s=0.5)
CHAINS, LENGTH = 8, 14


class Distant:
    """An actor that is some way off: between its answer and the caller's next step, other things happen."""

    def __init__(self, node: KvNode, walk: Walk) -> None:
        self.node = node.node
        self._node = node
        self._walk = walk

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._node, name)

        async def from_afar(*args: Any) -> Any:
            answer = await call(*args)
            if name in ("lease", "reserve"):
                await self._walk.meanwhile()
            return answer

        return from_afar


class Walk:
    """The cluster, and what may be done to it. With `checksums`, bytes are spoilt too; without, nothing but the protocol protects."""

    def __init__(self, seed: int, *, checksums: bool) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.checksums = checksums
        self.cluster = Cluster(3, self.clock, slots=24, settings=replace(SETTINGS, checksums=checksums))
        self.tasks: set[asyncio.Task[None]] = set()
        for i in range(3):
            self.bring(i, self.cluster.nodes[i])
        self.epochs = [1, 1, 1]
        self.landed = 0
        self.poisoned = 0
        # branches share a head, so that parents have several children
        self.chains: list[list[BlockKey]] = []
        for c in range(CHAINS):
            head = [key_of(c // 2, i) for i in range(5)]
            self.chains.append(head + [key_of(100 + c, i) for i in range(LENGTH - 5)])

    def bring(self, i: int, node: Node) -> None:
        """Let the others see `node`, from afar."""
        self.cluster.nodes[i] = node
        self.cluster.actors[node.name] = Distant(node.cache, self)
        for other in self.cluster.nodes:
            if other is not node:
                other.cache.connect_node(node.cache.transport.describe(), Distant(node.cache, self))
                node.cache.connect_node(other.cache.transport.describe(), Distant(other.cache, self))

    def map_own(self, i: int) -> None:
        node = self.cluster.nodes[i]
        self.cluster.workers[i].tiers.remap(node.side(Distant(node.cache, self)))

    async def meanwhile(self) -> None:
        """Some turns of the loop; now and then so long that leases and reservations lapse and their slots are given to others."""
        for _ in range(self.rng.choice([0, 0, 2, 12])):
            await asyncio.sleep(0)
        if self.rng.random() < 0.2:
            self.clock.advance(self.rng.choice([2.0, 16.0, 25.0]))
            for node in self.cluster.nodes:
                node.cache.tick()
                self.write_as_another(node)

    def write_as_another(self, node: Node) -> None:
        """Another process of the node fills its slab with whole chains, at once."""
        for _ in range(3):
            keys = self.rng.choice(self.chains)
            with contextlib.suppress(SlabFull):
                granted = node.slab.reserve("another", keys)
                for key, slot in zip(keys, granted.slots, strict=True):
                    if slot is not None:
                        node.rows[slot] = bytes_of(key)
                written = [key for key, slot in zip(keys, granted.slots, strict=True) if slot is not None]
                if written:
                    sums = checksums_of(node.memory, [slot for slot in granted.slots if slot is not None]) if self.checksums else ()
                    node.slab.commit(granted.reservation_id, node.slab.epoch, written, sums)

    def some_chain(self) -> list[BlockKey]:
        return self.rng.choice(self.chains)[: self.rng.randint(1, LENGTH)]

    def some_worker(self) -> Worker:
        return self.rng.choice(self.cluster.workers)

    def runs(self) -> tuple[NodeRun, ...]:
        return tuple(NodeRun(node.name, self.rng.randint(1, LENGTH)) for node in self.cluster.nodes if self.rng.random() < 0.8)

    # -- what workers do ---------------------------------------------------------------------------------------------

    async def compute_and_store(self) -> None:
        worker, keys = self.some_worker(), self.some_chain()
        if worker.pool.available() < len(keys):
            return
        known = worker.pool.match(keys)
        held = worker.pool.acquire(keys[:known])
        blocks = [*held, *worker.compute(keys[known:], keys[known - 1] if known else None)]
        at = self.rng.randrange(len(keys))
        worker.tiers.store(keys[at - 1] if at else None, keys[at:], blocks[at:])
        worker.pool.release(blocks)

    async def fetch(self) -> None:
        worker, keys = self.some_worker(), self.some_chain()
        if worker.pool.available() < len(keys):
            return
        blocks = worker.pool.allocate(len(keys))
        worker.rows[list(blocks)] = 0
        fetched = await worker.tiers.fetch(keys, blocks, self.runs())
        self.settle(worker, keys, blocks, fetched.landed, fetched.poisoned)

    async def hand_over(self) -> None:
        giver, taker = self.rng.sample(self.cluster.workers, 2)
        keys = self.some_chain()
        if min(giver.pool.available(), taker.pool.available()) < len(keys):
            return
        known = giver.pool.match(keys)
        theirs = [*giver.pool.acquire(keys[:known]), *giver.compute(keys[known:], keys[known - 1] if known else None)]
        mine = taker.pool.allocate(len(keys))
        given = Handover(
            WorkerId(giver.name),
            NodeId("n0"),
            LeaseId("l"),
            giver.tiers.pool_region,
            tuple(theirs),
            0,
            30.0,
            giver.transport.describe(),
        )
        fetched = await taker.tiers.fetch_handover(given, theirs, mine)
        assert len(fetched.landed) in (0, len(keys))
        self.settle(taker, keys, mine, fetched.landed, fetched.poisoned)
        giver.pool.release(theirs)

    def settle(
        self,
        worker: Worker,
        keys: Sequence[BlockKey],
        blocks: Sequence[BlockId],
        landed: Sequence[str],
        poisoned: Sequence[BlockId],
    ) -> None:
        """What the engine does with the answer, after looking at every byte."""
        count = len(landed)
        assert worker.holds(blocks[:count], keys[:count]), "bytes that are not the key's were given out as landed"
        assert not set(blocks[:count]) & set(poisoned)
        self.landed += count
        self.poisoned += len(poisoned)
        for i in range(count):
            worker.pool.commit(blocks[i], keys[i], keys[i - 1] if i else None)
        gone = set(poisoned)
        worker.pool.release([block for block in blocks if block not in gone])

    # -- what befalls them -------------------------------------------------------------------------------------------

    async def freeze_or_thaw(self) -> None:
        name = self.rng.choice(["slab-n0", "slab-n1", "slab-n2", "pool-w0", "pool-w1", "pool-w2"])
        if self.rng.random() < 0.4:
            self.cluster.board.freeze(name)
        else:
            for peer in ("slab-n0", "slab-n1", "slab-n2", "pool-w0", "pool-w1", "pool-w2"):
                self.cluster.board.thaw(peer)

    async def let_time_pass(self) -> None:
        self.clock.advance(self.rng.choice([0.3, 3.0, 12.0, 40.0]))

    async def tick(self) -> None:
        for node in self.cluster.nodes:
            node.cache.tick()
        for worker in self.cluster.workers:
            worker.tiers.tick()
            worker.pool.expire()
            worker.pool.sweep()

    async def replace_a_node(self) -> None:
        """Killed, and back in a new epoch with an empty slab; its workers map that."""
        i = self.rng.randrange(3)
        old = self.cluster.nodes[i]
        self.cluster.board.kill(f"slab-{old.name}")
        self.epochs[i] += 1
        self.bring(i, Node(old.name, self.cluster.transport(f"slab-{old.name}"), self.clock, slots=24, epoch=self.epochs[i]))
        if self.rng.random() < 0.7:
            self.map_own(i)
        await old.cache.close()

    async def spoil_a_byte(self) -> None:
        """One byte of some slot turns; what was written says otherwise."""
        if not self.checksums:
            return
        node = self.rng.choice(self.cluster.nodes)
        node.rows[self.rng.randrange(24), self.rng.randrange(200)] ^= 1 << self.rng.randrange(8)

    async def lose_a_worker(self) -> None:
        node = self.rng.choice(self.cluster.nodes)
        await node.cache.writer_gone(self.rng.choice(["nobody", "ghost"]))

    async def step(self) -> None:
        work = [self.compute_and_store, self.compute_and_store, self.fetch, self.fetch, self.fetch, self.hand_over]
        doom = [
            self.freeze_or_thaw, self.let_time_pass, self.tick, self.tick, self.replace_a_node, self.spoil_a_byte, self.lose_a_worker,
        ]  # fmt: skip
        while len(self.tasks) < 5:
            task = asyncio.ensure_future(self.rng.choice(work)())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        done, _ = await asyncio.wait(self.tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        if self.rng.random() < 0.35:
            await self.rng.choice(doom)()
        self.cluster.check()

    async def end(self) -> None:
        """Everyone thaws and time passes: nothing may stay taken."""
        for peer in ("slab-n0", "slab-n1", "slab-n2", "pool-w0", "pool-w1", "pool-w2"):
            self.cluster.board.thaw(peer)
        await asyncio.gather(*self.tasks)
        for i in range(3):
            self.map_own(i)
        for worker in self.cluster.workers:
            await worker.tiers.drain()
        self.clock.advance(100)
        async with asyncio.timeout(30):
            while True:
                await self.tick()
                for worker in self.cluster.workers:
                    await worker.tiers.drain()
                if all(worker.all_free() for worker in self.cluster.workers):
                    break
                await asyncio.sleep(0)
        for node in self.cluster.nodes:
            await node.cache.close()
            for i in range(3):
                await node.cache.writer_gone(f"w{i}")
            node.cache.tick()
            await node.cache.writer_gone(f"node:{node.name}")
            counts = node.slab.counts()
            assert counts.reserved == counts.quarantined == counts.leases == 0
        await self.cluster.close()


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("seed", range(3))
async def test_nobody_ever_reads_bytes_that_are_not_the_keys(seed: int, checksums: bool) -> None:
    walk = Walk(seed, checksums=checksums)
    for _ in range(400):
        await walk.step()
    await walk.end()
    assert walk.landed > 300, "the walk went nowhere"
    assert walk.poisoned > 0
    assert any(worker.tiers.counters.lapsed for worker in walk.cluster.workers)


def test_the_actors_speak_the_protocol() -> None:
    cluster = Cluster(1, ManualClock())
    node: KvNode = cluster.nodes[0].cache
    assert node.node == "n0"
    assert bytes_of(key_of(0, 0)).shape == (256,)

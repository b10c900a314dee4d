"""Waiting until what was stored is written down: not for what is stored later, and not for ever when it can't be."""

from __future__ import annotations

import asyncio

from cpd_ray.clock import ManualClock
from cpd_ray.errors import PeerGone
from cpd_ray.ids import BlockKey
from tests.kv.test_tiers import Meddler
from tests.kv.tier_world import Cluster, Worker, chain_of


def _store(worker: Worker, keys: list[BlockKey]) -> None:
    blocks = worker.compute(keys)
    worker.tiers.store(None, keys, blocks)
    worker.pool.release(blocks)


def _held_back(cluster: Cluster) -> tuple[Worker, asyncio.Queue[None]]:
    """A worker whose reservations each wait for a permit."""
    permits: asyncio.Queue[None] = asyncio.Queue()
    slow = Meddler(cluster.nodes[0].cache)
    slow.before["reserve"] = permits.get
    worker = Worker("slow", cluster.nodes[0].side(slow), {}, cluster.transport("pool-slow"), cluster.clock)
    cluster.workers.append(worker)
    return worker, permits


async def test_it_waits_for_what_was_stored_before_and_not_for_more() -> None:
    cluster = Cluster(1, ManualClock())
    worker, permits = _held_back(cluster)
    first, second = chain_of(1, 4), chain_of(2, 3)
    await worker.tiers.written_down()  # nothing was
    _store(worker, first)
    waiting = asyncio.create_task(worker.tiers.written_down())
    await asyncio.sleep(0)
    _store(worker, second)
    assert not waiting.done()
    permits.put_nowait(None)
    await asyncio.wait_for(waiting, 10)
    assert cluster.nodes[0].slab.match(first) == 4
    assert worker.tiers.unwritten_blocks == 3
    permits.put_nowait(None)
    await asyncio.wait_for(worker.tiers.written_down(), 10)
    assert cluster.nodes[0].slab.match(second) == 3
    await cluster.close()


async def test_it_ends_when_the_node_is_lost_or_the_worker_closes() -> None:
    cluster = Cluster(1, ManualClock())
    worker, permits = _held_back(cluster)

    async def lost() -> None:
        raise PeerGone("killed")

    lost_node = Meddler(cluster.nodes[0].cache)
    lost_node.before["reserve"] = lost
    orphan = Worker("orphan", cluster.nodes[0].side(lost_node), {}, cluster.transport("pool-orphan"), cluster.clock)
    cluster.workers.append(orphan)
    _store(orphan, chain_of(3, 2))
    await asyncio.wait_for(orphan.tiers.written_down(), 10)
    _store(worker, chain_of(4, 2))
    _store(worker, chain_of(5, 2))
    waiting = asyncio.create_task(worker.tiers.written_down())
    closing = asyncio.create_task(worker.tiers.close())
    await asyncio.sleep(0)
    permits.put_nowait(None)
    await asyncio.wait_for(waiting, 10)
    await asyncio.wait_for(closing, 10)
    await cluster.close()

"""What a worker gets from the tiers is the keys' bytes or nothing, whatever happens below; and nothing it lent stays lent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cpd_ray.clock import ManualClock
from cpd_ray.errors import PeerGone
from cpd_ray.ids import BlockId, LeaseId, NodeId, WorkerId
from cpd_ray.messages import EventsAfter, Handover, NodeRun
from kv.node import KvNode
from kv.sides import SlabSide
from kv.tiers import TierSettings
from kv.transport.nixl import NixlTransport
from tests.kv.tier_world import LAYOUT, Cluster, Node, Worker, bytes_of, chain_of

N0, N1, N2 = NodeId("n0"), NodeId("n1"), NodeId("n2")
FAST = TierSettings(checksums=True, timeout_s=0.02, answer_s=0.02)


class Meddler:
    """A node's actor with something between it and its callers. `before`, `after`: awaited around calls of the named method."""

    def __init__(self, node: KvNode) -> None:
        self.node = node.node
        self._node = node
        self.before: dict[str, Callable[[], Awaitable[None]]] = {}
        self.after: dict[str, Callable[[], Awaitable[None]]] = {}

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._node, name)

        async def meddled(*args: Any) -> Any:
            if name in self.before:
                await self.before[name]()
            answer = await call(*args)
            if name in self.after:
                await self.after[name]()
            return answer

        return meddled


async def dead() -> None:
    raise PeerGone("killed")


async def mute() -> None:
    await asyncio.Event().wait()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster(3, ManualClock())
    yield made
    await made.close()


async def test_what_is_stored_comes_back_from_the_own_slab(cluster: Cluster) -> None:
    worker, keys = cluster.workers[0], chain_of(1, 9)
    await worker.write_down(keys)
    assert worker.tiers.written.written == 9
    blocks = worker.pool.allocate(12)
    fetched = await worker.tiers.fetch(chain_of(1, 12), blocks, ())
    assert fetched.landed == ("node",) * 9
    assert worker.holds(blocks[:9], keys)
    worker.pool.release(blocks)
    cluster.check()


async def test_the_rest_comes_from_the_nodes_that_promise_it(cluster: Cluster) -> None:
    keys = chain_of(2, 12)
    await cluster.workers[0].write_down(keys[:4])
    await cluster.workers[1].write_down(keys[:8])
    await cluster.workers[2].write_down(keys)
    worker = cluster.workers[0]
    blocks = worker.pool.allocate(12)
    runs = (NodeRun(N1, 8), NodeRun(N2, 12), NodeRun(N0, 4), NodeRun(NodeId("gone"), 99))
    fetched = await worker.tiers.fetch(keys, blocks, runs)
    assert fetched.landed == ("node",) * 4 + ("cluster",) * 8
    assert worker.holds(blocks, keys)
    fewer = await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 8),))
    assert fewer.landed == ("node",) * 4 + ("cluster",) * 4
    assert worker.tiers.counters.blocks == {"node": 8, "cluster": 12}
    worker.pool.release(blocks)


async def test_what_is_often_read_from_afar_is_copied_near(cluster: Cluster) -> None:
    keys = chain_of(3, 6)
    await cluster.workers[1].write_down(keys)
    worker = cluster.workers[0]
    blocks = worker.pool.allocate(6)
    tiers = []
    for _ in range(3):
        fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 6),))
        tiers.append(fetched.landed[0])
        await worker.tiers.drain()
        await cluster.nodes[0].cache.copies.drain()
        assert worker.holds(blocks, keys)
    assert tiers == ["cluster", "cluster", "node"]
    assert (await cluster.nodes[0].cache.report()).copies_in == 6
    worker.pool.release(blocks)


async def test_a_probe_asks_all_who_may_have_it(cluster: Cluster) -> None:
    await cluster.workers[1].write_down(chain_of(4, 5))
    probe = cluster.workers[0].tiers.probe
    assert await probe(chain_of(4, 9), ()) == 0
    assert await probe(chain_of(4, 9), (NodeRun(N1, 9),)) == 5
    assert await probe(chain_of(4, 9), (NodeRun(NodeId("gone"), 9),)) == 0


# -- handover --------------------------------------------------------------------------------------------------------


def handover(worker: Worker, blocks: list[BlockId], ttl_s: float = 30.0) -> Handover:
    peer = worker.transport.describe()
    return Handover(
        worker=WorkerId(worker.name), node=N0, lease_id=LeaseId("l"), region=worker.tiers.pool_region, blocks=tuple(blocks), tokens=0,
        ttl_s=ttl_s, peer=peer,
    )  # fmt: skip


async def test_a_handover_is_read_from_the_other_workers_pool(cluster: Cluster) -> None:
    giver, taker, keys = cluster.workers[0], cluster.workers[1], chain_of(5, 5)
    theirs = giver.compute(keys)
    mine = taker.pool.allocate(3)
    given = handover(giver, theirs)
    taker.tiers.meet(giver.transport.describe())
    fetched = await taker.tiers.fetch_handover(given, given.blocks[2:], mine)
    assert fetched.landed == ("cluster",) * 3
    assert taker.holds(mine, keys[2:])
    giver.pool.release(theirs)
    taker.pool.release(mine)


async def test_a_lapsed_or_broken_handover_brings_nothing(cluster: Cluster) -> None:
    clock = cluster.clock
    assert isinstance(clock, ManualClock)
    giver, taker = cluster.workers[0], cluster.workers[1]
    theirs = giver.compute(chain_of(6, 2))
    mine = taker.pool.allocate(2)
    given = handover(giver, theirs)
    received_s = clock.now_s()
    clock.advance(30)
    assert (await taker.tiers.fetch_handover(given, given.blocks, mine, received_s=received_s)).landed == ()
    assert taker.tiers.counters.lapsed == 1
    assert (await taker.tiers.fetch_handover(given, [1000, 1001], mine)).landed == ()
    assert taker.tiers.counters.failures == 1
    cluster.board.kill("pool-w0")
    assert (await taker.tiers.fetch_handover(given, given.blocks, mine)).landed == ()
    assert not taker.rows[list(mine)].any()
    giver.pool.release(theirs)
    taker.pool.release(mine)


async def test_a_worker_that_comes_back_is_met_anew(cluster: Cluster) -> None:
    taker, keys = cluster.workers[1], chain_of(7, 2)
    mine = taker.pool.allocate(2)
    taker.tiers.meet(cluster.workers[0].transport.describe())
    cluster.board.kill("pool-w0")
    again = Worker("w0", None, {}, cluster.transport("pool-w0"), cluster.clock)
    cluster.workers.append(again)
    theirs = again.compute(keys)
    given = handover(again, theirs)
    assert (await taker.tiers.fetch_handover(given, given.blocks, mine)).landed == ("cluster",) * 2
    assert taker.holds(mine, keys)
    again.pool.release(theirs)
    taker.pool.release(mine)


# -- faults ----------------------------------------------------------------------------------------------------------


async def test_a_lease_that_lapsed_during_the_copy_brings_nothing(cluster: Cluster) -> None:
    clock = cluster.clock
    assert isinstance(clock, ManualClock)
    keys = chain_of(8, 4)
    await cluster.workers[0].write_down(keys)
    for tier, home in (("node", 0), ("cluster", 1)):
        slow = Meddler(cluster.nodes[0].cache)

        async def late() -> None:
            clock.advance(10)

        slow.after["lease"] = late
        cluster.actors[N0] = slow
        own = SlabSide(slow, cluster.nodes[0].memory, 1) if home == 0 else cluster.nodes[1].side()
        worker = Worker("late", own, cluster.actors, cluster.transport(f"pool-late-{home}"), clock)
        cluster.workers.append(worker)
        blocks = worker.pool.allocate(4)
        fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(N0, 4),))
        assert fetched.landed == ()
        assert worker.tiers.counters.lapsed == 1, tier
        worker.pool.release(blocks)


async def test_a_frozen_source_poisons_what_it_may_still_write_to() -> None:
    cluster = Cluster(2, ManualClock(), settings=FAST)
    keys = chain_of(9, 6)
    await cluster.workers[0].write_down(keys[:2])
    await cluster.workers[1].write_down(keys[:5])
    worker = cluster.workers[0]
    blocks = worker.pool.allocate(6)
    cluster.board.freeze("slab-n1")
    fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 6),))
    assert fetched.landed == ("node",) * 2
    assert fetched.poisoned == tuple(blocks[2:5]), "the sixth was not leased, so nothing will write there"
    assert worker.pool.counts().quarantined == 3
    worker.pool.release([*blocks[:2], blocks[5]])
    assert worker.pool.sweep() == 0
    fresh = worker.pool.allocate(worker.pool.available())
    assert not set(fresh) & set(fetched.poisoned)
    worker.pool.release(fresh)
    cluster.board.thaw("slab-n1")
    async with asyncio.timeout(10):
        while not worker.pool.sweep():  # noqa: ASYNC110 - the sweep is what is under test
            await asyncio.sleep(0)
    await cluster.close()


@pytest.mark.parametrize("where", ["own", "other"])
async def test_a_planted_wrong_byte_is_a_miss_and_its_block_is_dropped(cluster: Cluster, where: str) -> None:
    keys = chain_of(10, 6)
    home = cluster.nodes[0 if where == "own" else 1]
    await cluster.workers[0 if where == "own" else 1].write_down(keys)
    slot = home.slab.lease("look", keys).slots[3]
    home.rows[slot, 17] ^= 64
    home.slab.holder_gone("look")
    worker = cluster.workers[0]
    blocks = worker.pool.allocate(6)
    fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 6),))
    assert len(fetched.landed) == 3
    assert worker.holds(blocks[:3], keys[:3])
    assert worker.tiers.counters.checksum_mismatches == 1
    await worker.tiers.drain()
    assert home.slab.match(keys) == 3
    assert home.slab.match(keys[4:]) == 2
    worker.pool.release(blocks)
    cluster.check()


@pytest.mark.parametrize("method", ["lease", "release", "reserve", "commit", "note_remote_reads"])
@pytest.mark.parametrize("fault", [dead, mute])
async def test_a_lost_own_node_is_a_miss(method: str, fault: Callable[[], Awaitable[None]]) -> None:
    cluster = Cluster(2, ManualClock(), settings=FAST)
    keys = chain_of(11, 4)
    await cluster.workers[1].write_down(keys)
    lost = Meddler(cluster.nodes[0].cache)
    lost.before[method] = fault
    worker = Worker(
        "victim", cluster.nodes[0].side(lost), cluster.actors, cluster.transport("pool-victim"), cluster.clock, settings=FAST
    )
    cluster.workers.append(worker)
    await worker.write_down(chain_of(12, 5))
    blocks = worker.pool.allocate(4)
    fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 4),))
    assert fetched.landed == ("cluster",) * 4
    worker.pool.release(blocks)
    await worker.tiers.drain()
    assert worker.all_free()
    assert worker.tiers.written.written == (0 if method in ("reserve", "commit") else 5)
    await cluster.close()


async def test_a_commit_that_was_not_heard_is_said_again() -> None:
    clock = ManualClock()
    cluster = Cluster(1, clock, settings=FAST)
    keys = chain_of(13, 5)
    deaf = Meddler(cluster.nodes[0].cache)
    deaf.before["commit"] = mute
    worker = Worker("victim", cluster.nodes[0].side(deaf), {}, cluster.transport("pool-victim"), clock, settings=FAST)
    cluster.workers.append(worker)
    await worker.write_down(keys)
    clock.advance(60)
    cluster.nodes[0].cache.tick()
    assert cluster.nodes[0].slab.counts().quarantined == 5
    del deaf.before["commit"]
    worker.tiers.tick()
    await worker.tiers.drain()
    assert cluster.nodes[0].slab.counts().quarantined == 0
    assert cluster.nodes[0].slab.match(keys) == 5
    blocks = worker.pool.allocate(5)
    assert len((await worker.tiers.fetch(keys, blocks, ())).landed) == 5
    assert worker.holds(blocks, keys)
    worker.pool.release(blocks)
    await cluster.close()


async def test_the_slab_of_another_epoch_is_neither_read_nor_written(cluster: Cluster) -> None:
    worker, keys = cluster.workers[0], chain_of(14, 3)
    await worker.write_down(keys)
    old = cluster.nodes[0]
    cluster.nodes[0] = Node("n0", cluster.transport("slab-n0"), cluster.clock, epoch=2)
    await worker.tiers.close()
    stale = Worker("stale", SlabSide(cluster.nodes[0].cache, old.memory, 1), {}, cluster.transport("pool-stale"), cluster.clock)
    fresh = Worker("fresh", cluster.nodes[0].side(), {}, cluster.transport("pool-fresh"), cluster.clock)
    cluster.workers += [stale, fresh]
    before = old.rows.copy()
    await stale.write_down(chain_of(15, 3))
    assert (old.rows == before).all()
    assert cluster.nodes[0].slab.counts().committed == cluster.nodes[0].slab.counts().reserved == 0
    await fresh.write_down(keys)
    blocks = stale.pool.allocate(3)
    assert (await stale.tiers.fetch(keys, blocks, ())).landed == ()
    stale.tiers.remap(cluster.nodes[0].side())
    assert len((await stale.tiers.fetch(keys, blocks, ())).landed) == 3
    assert stale.holds(blocks, keys)
    stale.pool.release(blocks)


async def test_a_restarted_source_is_connected_anew(cluster: Cluster) -> None:
    worker, keys = cluster.workers[0], chain_of(16, 3)
    await cluster.workers[1].write_down(keys)
    blocks = worker.pool.allocate(3)
    assert len((await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 3),))).landed) == 3
    cluster.nodes[1] = Node("n1", cluster.transport("slab-n1"), cluster.clock, epoch=2)
    cluster.actors[N1] = cluster.nodes[1].cache
    writer = Worker("new", cluster.nodes[1].side(), {}, cluster.transport("pool-new"), cluster.clock)
    cluster.workers.append(writer)
    await writer.write_down(keys)
    assert (await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 3),))).landed == (), "found out that it has restarted"
    assert len((await worker.tiers.fetch(keys, blocks, (NodeRun(N1, 3),))).landed) == 3
    assert worker.holds(blocks, keys)
    worker.pool.release(blocks)
    await cluster.workers[1].tiers.close()


# -- writing ---------------------------------------------------------------------------------------------------------


async def test_the_queue_is_bounded_and_what_is_dropped_is_released() -> None:
    cluster = Cluster(1, ManualClock(), settings=TierSettings(queue_share=0.25))
    worker = cluster.workers[0]
    blocks = worker.compute(chain_of(17, 30))
    worker.tiers.store(None, chain_of(17, 30), blocks)
    worker.pool.release(blocks)
    assert worker.pool.counts().active == 16
    await worker.tiers.drain()
    assert worker.all_free()
    assert (worker.tiers.written.written, worker.tiers.written.dropped) == (16, 14)
    await cluster.close()


async def test_runs_that_follow_one_another_are_written_together_and_in_order(cluster: Cluster) -> None:
    worker, keys = cluster.workers[0], chain_of(18, 12)
    blocks = worker.compute(keys)
    reserved: list[int] = []
    counting = Meddler(cluster.nodes[0].cache)

    async def count() -> None:
        reserved.append(1)

    counting.before["reserve"] = count
    worker.tiers.remap(cluster.nodes[0].side(counting))
    for at in range(0, 12, 4):
        worker.tiers.store(keys[at - 1] if at else None, keys[at : at + 4], blocks[at : at + 4])
    worker.pool.release(blocks)
    await worker.tiers.drain()
    assert len(reserved) == 1
    assert cluster.nodes[0].slab.match(keys) == 12


async def test_closing_gives_every_reference_back(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    for chain in range(20, 25):
        blocks = worker.compute(chain_of(chain, 6))
        worker.tiers.store(None, chain_of(chain, 6), blocks)
        worker.pool.release(blocks)
    await worker.tiers.close()
    assert worker.all_free()
    blocks = worker.compute(chain_of(99, 2))
    worker.tiers.store(None, chain_of(99, 2), blocks)
    worker.pool.release(blocks)
    assert worker.all_free()


async def test_a_slab_without_room_costs_nothing_but_the_write(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    await worker.write_down(chain_of(26, 16))
    await worker.write_down(chain_of(27, 16))
    for chain in (26, 27):
        cluster.nodes[0].slab.lease("reader", chain_of(chain, 16))
    await worker.write_down(chain_of(28, 4))
    assert worker.all_free()
    assert worker.tiers.written.dropped == 4


async def test_rates_follow_what_is_measured(cluster: Cluster) -> None:
    worker = cluster.workers[0]
    assert set(worker.tiers.bytes_per_s()) == {"node", "cluster"}
    worker.tiers.remap(None)
    assert set(worker.tiers.bytes_per_s()) == {"cluster"}


async def test_the_directory_hears_of_what_was_written(cluster: Cluster) -> None:
    await cluster.workers[0].write_down(chain_of(30, 3))
    page = await cluster.nodes[0].cache.events(EventsAfter(cluster.nodes[0].log.source, 1, 0))
    assert b"".join(chain_of(30, 3)) == b"".join(batch.stored for batch in page.batches)


async def test_over_nixl_the_bytes_are_the_same() -> None:
    clock = ManualClock()
    transports = [NixlTransport(name, LAYOUT) for name in ("slab-n0", "slab-n1", "pool-w0", "pool-w1")]
    nodes = [Node("n0", transports[0], clock), Node("n1", transports[1], clock)]
    actors: dict[NodeId, KvNode] = {node.name: node.cache for node in nodes}
    near = Worker("w0", nodes[0].side(), actors, transports[2], clock)
    far = Worker("w1", nodes[1].side(), actors, transports[3], clock)
    keys = chain_of(40, 10)
    await far.write_down(keys)
    await near.write_down(keys[:3])
    blocks = near.pool.allocate(10)
    fetched = await near.tiers.fetch(keys, blocks, (NodeRun(N1, 10),))
    assert fetched.landed == ("node",) * 3 + ("cluster",) * 7
    assert near.holds(blocks, keys)
    theirs = far.compute(keys)
    given = handover(far, theirs)
    near.rows[:] = 0
    assert (await near.tiers.fetch_handover(given, given.blocks, blocks)).landed == ("cluster",) * 10
    assert near.holds(blocks, keys)
    near.pool.release(blocks)
    far.pool.release(theirs)
    for worker in (near, far):
        await worker.tiers.close()
        assert worker.all_free()
    for transport in transports:
        transport.close()


def test_the_worlds_bytes_differ_by_key() -> None:
    assert len({bytes_of(key).tobytes() for key in chain_of(0, 50)}) == 50

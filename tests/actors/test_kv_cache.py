"""The KV-cache node keeps its protocol's promises, whatever it is sent, and pulls copies without ever holding up a caller."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from actors.copy_near import CopySettings
from actors.kv_cache import KvCacheNode
from cpd_ray.clock import ManualClock
from cpd_ray.errors import KVError, SlabFull, UnknownLease, UnknownReservation
from cpd_ray.ids import BlockKey, LeaseId, NodeId, ReservationId, join_keys
from cpd_ray.messages import CommitBlocks, EventsAfter, LeaseBlocks, LeaseGrant, PinBlocks, Reservation, ReserveBlocks
from kv.memory import SlottedMemory
from kv.transport.inprocess import InProcessTransport, Switchboard
from tests.kv.tier_world import LAYOUT, SLOT_BYTES, Node, bytes_of, chain_of

N0, N1 = NodeId("n0"), NodeId("n1")


class Pair:
    """Two nodes that know each other; writing is done by hand."""

    def __init__(self, copies: CopySettings | None = None) -> None:
        self.board = Switchboard()
        self.clock = ManualClock()
        self.nodes = [
            Node(f"n{i}", InProcessTransport(self.board, f"slab-n{i}", LAYOUT), self.clock, slots=16, copies=copies)
            for i in range(2)
        ]
        for node, other in (self.nodes, self.nodes[::-1]):
            node.cache.connect_node(other.cache.transport.describe(), other.cache)

    async def write(self, at: int, keys: list[BlockKey], *, parent: bytes = b"", sums: bool = True) -> None:
        node = self.nodes[at]
        reservation = await node.cache.reserve(ReserveBlocks("w", join_keys(keys), parent))
        for key, slot in zip(keys, reservation.slots, strict=True):
            assert slot is not None
            node.rows[slot] = bytes_of(key)
        checksums = tuple(hash(key) & 0xFFFF for key in keys) if sums else ()
        await node.cache.commit(CommitBlocks(reservation.reservation_id, 1, join_keys(keys), checksums))

    async def close(self) -> None:
        for node in self.nodes:
            await node.cache.close()
            node.slab.check()


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    await made.close()


def holds(node: Node, keys: list[BlockKey]) -> bool:
    leased = node.slab.lease("look", keys)
    good = len(leased.slots) == len(keys) and all(
        (node.rows[s] == bytes_of(k)).all() for k, s in zip(keys, leased.slots, strict=True)
    )
    node.slab.holder_gone("look")
    return good


async def test_a_reader_learns_where_and_what(pair: Pair) -> None:
    keys = chain_of(1, 4)
    await pair.write(0, keys)
    cache = pair.nodes[0].cache
    grant = await cache.lease(LeaseBlocks("r", join_keys(chain_of(1, 6)), remote=True))
    assert grant.region == cache.region
    assert len(grant.slots) == len(grant.checksums) == 4
    assert grant.ttl_s == 10
    assert grant.lease_id is not None
    await cache.release(grant.lease_id, grant.epoch)
    with pytest.raises(UnknownLease):
        await cache.release(grant.lease_id, grant.epoch)
    nothing = await cache.lease(LeaseBlocks("r", join_keys(chain_of(2, 2)), remote=False))
    assert (nothing.lease_id, nothing.slots, nothing.checksums) == (None, (), ())
    await pair.write(0, chain_of(3, 2), sums=False)
    assert (await cache.lease(LeaseBlocks("r", join_keys(chain_of(3, 2)), remote=False))).checksums == ()
    await cache.writer_gone("r")
    assert (await cache.report()).slots.leases == 0


async def test_a_dead_writer_leaves_nothing_behind(pair: Pair) -> None:
    cache, slab = pair.nodes[0].cache, pair.nodes[0].slab
    await cache.reserve(ReserveBlocks("w", join_keys(chain_of(1, 5))))
    pair.clock.advance(60)
    cache.tick()
    assert slab.counts().quarantined == 5
    await cache.reserve(ReserveBlocks("w", join_keys(chain_of(2, 2))))
    await cache.writer_gone("w")
    assert slab.counts().free == 16
    slab.check()


async def test_questions_for_events_wait_for_news(pair: Pair) -> None:
    cache = pair.nodes[0].cache
    source = pair.nodes[0].log.source
    empty = await cache.events(EventsAfter(source, 1, 0))
    assert [(b.stored, b.removed, b.cleared) for b in empty.batches] == [(b"", b"", False)]
    asked = asyncio.ensure_future(cache.events(EventsAfter(source, 1, 0, wait_s=30)))
    await asyncio.sleep(0)
    assert not asked.done()
    await pair.write(0, chain_of(1, 2))
    page = await asked
    assert b"".join(batch.stored for batch in page.batches) == join_keys(chain_of(1, 2))
    assert await cache.clear() == 2
    page = await cache.events(EventsAfter(source, 1, page.batches[-1].sequence, wait_s=30))
    assert len(b"".join(batch.removed for batch in page.batches)) == 32
    beat = await cache.events(EventsAfter(source, 1, page.batches[-1].sequence, wait_s=0.01))
    assert beat.batches[0].sequence == page.batches[-1].sequence


async def test_books_and_memory_of_other_sizes_are_a_bug() -> None:
    pair = Pair()
    node = pair.nodes[0]
    small = SlottedMemory.over([node.rows[:4]], SLOT_BYTES)
    with pytest.raises(ValueError, match="size"):
        KvCacheNode(node.slab, small, node.log, InProcessTransport(pair.board, "x", LAYOUT), clock=pair.clock)
    await pair.close()


Call = Callable[[KvCacheNode], Coroutine[Any, Any, object]]
WRONG: list[tuple[type[KVError], Call]] = [
    (KVError, lambda c: c.match(b"short")),
    (KVError, lambda c: c.reserve(ReserveBlocks("w", b"x" * 17))),
    (KVError, lambda c: c.reserve(ReserveBlocks("w", b"x" * 16, b"y" * 32))),
    (KVError, lambda c: c.lease(LeaseBlocks("r", b"z", remote=True))),
    (KVError, lambda c: c.pin(PinBlocks("p", b"z", 1.0))),
    (KVError, lambda c: c.pin(PinBlocks("p", b"z" * 16, float("inf")))),
    (KVError, lambda c: c.refute(b"z", 1)),
    (KVError, lambda c: c.note_remote_reads(N1, b"z", b"")),
    (UnknownReservation, lambda c: c.commit(CommitBlocks(ReservationId("w1.1"), 1, b""))),
    (UnknownLease, lambda c: c.release(LeaseId(""), 1)),
]


@pytest.mark.parametrize("at", range(len(WRONG)))
async def test_what_makes_no_sense_is_a_typed_error_and_changes_nothing(pair: Pair, at: int) -> None:
    kind, call = WRONG[at]
    before = pair.nodes[0].slab.counts()
    with pytest.raises(kind):
        await call(pair.nodes[0].cache)
    pair.nodes[0].slab.check()
    assert pair.nodes[0].slab.counts() == before


async def test_random_messages_never_break_the_books(pair: Pair) -> None:
    rng = random.Random(5)
    cache, slab = pair.nodes[0].cache, pair.nodes[0].slab
    grants: list[LeaseGrant] = []
    reservations: list[Reservation] = []

    def some_keys() -> bytes:
        keys = join_keys(chain_of(rng.randrange(4), rng.randint(0, 9)))
        return keys if rng.random() < 0.9 else keys[:-1] + b"!!"

    for _ in range(1500):
        epoch = rng.choice([1, 1, 1, 0, 2, -1])
        which = rng.randrange(8)
        try:
            if which == 0:
                reservations.append(
                    await cache.reserve(ReserveBlocks(rng.choice("abc"), some_keys(), rng.choice([b"", b"p" * 16, b"q"])))
                )
            elif which == 1:
                named = rng.choice(reservations).reservation_id if reservations and rng.random() < 0.8 else ReservationId("?")
                await cache.commit(CommitBlocks(named, epoch, some_keys(), tuple(range(rng.randint(0, 3)))))
            elif which == 2:
                grants.append(await cache.lease(LeaseBlocks(rng.choice("ab"), some_keys(), remote=rng.random() < 0.5)))
            elif which == 3:
                lease_id = rng.choice(grants).lease_id if grants else None
                await cache.release(lease_id or LeaseId("?"), epoch)
            elif which == 4:
                await cache.pin(PinBlocks(rng.choice("xy"), some_keys(), rng.choice([-1.0, 0.0, 3.0, float("nan")])))
            elif which == 5:
                await cache.refute(some_keys(), epoch)
            elif which == 6:
                pair.clock.advance(rng.random() * 5)
                cache.tick()
            else:
                await cache.writer_gone(rng.choice("abc"))
        except KVError:
            pass
        slab.check()
    for writer in "abc":
        await cache.writer_gone(writer)
    counts = slab.counts()
    assert counts.reserved == counts.quarantined == counts.leases == 0


# -- copies near -----------------------------------------------------------------------------------------------------


async def test_a_copy_is_pulled_after_enough_reads_with_its_checksums(pair: Pair) -> None:
    keys = chain_of(5, 6)
    await pair.write(1, keys)
    near = pair.nodes[0]
    await near.cache.note_remote_reads(N1, join_keys(keys), b"")
    await near.cache.copies.drain()
    assert near.slab.match(keys) == 0
    await near.cache.note_remote_reads(N1, join_keys(keys), b"")
    assert (await near.cache.report()).copying == 6
    await near.cache.copies.drain()
    assert (await near.cache.report()).copying == 0
    assert holds(near, keys)
    assert near.slab.lease("r", keys).checksums == pair.nodes[1].slab.lease("r", keys).checksums
    report = await near.cache.report()
    assert report.copies_in == 6
    await pair.nodes[1].cache.writer_gone("r")
    await near.cache.close()
    assert pair.nodes[1].slab.counts().leases == 0, "the pull's own lease was given back"


async def test_copies_keep_to_their_share(pair: Pair) -> None:
    near = pair.nodes[0]
    for chain in (1, 2):
        await pair.write(1, chain_of(chain, 6))
        for _ in range(3):
            await near.cache.note_remote_reads(N1, join_keys(chain_of(chain, 6)), b"")
            await near.cache.copies.drain()
    assert near.slab.counts().committed == 8, "half of sixteen slots"
    assert near.slab.match(chain_of(2, 6)) == 2, "heads first"
    await near.cache.clear()
    for _ in range(2):
        await near.cache.note_remote_reads(N1, join_keys(chain_of(2, 6)), b"")
        await near.cache.copies.drain()
    assert near.slab.match(chain_of(2, 6)) == 6, "what was dropped does not count any more"


async def test_pulls_that_fail_leave_nothing_reserved(pair: Pair) -> None:
    near, keys = pair.nodes[0], chain_of(5, 6)

    async def note_twice() -> None:
        for _ in range(2):
            await near.cache.note_remote_reads(N1, join_keys(keys), b"")
            await near.cache.copies.drain()

    await note_twice()
    assert near.slab.counts().free == 16, "the source has nothing"
    await pair.write(1, keys)
    for node in (NodeId("stranger"), N0):
        await near.cache.note_remote_reads(node, join_keys(keys), b"")
    await near.cache.copies.drain()
    pair.board.kill("slab-n1")
    await note_twice()
    near.slab.check()
    assert near.slab.counts().free == 16


async def test_a_pull_from_a_frozen_node_keeps_its_slots_until_it_has_ended() -> None:
    pair = Pair(CopySettings(after_reads=1, share=0.5, timeout_s=0.01))
    near, keys = pair.nodes[0], chain_of(5, 4)
    await pair.write(1, keys)
    pair.board.freeze("slab-n1")
    await near.cache.note_remote_reads(N1, join_keys(keys), b"")
    await near.cache.copies.drain()
    assert near.slab.counts().reserved == 4
    pair.clock.advance(60)
    near.cache.tick()
    assert near.slab.counts().quarantined == 4
    pair.board.thaw("slab-n1")
    async with asyncio.timeout(10):
        while near.slab.counts().quarantined:
            near.cache.tick()
            await asyncio.sleep(0)
    assert near.slab.counts().free == 16
    await pair.close()


async def test_a_full_slab_refuses_without_waiting(pair: Pair) -> None:
    await pair.nodes[0].cache.reserve(ReserveBlocks("w", join_keys(chain_of(1, 8))))
    with pytest.raises(SlabFull):
        await pair.nodes[0].cache.reserve(ReserveBlocks("w", join_keys(chain_of(2, 1))))

"""The slab's books: a random walk against a model that knows only who may touch which slot, and each rule by itself."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from cpd_ray.clock import ManualClock
from cpd_ray.errors import KVError, SlabFull, UnknownLease, UnknownReservation
from cpd_ray.ids import BlockKey, LeaseId, NodeId, ReservationId, SourceId
from kv.events import EventLog
from kv.eviction import POLICIES, new_policy
from kv.slab import Slab, SlabLimits

EPOCH = 3


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16, "big"))


def keys(first: int, count: int) -> list[BlockKey]:
    return [key(i) for i in range(first, first + count)]


class World:
    """A slab, its clock and its log."""

    def __init__(self, slots: int = 16, *, writer_slots: int | None = None, pin_slots: int = 4, policy: str = "lru") -> None:
        self.clock = ManualClock()
        self.log = EventLog(SourceId("slab:n"), NodeId("n"), EPOCH)
        limits = SlabLimits(slots, 64, writer_slots or slots, pin_slots, reservation_ttl_s=20, lease_ttl_s=10, lease_grace_s=5)
        self.slab = Slab(limits, new_policy(policy, slots), epoch=EPOCH, clock=self.clock, events=self.log)

    def store(self, names: list[BlockKey], parent: BlockKey | None = None, writer: str = "w") -> list[int]:
        granted = self.slab.reserve(writer, names, parent)
        self.slab.commit(granted.reservation_id, EPOCH, names)
        self.slab.check()
        assert None not in granted.slots
        return [int(slot) for slot in granted.slots if slot is not None]


def test_written_blocks_are_found_and_told_of() -> None:
    world = World()
    slots = world.store(keys(0, 5))
    assert slots == [0, 1, 2, 3, 4]
    assert world.slab.match(keys(0, 9)) == 5
    assert world.log.page(EPOCH, 0).batches[0].stored == b"".join(keys(0, 5))
    leased = world.slab.lease("r", keys(0, 9))
    assert list(leased.slots) == slots
    assert world.slab.lease("r", keys(7, 2)).lease_id is None


def test_what_is_there_or_under_way_is_not_reserved_again() -> None:
    world = World()
    world.store(keys(0, 2))
    first = world.slab.reserve("a", keys(0, 4))
    assert [slot is None for slot in first.slots] == [True, True, False, False]
    second = world.slab.reserve("b", [*keys(0, 5), key(4)])
    assert [slot is None for slot in second.slots] == [True] * 4 + [False, True]
    assert world.slab.match(keys(0, 5)) == 2
    assert world.slab.reserve("c", keys(0, 5)).slots == (None,) * 5
    world.slab.check()


def test_commit_of_a_part_frees_the_rest() -> None:
    world = World()
    granted = world.slab.reserve("w", keys(0, 4))
    assert world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2), [11, 12]) == 2
    world.slab.check()
    assert world.slab.counts().committed == 2
    assert world.slab.counts().free == 14
    assert world.slab.lease("r", keys(0, 4)).checksums == (11, 12)


@pytest.mark.parametrize("epoch", [EPOCH - 1, EPOCH + 1])
def test_another_epochs_ids_are_unknown(epoch: int) -> None:
    world = World()
    granted = world.slab.reserve("w", keys(0, 2))
    with pytest.raises(UnknownReservation):
        world.slab.commit(granted.reservation_id, epoch, keys(0, 2))
    with pytest.raises(UnknownReservation):
        world.slab.abandon(granted.reservation_id, epoch)
    world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2))
    lease_id = world.slab.lease("r", keys(0, 2)).lease_id
    assert lease_id is not None
    with pytest.raises(UnknownLease):
        world.slab.release(lease_id, epoch)
    world.slab.release(lease_id, EPOCH)


def test_ending_twice_or_what_never_was_is_an_error() -> None:
    world = World()
    granted = world.slab.reserve("w", keys(0, 2))
    world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2))
    lease_id = world.slab.lease("r", keys(0, 2)).lease_id
    assert lease_id is not None
    world.slab.release(lease_id, EPOCH)
    wrong: list[tuple[type[KVError], Callable[[], object]]] = [
        (UnknownReservation, lambda: world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2))),
        (UnknownReservation, lambda: world.slab.abandon(ReservationId("nonsense"), EPOCH)),
        (UnknownReservation, lambda: world.slab.abandon(ReservationId(lease_id), EPOCH)),
        (UnknownLease, lambda: world.slab.release(lease_id, EPOCH)),
        (UnknownLease, lambda: world.slab.release(LeaseId("nonsense"), EPOCH)),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
        world.slab.check()
    with pytest.raises(KVError):
        world.slab.pin("p", keys(0, 1), float("nan"))


def test_commit_of_an_unreserved_key_changes_nothing() -> None:
    world = World()
    granted = world.slab.reserve("w", keys(0, 2))
    with pytest.raises(UnknownReservation):
        world.slab.commit(granted.reservation_id, EPOCH, [*keys(0, 2), key(9)])
    with pytest.raises(UnknownReservation):
        world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2), [1])
    world.slab.check()
    assert world.slab.counts().reserved == 2
    world.slab.commit(granted.reservation_id, EPOCH, keys(0, 2))


def test_a_silent_writers_slots_are_quarantined_until_it_is_known_dead() -> None:
    world = World(8)
    granted = world.slab.reserve("w", keys(0, 5))
    world.clock.advance(19.9)
    assert world.slab.expire() == ([], [])
    world.clock.advance(0.1)
    assert world.slab.expire() == ([], [granted.reservation_id])
    world.slab.check()
    counts = world.slab.counts()
    assert (counts.free, counts.reserved, counts.quarantined) == (3, 0, 5)
    other = world.slab.reserve("other", keys(0, 5))
    assert not set(granted.slots) & {s for s in other.slots if s is not None}
    assert sum(slot is not None for slot in other.slots) == 3
    assert world.slab.writer_gone("w") == 5
    world.slab.check()
    assert world.slab.counts().quarantined == 0
    with pytest.raises(UnknownReservation):
        world.slab.commit(granted.reservation_id, EPOCH, keys(0, 5))


def test_a_late_commit_counts_as_its_slots_were_kept_for_it() -> None:
    world = World(16)
    granted = world.slab.reserve("slow", keys(0, 4))
    world.clock.advance(30)
    world.slab.expire()
    world.store(keys(0, 2), writer="quick")
    assert world.slab.commit(granted.reservation_id, EPOCH, keys(0, 4)) == 2
    world.slab.check()
    leased = world.slab.lease("r", keys(0, 4))
    assert len(leased.slots) == 4
    assert leased.slots[2:] == granted.slots[2:]
    assert world.slab.counts().quarantined == 0
    late = world.slab.reserve("slow", keys(8, 3))
    world.clock.advance(30)
    world.slab.expire()
    world.slab.abandon(late.reservation_id, EPOCH)
    world.slab.check()
    assert world.slab.counts().free == 12


def test_one_writer_cannot_hold_more_than_its_share() -> None:
    world = World(16, writer_slots=6)
    granted = world.slab.reserve("w", keys(0, 10))
    assert [slot is not None for slot in granted.slots] == [True] * 6 + [False] * 4
    with pytest.raises(SlabFull):
        world.slab.reserve("w", keys(20, 1))
    world.clock.advance(30)
    world.slab.expire()
    with pytest.raises(SlabFull):
        world.slab.reserve("w", keys(20, 1))
    world.slab.reserve("x", keys(20, 1))
    world.slab.writer_gone("w")
    world.slab.reserve("w", keys(30, 6))
    world.slab.check()


def test_leased_pinned_and_reserved_blocks_stay() -> None:
    world = World(8, pin_slots=2)
    world.store(keys(0, 2))
    world.store(keys(10, 2))
    world.store(keys(20, 2))
    assert world.slab.pin("docs", keys(0, 2), 60) == 2
    lease_id = world.slab.lease("r", keys(10, 2)).lease_id
    assert lease_id is not None
    held = world.slab.reserve("w", keys(30, 2))
    granted = world.slab.reserve("v", keys(40, 8))
    assert sum(slot is not None for slot in granted.slots) == 2
    world.slab.check()
    assert [world.slab.match(keys(i, 2)) for i in (0, 10, 20)] == [2, 2, 0]
    with pytest.raises(SlabFull):
        world.slab.reserve("u", keys(50, 1))
    world.slab.release(lease_id, EPOCH)
    world.slab.commit(held.reservation_id, EPOCH, keys(30, 2))
    assert sum(slot is not None for slot in world.slab.reserve("u", keys(50, 8)).slots) == 4
    assert world.slab.match(keys(0, 2)) == 2
    world.slab.check()


def test_pins_keep_to_their_budget_and_time() -> None:
    world = World(16, pin_slots=4)
    world.store(keys(0, 3))
    world.store(keys(10, 3))
    assert world.slab.pin("a", keys(0, 5), 10) == 3
    assert world.slab.pin("b", keys(10, 3), 20) == 1
    assert world.slab.pin("c", keys(0, 3), 30) == 3, "blocks pinned already cost nothing"
    assert world.slab.counts().pinned == 4
    world.clock.advance(10)
    world.slab.expire()
    world.slab.check()
    assert world.slab.counts().pinned == 4
    assert world.slab.pin("b", keys(10, 3), 0) == 0
    assert world.slab.counts().pinned == 3
    world.clock.advance(20)
    world.slab.expire()
    world.slab.check()
    assert world.slab.counts().pinned == 0


def test_a_lease_lapses_after_its_ttl_and_the_grace() -> None:
    world = World(4)
    world.store(keys(0, 4))
    lease_id = world.slab.lease("r", keys(0, 4)).lease_id
    assert lease_id is not None
    world.clock.advance(14.9)
    assert world.slab.expire() == ([], [])
    with pytest.raises(SlabFull):
        world.slab.reserve("w", keys(10, 1))
    world.clock.advance(0.1)
    assert world.slab.expire() == ([lease_id], [])
    assert world.slab.leases_lapsed == 1
    with pytest.raises(UnknownLease):
        world.slab.release(lease_id, EPOCH)
    world.slab.reserve("w", keys(10, 1))
    world.slab.check()


def test_a_dead_readers_leases_end() -> None:
    world = World(4)
    world.store(keys(0, 4))
    for holder in ("a", "b", "a"):
        world.slab.lease(holder, keys(0, 4))
    assert world.slab.holder_gone("a") == 2
    assert world.slab.counts().leases == 1
    world.slab.check()


def test_the_chain_being_extended_is_not_dropped_for_its_own_tail() -> None:
    world = World(6)
    world.store(keys(0, 4))
    granted = world.slab.reserve("w", keys(2, 6), key(1))
    assert [slot is not None for slot in granted.slots] == [False, False, True, True, False, False]
    assert world.slab.match(keys(0, 4)) == 4
    with pytest.raises(SlabFull):  # all else leads to blocks being written
        world.slab.reserve("v", keys(20, 3))
    assert world.slab.match(keys(0, 4)) == 4
    world.slab.check()


def test_clear_keeps_what_is_in_use_and_what_leads_to_it() -> None:
    world = World(12)
    world.store(keys(0, 4))
    world.store(keys(10, 3))
    world.slab.pin("p", keys(10, 3), 60)
    world.slab.lease("r", keys(0, 2))
    assert world.slab.clear() == 5
    assert world.slab.match(keys(0, 4)) == 2
    world.slab.check()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_random_walk(policy: str) -> None:
    """The model: who holds a right to which slot. No slot is ever given away while somebody has one."""
    rng = random.Random(policy)
    world = World(24, writer_slots=10, pin_slots=5, policy=policy)
    slab, clock = world.slab, world.clock
    chains = [[key(1000 * c + i) for i in range(12)] for c in range(6)]
    chains += [chain[:5] + [key(100_000 + 1000 * c + i) for i in range(6)] for c, chain in enumerate(chains)]
    writing: dict[ReservationId, tuple[str, dict[BlockKey, int]]] = {}
    reading: dict[LeaseId, tuple[float, set[int]]] = {}
    where: dict[BlockKey, int] = {}
    told: set[BlockKey] = set()
    sequence = 0
    for _ in range(1500):
        chain = rng.choice(chains)
        start = rng.choice([0, 0, 0, rng.randrange(len(chain))])
        names = chain[start : start + rng.randint(1, 12)]
        action = rng.choice("rrrrcccclllluaepxxgk")
        if action == "r":
            writer = rng.choice("uvw")
            try:
                granted = slab.reserve(writer, names, chain[start - 1] if start else None)
            except SlabFull:
                pass
            else:
                got = {k: int(s) for k, s in zip(names, granted.slots, strict=True) if s is not None}
                busy = {s for _, mine in writing.values() for s in mine.values()} | {
                    s for _, seen in reading.values() for s in seen
                }
                assert not busy & set(got.values()), "a slot in use was given away"
                if got:
                    writing[granted.reservation_id] = (writer, got)
        elif action == "c" and writing:
            reservation_id = rng.choice(list(writing))
            _, mine = writing.pop(reservation_id)
            written = list(mine)[: rng.randint(0, len(mine))]
            slab.commit(reservation_id, EPOCH, written)
            for name in written:
                leased = slab.lease("look", [name])
                assert leased.lease_id is not None
                where[name] = leased.slots[0]
                slab.release(leased.lease_id, EPOCH)
        elif action == "a" and writing:
            reservation_id = rng.choice(list(writing))
            del writing[reservation_id]
            slab.abandon(reservation_id, EPOCH)
        elif action == "l":
            leased = slab.lease("r", names)
            assert len(leased.slots) == slab.match(names)
            assert all(where[k] == s for k, s in zip(names, leased.slots, strict=False)), "a key has moved"
            if leased.lease_id is not None:
                reading[leased.lease_id] = (clock.now_s() + 10, set(map(int, leased.slots)))
        elif action == "u" and reading:
            lease_id = rng.choice(list(reading))
            del reading[lease_id]
            slab.release(lease_id, EPOCH)
        elif action == "p":
            slab.pin(rng.choice("xy"), names, rng.choice([0.0, 5.0, 50.0]))
        elif action == "x":
            clock.advance(rng.random() * 4)
        elif action == "e":
            lapsed, _ = slab.expire()
            for lease_id in lapsed:
                assert reading.pop(lease_id)[0] + 5 <= clock.now_s()
        elif action == "g" and rng.random() < 0.3:
            gone = rng.choice("uvw")
            slab.writer_gone(gone)
            writing = {i: w for i, w in writing.items() if w[0] != gone}
        elif action == "k" and rng.random() < 0.1:
            slab.clear()
        slab.check()
        for batch in world.log.page(EPOCH, sequence).batches:
            told -= {BlockKey(batch.removed[i : i + 16]) for i in range(0, len(batch.removed), 16)}
            told |= {BlockKey(batch.stored[i : i + 16]) for i in range(0, len(batch.stored), 16)}
            sequence = batch.sequence
        assert all(slab.match([k]) == (k in told) for c in chains for k in c), "the log does not tell what is here"
    for reservation_id in list(writing):
        slab.abandon(reservation_id, EPOCH)
    clock.advance(100)
    slab.expire()
    assert slab.counts().leases == slab.counts().reserved == slab.counts().quarantined == slab.counts().pinned == 0
    assert slab.clear() + slab.counts().free >= 24


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_thousand_keys_a_call_stay_in_the_low_milliseconds(policy: str) -> None:
    world = World(20_000, writer_slots=20_000, policy=policy)
    spent: dict[str, list[float]] = {"reserve": [], "commit": [], "match": [], "lease": [], "release": []}
    for i in range(60):  # the slab is full after twenty rounds: the rest evict a thousand blocks each
        names = keys(i * 1000, 1000)
        begun = time.thread_time()
        granted = world.slab.reserve("w", names)
        reserved = time.thread_time()
        world.slab.commit(granted.reservation_id, EPOCH, names)
        committed = time.thread_time()
        assert world.slab.match(names) == 1000
        matched = time.thread_time()
        lease_id = world.slab.lease("r", names).lease_id
        leased = time.thread_time()
        assert lease_id is not None
        world.slab.release(lease_id, EPOCH)
        times = (begun, reserved, committed, matched, leased, time.thread_time())
        for what, start, end in zip(spent, times[:-1], times[1:], strict=True):
            spent[what].append(end - start)
    median_ms = {what: sorted(seconds)[len(seconds) // 2] * 1e3 for what, seconds in spent.items()}
    print(policy, {what: round(ms, 2) for what, ms in median_ms.items()})
    assert max(median_ms.values()) < 12, median_ms

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest

from cpd_ray.clock import ManualClock
from cpd_ray.errors import PoolExhausted, UnknownLease
from cpd_ray.ids import KEY_BYTES, BlockId, BlockKey, LeaseId, NodeId, RequestId, SourceId
from cpd_ray.messages import PoolCounts
from kv.events import EventLog
from kv.pool import MOVES, BlockPool, BlockState, Evictable


def key(name: str) -> BlockKey:
    return BlockKey(name.encode().ljust(KEY_BYTES, b"."))


def chain(name: str, length: int) -> list[BlockKey]:
    return [key(f"{name}{i}") for i in range(length)]


A, B = RequestId("a"), RequestId("b")


class Bench:
    """A pool with its clock and its feed."""

    def __init__(self, total_blocks: int) -> None:
        self.clock = ManualClock()
        self.events = EventLog(SourceId("pool:w"), NodeId("n"), 7)
        self.pool = BlockPool(total_blocks, clock=self.clock, events=self.events)

    def cached(self, keys: list[BlockKey], parent: BlockKey | None = None) -> list[BlockId]:
        """Commit a chain; the caller has the references."""
        blocks = self.pool.allocate(len(keys))
        for block, name in zip(blocks, keys, strict=True):
            assert self.pool.commit(block, name, parent)
            parent = name
        return blocks


@pytest.fixture
def bench() -> Bench:
    return Bench(8)


def counts(free: int = 0, cached: int = 0, active: int = 0, leased: int = 0, quarantined: int = 0) -> PoolCounts:
    return PoolCounts(free + cached + active + leased + quarantined, free, cached, active, leased, quarantined)


# -- a block's life --------------------------------------------------------------------------------------------------


def test_every_state_has_its_moves_and_a_way_to_be_free_again() -> None:
    assert set(MOVES) == set(BlockState)
    for state in BlockState:
        reached, border = {state}, {state}
        while border:
            border = {to for at in border for to in MOVES[at]} - reached
            reached |= border
        assert BlockState.FREE in reached
    assert {BlockState.COMMITTED, BlockState.QUARANTINED}.isdisjoint(MOVES[BlockState.FREE])
    assert BlockState.COMPUTING not in MOVES[BlockState.COMMITTED], "committed bytes are never written again"


def test_from_free_to_cached_and_back(bench: Bench) -> None:
    pool, names = bench.pool, chain("x", 3)
    blocks = pool.allocate(3)
    assert pool.counts() == counts(free=5, active=3)
    assert pool.match(names) == 0
    for block, name, parent in zip(blocks, names, [None, *names], strict=False):
        assert pool.commit(block, name, parent)
    assert pool.match(names) == 3
    assert pool.match([*names, key("y")]) == 3
    assert [pool.key_of(block) for block in blocks] == names
    pool.release(blocks)
    assert pool.counts() == counts(free=5, cached=3)
    assert pool.acquire(names) == blocks
    assert pool.counts() == counts(free=5, active=3)
    pool.release(blocks)
    assert pool.clear() == 3
    assert pool.counts() == counts(free=8)
    assert pool.match(names) == 0
    assert not bench.events.keys()
    pool.check()


def test_uncommitted_blocks_are_free_when_released(bench: Bench) -> None:
    bench.pool.release(bench.pool.allocate(8))
    assert bench.pool.counts() == counts(free=8)


def test_neighbours_are_handed_out_in_order(bench: Bench) -> None:
    first = bench.pool.allocate(3)
    assert first == [0, 1, 2]
    bench.pool.release(first)
    assert bench.pool.allocate(8) == list(range(8))


@pytest.mark.parametrize("total", [0, -1])
def test_a_pool_has_blocks(total: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(total, clock=ManualClock())


def test_allocating_is_all_or_nothing(bench: Bench) -> None:
    bench.pool.release(bench.cached(chain("x", 4)))
    held = bench.pool.allocate(2)
    with pytest.raises(PoolExhausted):
        bench.pool.allocate(7)
    assert bench.pool.match(chain("x", 4)) == 4, "nothing was evicted in vain"
    assert bench.pool.allocate(0) == []
    assert len(bench.pool.allocate(6)) == 6
    bench.pool.check()
    assert bench.pool.available() == 0
    bench.pool.release(held)
    assert bench.pool.available() == 2


def test_acquiring_what_is_not_committed_takes_nothing(bench: Bench) -> None:
    bench.pool.release(bench.cached(chain("x", 2)))
    with pytest.raises(KeyError):
        bench.pool.acquire([*chain("x", 2), key("y")])
    assert bench.pool.counts() == counts(free=6, cached=2)
    bench.pool.check()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda pool, block: pool.release([block, block]),
        lambda pool, block: pool.commit(block, key("y"), key("y")),
        lambda pool, block: (pool.commit(block, key("y"), None), pool.commit(block, key("z"), None)),
        lambda pool, block: (pool.commit(block, key("y"), None), pool.quarantine([block], lambda: True)),
        lambda pool, block: (pool.announce(A, block, key("y")), pool.commit(block, key("z"), None)),
        lambda pool, block: (pool.announce(A, block, key("y")), pool.announce(A, block, key("z"))),
        lambda pool, block: (pool.release([block]), pool.retain([block])),
        lambda pool, block: (pool.release([block]), pool.commit(block, key("y"), None)),
        lambda pool, block: (pool.release([block]), pool.announce(A, block, key("y"))),
        lambda pool, block: pool.lease([block], holder="p", ttl_s=0, grace_s=1),
        lambda pool, block: (pool.quarantine([block], lambda: True), pool.retain([block])),
        lambda pool, block: pool.allocate(-1),
    ],
)
def test_wrong_calls_are_our_bugs(bench: Bench, wrong: Callable[[BlockPool, BlockId], object]) -> None:
    (block,) = bench.pool.allocate(1)
    with pytest.raises(AssertionError):
        wrong(bench.pool, block)


# -- eviction --------------------------------------------------------------------------------------------------------


def test_the_least_recently_used_goes_first_and_tails_before_heads(bench: Bench) -> None:
    old, new = bench.cached(chain("o", 3)), bench.cached(chain("n", 3))
    bench.pool.release(old)
    bench.pool.release(new)
    assert [e.key for e in bench.pool.eviction_candidates(4)] == [key("o2"), key("o1"), key("o0"), key("n2")]
    assert bench.pool.eviction_candidates(1) == [Evictable(old[2], key("o2"), key("o1"))]
    bench.pool.allocate(2 + 2)
    assert bench.pool.match(chain("o", 3)) == 1
    assert bench.pool.match(chain("n", 3)) == 3
    assert bench.pool.evictions == 2


def test_use_renews_and_a_shared_head_outlives_its_tails(bench: Bench) -> None:
    head = bench.cached(chain("h", 2))
    left = bench.cached(chain("l", 2), parent=key("h1"))
    right = bench.cached(chain("r", 2), parent=key("h1"))
    bench.pool.release([*head, *left])
    bench.pool.release(right)
    bench.pool.release(bench.pool.acquire([*chain("h", 2), *chain("l", 2)]))
    assert [e.key for e in bench.pool.eviction_candidates(9)] == [key(n) for n in ("r1", "r0", "l1", "l0", "h1", "h0")]
    bench.pool.check()


def test_what_is_not_wanted_soon_goes_first_but_not_what_others_continue(bench: Bench) -> None:
    head = bench.cached(chain("h", 2))
    left = bench.cached(chain("l", 1), parent=key("h1"))
    right = bench.cached(chain("r", 2), parent=key("h1"))
    bench.pool.release([*head, *left])
    assert bench.pool.demote([*chain("h", 2), *chain("r", 2)]) == 0, "in use"
    bench.pool.release(right)
    assert bench.pool.demote([*chain("h", 2), *chain("r", 2), key("absent")]) == 2, "the head is the left one's too"
    assert [e.key for e in bench.pool.eviction_candidates(9)] == [key(n) for n in ("r1", "r0", "l0", "h1", "h0")]
    bench.pool.allocate(3 + 2)
    assert bench.pool.demote(chain("h", 2)) == 0
    bench.pool.check()
    bench.pool.allocate(1)
    assert bench.pool.demote(chain("h", 2)) == 2, "nothing hangs on it any more"


def test_whatever_order_blocks_are_released_in_no_parent_goes_before_its_child(bench: Bench) -> None:
    blocks = bench.cached(chain("x", 4))
    for block in (blocks[0], blocks[2], blocks[1]):
        bench.pool.release([block])
        assert bench.pool.available() == 4, "a block in use keeps all above it"
        bench.pool.check()
    bench.pool.release([blocks[3]])
    assert [e.key for e in bench.pool.eviction_candidates(9)] == chain("x", 4)[::-1]


def test_a_head_is_not_available_while_its_tail_is_used(bench: Bench) -> None:
    head, tail = bench.cached(chain("x", 1)), bench.cached(chain("y", 1), parent=key("x0"))
    bench.pool.release(head)
    assert bench.pool.available() == 6
    assert bench.pool.counts() == counts(free=6, active=2)
    with pytest.raises(PoolExhausted):
        bench.pool.allocate(7)
    assert bench.pool.clear() == 0
    bench.pool.release(tail)
    assert bench.pool.counts() == counts(free=6, cached=2)


def test_a_child_may_come_before_its_parent_and_outlive_it(bench: Bench) -> None:
    child = bench.cached([key("c")], parent=key("p"))
    parent = bench.cached([key("p")])
    bench.pool.release(parent)
    bench.pool.check()
    assert bench.pool.counts() == counts(free=6, active=2)
    bench.pool.release(child)
    assert [e.key for e in bench.pool.eviction_candidates(2)] == [key("c"), key("p")]
    bench.pool.check()


# -- single flight ---------------------------------------------------------------------------------------------------


def test_one_computes_and_the_others_know_who(bench: Bench) -> None:
    pool = bench.pool
    mine, theirs = pool.allocate(2)
    assert pool.computing(key("x")) is None
    assert pool.announce(A, mine, key("x"))
    assert pool.announce(A, mine, key("x")), "saying so twice is no harm"
    assert not pool.announce(B, theirs, key("x"))
    assert pool.computing(key("x")) == A
    assert pool.commit(mine, key("x"), None)
    assert pool.computing(key("x")) is None
    assert not pool.announce(B, theirs, key("x"))
    pool.check()


def test_when_the_one_who_computes_leaves_a_waiter_takes_over(bench: Bench) -> None:
    pool = bench.pool
    mine, theirs = pool.allocate(2)
    pool.announce(A, mine, key("x"))
    pool.release([mine])
    assert pool.computing(key("x")) is None
    assert pool.announce(B, theirs, key("x"))
    assert pool.computing(key("x")) == B
    pool.check()


def test_leaving_withdraws_even_while_a_peer_reads(bench: Bench) -> None:
    pool = bench.pool
    (block,) = pool.allocate(1)
    pool.announce(A, block, key("x"))
    lease = pool.lease([block], holder="p", ttl_s=1, grace_s=1)
    pool.release([block])
    assert pool.computing(key("x")) is None
    assert pool.counts() == counts(free=7, leased=1)
    pool.end_lease(lease)
    assert pool.counts() == counts(free=8)
    pool.check()


def test_a_transfer_that_never_ends_withdraws_too(bench: Bench) -> None:
    (block,) = bench.pool.allocate(1)
    bench.pool.announce(A, block, key("x"))
    bench.pool.quarantine([block], lambda: False)
    assert bench.pool.computing(key("x")) is None


def test_who_commits_second_keeps_a_private_block(bench: Bench) -> None:
    pool = bench.pool
    first, second = pool.allocate(2)
    pool.announce(A, first, key("x"))
    assert pool.commit(second, key("x"), None), "whoever is first, announced or not"
    assert pool.computing(key("x")) is None
    assert not pool.commit(first, key("x"), None)
    assert pool.state_of(first) is BlockState.COMPUTING
    assert pool.key_of(first) is None
    pool.check()
    pool.release([first, second])
    assert pool.counts() == counts(free=7, cached=1)


# -- leases and quarantine -------------------------------------------------------------------------------------------


def test_leased_blocks_stay_until_the_lease_ends(bench: Bench) -> None:
    pool = bench.pool
    blocks = [*bench.cached(chain("x", 2)), *pool.allocate(1)]
    lease = pool.lease(blocks, holder="peer", ttl_s=10, grace_s=5)
    assert pool.counts() == counts(free=5, active=3)
    pool.release(blocks)
    assert pool.counts() == counts(free=5, leased=3)
    assert pool.acquire(chain("x", 2)) == blocks[:2]
    assert pool.counts() == counts(free=5, active=2, leased=1)
    pool.release(blocks[:2])
    pool.end_lease(lease)
    assert pool.counts() == counts(free=6, cached=2)
    with pytest.raises(UnknownLease):
        pool.end_lease(lease)
    pool.check()


def test_leases_lapse_after_their_time_and_grace(bench: Bench) -> None:
    pool = bench.pool
    (block,) = pool.allocate(1)
    short, long = (pool.lease([block], holder="peer", ttl_s=ttl_s, grace_s=5) for ttl_s in (10, 20))
    assert short != long
    pool.release([block])
    bench.clock.advance(14.9)
    assert pool.expire() == []
    bench.clock.advance(0.1)
    assert pool.expire() == [short]
    assert pool.counts() == counts(free=7, leased=1)
    with pytest.raises(UnknownLease):
        pool.end_lease(short)
    bench.clock.advance(100)
    assert pool.expire() == [long]
    assert pool.leases_lapsed == 2
    assert pool.counts() == counts(free=8)


def test_leases_of_another_epoch_are_unknown(bench: Bench) -> None:
    earlier = BlockPool(8, clock=bench.clock, events=EventLog(SourceId("pool:w"), NodeId("n"), 6))
    lease = earlier.lease(earlier.allocate(1), holder="p", ttl_s=1, grace_s=0)
    bench.pool.lease(bench.pool.allocate(1), holder="p", ttl_s=1, grace_s=0)
    with pytest.raises(UnknownLease):
        bench.pool.end_lease(lease)


def test_quarantined_blocks_wait_for_their_transfer(bench: Bench) -> None:
    pool = bench.pool
    blocks, ended = pool.allocate(3), list[bool]()
    pool.quarantine(blocks[:2], lambda: bool(ended))
    assert pool.counts() == counts(free=5, active=1, quarantined=2)
    assert pool.sweep() == 0
    with pytest.raises(PoolExhausted):
        pool.allocate(6)
    ended.append(True)
    assert pool.sweep() == 2
    assert pool.counts() == counts(free=7, active=1)
    assert pool.sweep() == 0
    pool.check()


def test_a_quarantined_block_that_another_holds_waits_for_both(bench: Bench) -> None:
    pool = bench.pool
    (block,) = pool.allocate(1)
    pool.retain([block])
    pool.quarantine([block], lambda: True)
    assert pool.sweep() == 0
    pool.check()
    pool.release([block])
    assert pool.sweep() == 1
    assert pool.counts() == counts(free=8)


# -- anything, in any order ------------------------------------------------------------------------------------------


class Walk:
    """Random calls, and what a plain account of them says must be so."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.bench = Bench(self.rng.choice([3, 12, 40]))
        self.pool = self.bench.pool
        self.held: list[list[BlockId]] = []  # chains that somebody holds one reference to, block by block
        self.leases: dict[LeaseId, tuple[list[BlockId], float]] = {}
        self.moving: dict[int, bool] = {}  # transfer -> settled
        self.quarantined: dict[BlockId, int] = {}
        self.parents: dict[BlockKey, BlockKey | None] = {}
        self.chains = [[key(f"{c}.{i}") for i in range(10)] for c in range(4)]
        for i, other in enumerate(self.chains[1:], 1):
            other[:i] = self.chains[0][:i]  # chains share heads
        for names in self.chains:
            self.parents.update(zip(names, [None, *names], strict=False))

    def references(self) -> Counter[BlockId]:
        leased = [block for blocks, _ in self.leases.values() for block in blocks]
        return Counter([block for blocks in self.held for block in blocks] + leased)

    def hold(self, blocks: list[BlockId]) -> None:
        if blocks:
            self.held.append(blocks)

    def prefix(self) -> list[BlockKey]:
        return self.rng.choice(self.chains)[: self.rng.randint(0, 10)]

    # each of these is one kind of step

    def acquire(self) -> None:
        names = self.prefix()
        self.hold(self.pool.acquire(names[: self.pool.match(names)]))

    def allocate(self) -> None:
        count, busy, could = self.rng.randint(0, 6), self.references(), self.pool.available()
        if count > could:
            with pytest.raises(PoolExhausted):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert not busy.keys() & set(blocks), "a block in use was handed out"
        assert not self.quarantined.keys() & set(blocks), "a block that a transfer may write to was handed out"
        self.hold(blocks)

    def compute(self) -> None:
        """Announce, and mostly commit, some blocks of a chain."""
        names = self.prefix()
        start = self.pool.match(names)
        missing = names[start : start + min(3, self.pool.available())]
        blocks = self.pool.allocate(len(missing))
        for name, block in zip(missing, blocks, strict=True):
            owner = self.pool.computing(name)
            assert self.pool.announce(RequestId(f"r{block}"), block, name) == (owner is None and self.pool.match([name]) == 0)
            if self.rng.random() < 0.8:
                cached = self.pool.match([name])
                assert self.pool.commit(block, name, self.parents[name]) == (not cached)
        self.hold(blocks)

    def release(self) -> None:
        if self.held:
            blocks = self.held.pop(self.rng.randrange(len(self.held)))
            if self.rng.random() < 0.3:  # some now, some later
                cut = self.rng.randint(0, len(blocks))
                self.hold(blocks[:cut])
                blocks = blocks[cut:]
            self.pool.release(blocks)

    def retain(self) -> None:
        if self.held:
            blocks = self.rng.choice(self.held)
            usable = [b for b in blocks if b not in self.quarantined]
            self.pool.retain(usable)
            self.hold(usable)

    def lease(self) -> None:
        if self.held:
            blocks = [b for b in self.rng.choice(self.held) if b not in self.quarantined]
            ttl_s = self.rng.choice([1.0, 5.0])
            lease = self.pool.lease(blocks, holder="p", ttl_s=ttl_s, grace_s=1.0)
            self.leases[lease] = (blocks, self.bench.clock.now_s() + ttl_s + 1.0)

    def end_lease(self) -> None:
        if self.leases:
            lease = self.rng.choice(list(self.leases))
            del self.leases[lease]
            self.pool.end_lease(lease)

    def pass_time(self) -> None:
        self.bench.clock.advance(self.rng.choice([0.5, 3.0]))
        over = {lease for lease, (_, ends_s) in self.leases.items() if self.bench.clock.now_s() >= ends_s}
        assert set(self.pool.expire()) == over
        for lease in over:
            del self.leases[lease]

    def quarantine(self) -> None:
        for i, blocks in enumerate(self.held):
            private = [b for b in blocks if self.pool.state_of(b) is BlockState.COMPUTING]
            if private:
                self.held[i] = [b for b in blocks if b not in private]
                transfer = len(self.moving)
                self.moving[transfer] = False
                self.pool.quarantine(private, partial(self.moving.__getitem__, transfer))
                self.quarantined.update(dict.fromkeys(private, transfer))
                return

    def sweep(self) -> None:
        for transfer in self.moving:
            self.moving[transfer] |= self.rng.random() < 0.3
        busy = self.references()
        free = {b for b, transfer in self.quarantined.items() if self.moving[transfer] and not busy[b]}
        assert self.pool.sweep() == len(free)
        for block in free:
            del self.quarantined[block]

    def clear(self) -> None:
        if self.rng.random() < 0.1:
            cached = self.pool.counts().cached
            assert self.pool.clear() == cached
            assert self.pool.counts().cached == 0

    def demote(self) -> None:
        names = self.prefix()
        demoted = self.pool.demote(names)
        first = [e.key for e in self.pool.eviction_candidates(demoted)]
        have = self.pool.match(names)
        assert first == names[have - demoted : have][::-1]

    def step(self) -> None:
        before = set(self.bench.events.keys())
        kinds = [self.acquire, self.allocate, self.compute, self.compute, self.release, self.release, self.retain]
        kinds += [self.lease, self.end_lease, self.pass_time, self.quarantine, self.sweep, self.clear, self.demote]
        self.rng.choice(kinds)()
        self.pool.check()
        after = set(self.bench.events.keys())
        assert not {self.parents[name] for name in before & after} & (before - after), "a parent left before its child"
        busy = self.references()
        for block in range(self.pool.total_blocks):
            free = self.pool.state_of(BlockId(block)) is BlockState.FREE
            assert not (free and (busy[BlockId(block)] or block in self.quarantined)), "a block in use is free"

    def end(self) -> None:
        """When everybody has left, everything is reclaimed."""
        for blocks in self.held:
            self.pool.release(blocks)
        self.bench.clock.advance(1e6)
        self.pool.expire()
        self.moving.update(dict.fromkeys(self.moving, True))
        self.pool.sweep()
        self.pool.check()
        now = self.pool.counts()
        assert now.free + now.cached == now.total == self.pool.available()


@pytest.mark.parametrize("seed", range(12))
def test_random_walk(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(500):
        walk.step()
    walk.end()


def test_eviction_order_equals_a_brute_force_least_recently_used() -> None:
    """Of the blocks last used longest ago, the deepest in its chain."""
    rng, bench = random.Random(5), Bench(30)
    used: dict[BlockKey, tuple[int, int]] = {}  # by committed key: when last, and how deep
    for now in range(600):
        names = chain(f"{rng.randrange(12)}-", rng.randint(1, 5))
        have = bench.pool.match(names)
        blocks = bench.pool.acquire(names[:have])
        for _ in range(len(names) - have - (bench.pool.total_blocks - len(used))):
            del used[min(used.keys() - set(names[:have]), key=lambda name: used[name])]
        blocks += bench.pool.allocate(len(names) - have)
        for block, name, parent in list(zip(blocks, names, [None, *names], strict=False))[have:]:
            assert bench.pool.commit(block, name, parent)
        bench.pool.release(blocks)
        used.update((name, (now, -depth)) for depth, name in enumerate(names))
        assert set(bench.events.keys()) == used.keys()
    assert bench.pool.evictions > 100

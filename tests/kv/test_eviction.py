"""Eviction policies: children before parents, nothing that is blocked, and each one's own order against a slow oracle."""

from __future__ import annotations

import random

import pytest

from cpd_ray.ids import BlockKey
from kv.eviction import DEFAULT_POLICY, POLICIES, new_policy
from kv.eviction.ghosts import Ghosts
from kv.eviction.queued import S3Fifo, TwoQ
from kv.eviction.scored import AgedLeastFrequentlyUsed, LeastRecentlyUsed, ReuseHorizon

NAMES = sorted(POLICIES)


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16, "big"))


def chain(c: int, count: int) -> list[BlockKey]:
    return [key(1000 * c + i) for i in range(count)]


class Cache:
    """`slots` blocks under a policy, used as a slab does: match, hit, make room, insert."""

    def __init__(self, name: str, slots: int) -> None:
        self.policy = new_policy(name, slots)
        self.slots = slots
        self.present: dict[BlockKey, BlockKey | None] = {}

    def ask(self, keys: list[BlockKey]) -> int:
        hits = 0
        while hits < len(keys) and keys[hits] in self.present:
            hits += 1
        self.policy.hit(keys[:hits])
        new = [k for k in keys[hits:] if k not in self.present]
        room = self.slots - len(self.present)
        if len(new) > room:
            for victim in self.policy.victims(len(new) - room, set(keys).__contains__):
                del self.present[victim]
        above: BlockKey | None = keys[hits - 1] if hits else None
        for k in keys[hits:]:
            if k not in self.present:
                if len(self.present) == self.slots:
                    break
                self.policy.insert(k, above)
                self.present[k] = above
            above = k
        return hits

    def check(self) -> None:
        self.policy.check(self.present.keys())
        assert len(self.present) <= self.slots


@pytest.mark.parametrize("name", NAMES)
def test_a_random_walk_keeps_the_books(name: str) -> None:
    rng = random.Random(name)
    policy = new_policy(name, 30)
    present: dict[BlockKey, BlockKey | None] = {}
    keys = [key(i) for i in range(80)]
    for _ in range(3000):
        what = rng.random()
        if what < 0.5:
            new = rng.choice(keys)
            if new not in present:
                parent = rng.choice([None, *keys[: max(1, keys.index(new))]])
                parent = parent if parent != new else None
                policy.insert(new, parent)
                present[new] = parent
        elif what < 0.7 and present:
            policy.hit(rng.sample(list(present), rng.randint(1, len(present))))
        elif what < 0.8 and present:
            gone = rng.choice(list(present))
            policy.remove(gone)
            del present[gone]
        else:
            kept = set(rng.sample(list(present), rng.randint(0, len(present) // 2))) if present else set()
            asked = rng.randint(0, 12)
            chosen = policy.victims(asked, kept.__contains__)
            assert len(chosen) <= asked
            for victim in chosen:
                assert victim not in kept, "a blocked block was chosen"
                del present[victim]
                assert victim not in present.values(), "a parent went before its child"
            if len(chosen) < asked:
                leaves = set(present) - set(present.values())  # type: ignore[arg-type]
                assert leaves <= kept, "a leaf was spared though more was asked for"
        policy.check(present.keys())


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_not_blocked_can_be_had(name: str) -> None:
    policy = new_policy(name, 50)
    for c in range(5):
        above = None
        for k in chain(c, 10):
            policy.insert(k, above)
            above = k
    pinned = set(chain(2, 10)[:4])
    chosen = policy.victims(100, pinned.__contains__)
    assert len(chosen) == 46
    policy.check(pinned)
    assert policy.victims(1, pinned.__contains__) == []
    assert set(policy.victims(4, lambda _: False)) == pinned


@pytest.mark.parametrize("name", NAMES)
def test_churn_without_a_choice_does_not_grow_the_books(name: str) -> None:
    policy = new_policy(name, 10)
    for i in range(5000):
        policy.insert(key(i), None)
        policy.remove(key(i))
    policy.insert(key(1), None)
    policy.check({key(1)})
    for queue in getattr(policy, "_queues", {False: getattr(policy, "_leaves", None)}).values():
        assert len(queue._heap) + len(queue._fresh) < 200


def test_lru_against_an_oracle() -> None:
    rng = random.Random(1)
    cache = Cache("lru", 40)
    used: dict[BlockKey, int] = {}
    for now in range(1, 600):
        names = chain(rng.randrange(12), rng.randint(1, 14))
        before = dict(cache.present)
        cache.ask(names)
        gone = set(before) - set(cache.present)
        leaves_left = set(cache.present) - {p for p in cache.present.values() if p} - set(names)
        if gone and leaves_left:
            assert max(used[g] for g in gone) <= min(used[k] for k in leaves_left) or any(
                child in gone for child, parent in before.items() if parent in leaves_left
            )
        for k in names:
            if k in cache.present:
                used[k] = now
        cache.check()


def test_a_parent_left_without_children_is_next_by_its_own_score() -> None:
    policy = LeastRecentlyUsed()
    policy.insert(key(0), None)
    policy.insert(key(1), key(0))
    policy.insert(key(2), None)
    policy.hit([key(0)])
    assert policy.victims(3, lambda _: False) == [key(1), key(2), key(0)]


def test_aged_lfu_counts_reads_and_forgets_them() -> None:
    policy = AgedLeastFrequentlyUsed(4)
    for i in range(3):
        policy.insert(key(i), None)
    for _ in range(3):
        policy.hit([key(0)])
    assert policy.victims(1, lambda _: False) == [key(1)]
    for i in range(100, 140):
        policy.insert(key(i), None)
        assert key(0) not in policy.victims(1, lambda _: False) or i > 104, "three reads are worth some half-lives"
    assert key(0) not in policy._nodes, "but not for ever"


def test_two_queues_keep_what_came_back() -> None:
    two, s3 = TwoQ(8), S3Fifo(10)
    for policy in (two, s3):
        policy.insert(key(1), None)
        policy.hit([key(1)])
        for i in range(2, 40):
            policy.insert(key(i), None)
            if i > 8:
                policy.victims(1, lambda _: False)
        assert (key(1) in policy._nodes) == (policy is s3), "a read while new counts for S3-FIFO, not for 2Q"
    two.insert(key(50), None)
    for i in range(51, 54):
        two.insert(key(i), None)
    gone = two.victims(3, lambda _: False)
    two.insert(gone[0], None)
    assert two._nodes[gone[0]].main, "asked for again while remembered"


def test_the_horizon_follows_how_long_the_first_reuse_takes() -> None:
    policy = ReuseHorizon(100)
    for distance in (300, 20):
        for first in range(0, 5000, distance):
            for _ in range(2):
                for i in range(distance):
                    policy.insert(key(100_000 * distance + first + i), None)
                    policy.remove(key(100_000 * distance + first + i))
        assert 0.5 * distance < policy.horizon < 2 * distance, distance


def test_ghosts_are_bounded_and_the_oldest_go() -> None:
    ghosts: Ghosts[int] = Ghosts(3)
    for i in range(5):
        ghosts.remember(key(i), i)
    assert len(ghosts) == 3
    assert [ghosts.recall(key(i)) for i in range(5)] == [None, None, 2, 3, 4]
    assert len(ghosts) == 0


def hit_rate(name: str, rounds: int) -> float:
    """Hits of the warm sessions in a mix that floods the cache with one-off prompts."""
    rng = random.Random(3)
    cache = Cache(name, 300)
    system = chain(1, 5)
    asked = found = 0
    one_off = 1000
    for turn in range(rounds):
        if turn % 4 == 0:
            session = rng.randrange(12)
            names = system + [key(10_000 * (session + 2) + i) for i in range(15)]
            hits = cache.ask(names)
            if turn > rounds // 4:
                asked += len(names)
                found += hits
        else:
            one_off += 1
            cache.ask(system + [key(1_000_000 + 100 * one_off + i) for i in range(20)])
    cache.check()
    return found / asked


def test_the_default_keeps_hot_heads_and_sessions_through_floods_of_one_off_prompts() -> None:
    default, lru = hit_rate(DEFAULT_POLICY, 1200), hit_rate("lru", 1200)
    assert default > 0.95
    assert default > lru + 0.2


@pytest.mark.parametrize("name", NAMES)
def test_a_shared_head_survives_a_burst(name: str) -> None:
    cache = Cache(name, 60)
    head = chain(1, 4)
    for i in range(6):
        cache.ask(head + chain(10 + i, 5))
    for i in range(40):
        cache.ask(head + chain(100 + i, 6))
    assert all(k in cache.present for k in head)

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd_ray.clock import ManualClock
from cpd_ray.errors import BadMessage
from cpd_ray.ids import KEY_BYTES, BlockKey, NodeId, SourceId, join_keys, split_keys
from cpd_ray.messages import EventsAfter, EventsPage, KvEvents
from kv.directory import MAX_FLOORS, RELAYED_BATCHES, UNKNOWN_EPOCH, Applied, Directory
from kv.events import EventLog
from kv.holders import RUN_KEYS

A, B, NODE = SourceId("pool:a"), SourceId("slab:b"), NodeId("n")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(KEY_BYTES, "little"))


def keys(*numbers: int) -> list[BlockKey]:
    return [key(number) for number in numbers]


def batch(sequence: int, stored: Sequence[int] = (), removed: Sequence[int] = (), epoch: int = 1, source: SourceId = A) -> KvEvents:
    return KvEvents(source, NODE, epoch, sequence, stored=join_keys(keys(*stored)), removed=join_keys(keys(*removed)))


def snapshot(sequence: int, stored: Sequence[int], epoch: int = 1, source: SourceId = A) -> KvEvents:
    return KvEvents(source, NODE, epoch, sequence, stored=join_keys(keys(*stored)), cleared=True)


def held(directory: Directory, source: SourceId) -> set[BlockKey]:
    return set(split_keys(directory.snapshot(source).stored))


@pytest.fixture
def directory() -> Directory:
    return Directory(clock=ManualClock())


# -- matching --------------------------------------------------------------------------------------------------------


def test_a_match_counts_each_sources_leading_blocks(directory: Directory) -> None:
    directory.apply(batch(1, [1, 2, 3]))
    directory.apply(batch(1, [1, 2, 4, 5], source=B))
    directory.apply(batch(1, [2, 3, 4], source=SourceId("pool:c")))
    assert directory.match(keys(1, 2, 3, 4, 5)).blocks == {A: 3, B: 2}
    assert directory.match(keys(2, 3)).blocks == {A: 2, B: 1, SourceId("pool:c"): 2}
    assert directory.match(keys(9, 1)).blocks == {}
    assert directory.match([]).blocks == {}


def test_matches_longer_than_any_look(directory: Directory) -> None:
    numbers = range(1, 10_001)
    directory.apply(batch(1, numbers))
    directory.apply(batch(1, [n for n in numbers if n != 9_000], source=B))
    assert directory.match(keys(*numbers)).blocks == {A: 10_000, B: 8_999}
    for length in (1, RUN_KEYS - 1, RUN_KEYS, RUN_KEYS + 1):
        assert directory.match([*keys(*range(1, length + 1)), key(20_000)]).blocks == {A: length, B: length}
    directory.check()


def test_nobody_there(directory: Directory) -> None:
    assert directory.match(keys(1)).blocks == {}
    assert directory.sources() == ()
    directory.check()


# -- epochs and numbers ----------------------------------------------------------------------------------------------


def test_batches_apply_in_order_and_once(directory: Directory) -> None:
    assert directory.apply(batch(1, [1, 2])) is Applied.APPLIED
    assert directory.apply(batch(1, [9])) is Applied.DUPLICATE
    assert directory.apply(batch(3, [4])) is Applied.GAP
    assert directory.apply(batch(2, [3], [1])) is Applied.APPLIED
    assert directory.apply(batch(3, [4])) is Applied.APPLIED
    assert held(directory, A) == set(keys(2, 3, 4))


def test_within_a_batch_removals_come_first(directory: Directory) -> None:
    directory.apply(batch(1, [1]))
    directory.apply(batch(2, [1, 2], [1, 7]))
    assert held(directory, A) == set(keys(1, 2))


def test_a_gap_ends_with_a_snapshot(directory: Directory) -> None:
    directory.apply(batch(1, [1, 2]))
    assert directory.apply(batch(5, [9])) is Applied.GAP
    assert directory.apply(snapshot(5, [2, 9])) is Applied.APPLIED
    assert directory.apply(batch(6, [10])) is Applied.APPLIED
    assert directory.apply(snapshot(5, [2, 9])) is Applied.DUPLICATE, "an old snapshot does not take back what came after"
    assert held(directory, A) == set(keys(2, 9, 10))


def test_a_restart_makes_what_was_there_vanish_at_once(directory: Directory) -> None:
    directory.apply(batch(1, [1, 2]))
    directory.apply(batch(1, [1], source=B))
    assert directory.apply(batch(1, [2], epoch=2)) is Applied.APPLIED
    assert directory.match(keys(1)).blocks == {B: 1}
    assert directory.apply(batch(2, [1], epoch=1)) is Applied.STALE_EPOCH
    assert directory.apply(snapshot(9, [1], epoch=1)) is Applied.STALE_EPOCH
    assert held(directory, A) == set(keys(2))


def test_a_restart_that_is_seen_late_is_a_gap_but_its_ghosts_vanish(directory: Directory) -> None:
    directory.apply(batch(1, [1, 2]))
    assert directory.apply(batch(4, [7], epoch=2)) is Applied.GAP
    assert held(directory, A) == set()
    assert directory.apply(batch(1, [5], epoch=2)) is Applied.APPLIED


def test_a_heartbeat_shows_life_and_gaps_but_changes_nothing(directory: Directory) -> None:
    assert directory.apply(batch(0)) is Applied.APPLIED, "a source with nothing is a source"
    assert [state.source for state in directory.sources()] == [A]
    assert directory.apply(batch(0)) is Applied.DUPLICATE
    assert directory.apply(batch(1)) is Applied.GAP
    directory.apply(batch(1, [1]))
    assert directory.apply(batch(1)) is Applied.DUPLICATE
    assert held(directory, A) == set(keys(1))


@pytest.mark.parametrize(
    "bad",
    [
        KvEvents(A, NODE, 1, 2, stored=bytes(KEY_BYTES + 1)),
        KvEvents(A, NODE, 1, 2, removed=b"x"),
        KvEvents(A, NODE, -1, 2),
        KvEvents(A, NODE, 1, -2),
        KvEvents(SourceId(""), NODE, 1, 1),
        KvEvents(A, NODE, 1, 0, stored=bytes(KEY_BYTES)),
    ],
)
def test_what_no_source_sends_is_refused_and_changes_nothing(directory: Directory, bad: KvEvents) -> None:
    directory.apply(batch(1, [1, 2]))
    before = directory.sources()
    with pytest.raises(BadMessage):
        directory.apply(bad)
    assert directory.sources() == before
    assert held(directory, A) == set(keys(1, 2))


@given(st.lists(st.builds(KvEvents, st.just(A), st.just(NODE), st.integers(-1, 3), st.integers(-1, 4), st.binary(max_size=48), st.binary(max_size=48), st.booleans()), max_size=12))  # fmt: skip  # noqa: E501
def test_fuzzed_batches_are_applied_or_refused(batches: list[KvEvents]) -> None:
    directory = Directory(clock=ManualClock())
    for fuzzed in batches:
        with contextlib.suppress(BadMessage):
            directory.apply(fuzzed)
        directory.check()


# -- coming and going ------------------------------------------------------------------------------------------------


def test_a_forgotten_source_holds_nothing_and_comes_back_only_whole(directory: Directory) -> None:
    directory.apply(batch(1, [1]))
    directory.apply(batch(1, [1], source=B))
    directory.forget(A)
    directory.forget(A)
    directory.forget(SourceId("pool:never"))
    assert directory.match(keys(1)).blocks == {B: 1}
    assert directory.apply(batch(1, [1])) is Applied.GAP, "late news of the dead"
    assert directory.apply(batch(2, [2])) is Applied.GAP
    assert [state.source for state in directory.sources()] == [B]
    assert directory.apply(snapshot(2, [1, 2])) is Applied.APPLIED
    assert directory.match(keys(1, 2)).blocks == {A: 2, B: 1}
    directory.check()


def test_silence_is_death_until_heard_again() -> None:
    clock = ManualClock()
    directory = Directory(clock=clock, timeout_s=10)
    directory.apply(batch(1, [1]))
    directory.apply(batch(1, [1], source=B))
    clock.advance(6)
    assert directory.apply(batch(1)) is Applied.DUPLICATE
    clock.advance(6)
    assert {state.source: state.silent_s for state in directory.sources()} == {A: 6, B: 12}
    assert directory.expire() == [B]
    assert directory.expire() == []
    assert directory.match(keys(1)).blocks == {A: 1}
    directory.apply(batch(1, [1], epoch=0))  # stale: no sign of life
    clock.advance(4)
    assert directory.expire() == [A]
    directory.check()


def test_sources_that_come_and_go_for_ever_leave_nothing_behind(directory: Directory) -> None:
    for number in range(MAX_FLOORS + 500):
        source = SourceId(f"pool:{number}")
        directory.apply(batch(1, [number % 100], source=source))
        directory.forget(source)
    directory.check()
    assert len(directory) == 0
    assert directory.apply(batch(1, [1], source=SourceId(f"pool:{MAX_FLOORS}"))) is Applied.GAP


# -- bounded memory --------------------------------------------------------------------------------------------------


def test_memory_is_bounded_and_shared_heads_outlive_a_flood_of_one_offs() -> None:
    directory = Directory(clock=ManualClock(), max_keys=10_000)
    system_prompt = range(1, 101)
    directory.apply(batch(1, system_prompt))
    top = 1_000
    for sequence in range(2, 200):
        one_off = range(top, top + 500)
        top += 500
        directory.apply(batch(sequence, one_off))
        assert len(directory) <= 10_000
        assert directory.match(keys(*system_prompt, 0)).blocks == {A: 100}
    directory.check()
    assert directory.dropped_keys == top - 1_000 + 100 - len(directory)
    assert directory.match(keys(*one_off)).blocks == {A: 500}, "what was stored last is there"
    assert directory.match(keys(1_000)).blocks == {}, "what was stored first and never asked for is gone"


def test_a_snapshot_larger_than_the_bound(directory: Directory) -> None:
    directory = Directory(clock=ManualClock(), max_keys=100)
    directory.apply(snapshot(7, range(20_000)))
    directory.check()
    assert 90 <= len(directory) <= 100
    assert held(directory, A) <= set(keys(*range(20_000)))
    assert directory.apply(batch(8, [], range(20_000))) is Applied.APPLIED
    assert held(directory, A) == set()


def test_what_the_dead_held_makes_room_first() -> None:
    directory = Directory(clock=ManualClock(), max_keys=1_000)
    directory.apply(batch(1, range(500)))
    directory.apply(batch(1, range(500, 1_000), source=B))
    directory.forget(B)
    assert len(directory) == 500
    directory.apply(batch(2, range(2_000, 2_500)))
    directory.check()
    assert held(directory, A) == set(keys(*range(500), *range(2_000, 2_500)))
    assert directory.dropped_keys == 0


# -- followers -------------------------------------------------------------------------------------------------------


def follow(follower: Directory, leader: Directory) -> EventsPage:
    page = leader.page(follower.positions())
    follower.follow(page)
    follower.check()
    assert {s.source: held(follower, s.source) for s in follower.sources()} == {
        s.source: held(leader, s.source) for s in leader.sources()
    }
    return page


def test_a_follower_gets_snapshots_then_deltas_then_heartbeats(directory: Directory) -> None:
    follower = Directory(clock=ManualClock())
    directory.apply(batch(1, [1, 2]))
    directory.apply(batch(2, [3]))
    (first,) = follow(follower, directory).batches
    assert (first.cleared, first.sequence, held(follower, A)) == (True, 2, set(keys(1, 2, 3)))
    directory.apply(batch(3, [4], [1]))
    assert follow(follower, directory).batches == (batch(3, [4], [1]),)
    assert follow(follower, directory).batches == (batch(3),)
    directory.forget(A)
    assert follow(follower, directory).batches == ()
    assert follower.sources() == ()


def test_a_follower_that_lags_gets_a_snapshot(directory: Directory) -> None:
    follower = Directory(clock=ManualClock())
    directory.apply(batch(1, [1]))
    follow(follower, directory)
    for sequence in range(2, RELAYED_BATCHES + 10):
        directory.apply(batch(sequence, [sequence]))
    (page,) = follow(follower, directory).batches
    assert page.cleared
    directory.check()


def test_a_leader_that_knows_less_takes_nothing_back(directory: Directory) -> None:
    follower = Directory(clock=ManualClock())
    for sequence in range(1, 5):
        follower.apply(batch(sequence, [sequence]))
    directory.apply(batch(1, [1]))
    follower.follow(directory.page(follower.positions()))
    assert held(follower, A) == set(keys(1, 2, 3, 4))


def test_after_answers_as_the_source_would(directory: Directory) -> None:
    assert directory.after(EventsAfter(A, 1, 0)) == EventsPage(())
    directory.apply(batch(1, [1]))
    directory.apply(batch(2, [2]))
    assert directory.after(EventsAfter(A, 1, 1)) == EventsPage((batch(2, [2]),))
    assert directory.after(EventsAfter(A, 1, 2)) == EventsPage((batch(2),))
    assert directory.after(EventsAfter(A, UNKNOWN_EPOCH, 0)).batches[0].cleared
    with pytest.raises(KeyError):
        directory.snapshot(B)


# -- anything, in any order ------------------------------------------------------------------------------------------


class Walk:
    """Sources that store, remove and restart; a network that loses, doubles and reorders; a directory that asks on a gap, and one
    that follows it. `truth` is what each source held at each of its numbers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.names = [SourceId(f"pool:{i}") for i in range(4)]
        self.epochs = dict.fromkeys(self.names, 0)
        self.logs = {name: self.started(name) for name in self.names}
        self.truth: dict[tuple[SourceId, int, int], set[BlockKey]] = {}
        self.network: list[KvEvents] = []
        self.directory = Directory(clock=self.clock, timeout_s=50)
        self.follower = Directory(clock=self.clock, timeout_s=50)
        self.chains = [[key(100 * c + i) for i in range(12)] for c in range(3)]
        for other in self.chains[1:]:
            other[:4] = self.chains[0][:4]

    def started(self, name: SourceId) -> EventLog:
        self.epochs[name] += 1
        return EventLog(name, NODE, self.epochs[name], capacity_batches=self.rng.choice([2, 10]))

    def send(self, name: SourceId, page: EventsPage) -> None:
        log = self.logs[name]
        self.truth[name, log.epoch, log.sequence] = set(log.keys())
        self.network += page.batches

    def change(self) -> None:
        name = self.rng.choice(self.names)
        log = self.logs[name]
        chain = self.rng.choice(self.chains)
        some = chain[: self.rng.randint(0, 12)] if self.rng.random() < 0.7 else self.rng.sample(chain, 4)
        for one in some:
            (log.stored if self.rng.random() < 0.75 else log.removed)(one)
        before = log.sequence
        log.flush()
        if log.sequence > before:
            self.send(name, log.page(log.epoch, before))

    def restart(self) -> None:
        name = self.rng.choice(self.names)
        self.logs[name] = self.started(name)

    def heartbeat(self) -> None:
        name = self.rng.choice(self.names)
        self.send(name, EventsPage((self.logs[name].heartbeat(),)))

    def deliver(self) -> None:
        if not self.network:
            return
        place = 0 if self.rng.random() < 0.6 else self.rng.randrange(len(self.network))
        arrived = self.network[place]
        if self.rng.random() < 0.85:
            del self.network[place]  # else it comes again
        if self.rng.random() < 0.1:
            return  # lost
        if self.directory.apply(arrived) is Applied.GAP and self.rng.random() < 0.7:
            self.ask(arrived.source)

    def ask(self, name: SourceId) -> None:
        known = {state.source: state for state in self.directory.sources()}.get(name)
        log = self.logs[name]
        page = log.page(known.epoch, known.sequence) if known else log.page(UNKNOWN_EPOCH, 0)
        self.truth[name, log.epoch, log.sequence] = set(log.keys())
        assert all(self.directory.apply(b) in (Applied.APPLIED, Applied.DUPLICATE) for b in page.batches)
        assert held(self.directory, name) == set(log.keys()), "who asks knows everything"

    def leave(self) -> None:
        if self.rng.random() < 0.5:
            self.directory.forget(self.rng.choice(self.names))
        else:
            self.clock.advance(self.rng.choice([1, 20]))
            self.directory.expire()

    def follow(self) -> None:
        self.follower.follow(self.directory.page(self.follower.positions()))
        self.compare(self.follower)
        ahead = {s.source: (s.epoch, s.sequence) for s in self.directory.sources()}
        for state in self.follower.sources():
            assert (state.epoch, state.sequence) >= ahead[state.source]

    def compare(self, directory: Directory) -> None:
        directory.check()
        belief = {s.source: self.truth.get((s.source, s.epoch, s.sequence), set()) for s in directory.sources()}
        assert all(s.sequence == 0 or (s.source, s.epoch, s.sequence) in self.truth for s in directory.sources())
        assert {s.source: s.keys for s in directory.sources()} == {name: len(some) for name, some in belief.items()}
        for chain in self.chains:
            leading = {}
            for name, some in belief.items():
                count = next((i for i, one in enumerate(chain) if one not in some), len(chain))
                if count:
                    leading[name] = count
            assert directory.match(chain).blocks == leading

    def step(self) -> None:
        kinds = [self.change] * 4 + [self.deliver] * 8 + [self.heartbeat] * 2 + [self.follow]
        if self.rng.random() < 0.1:
            kinds = [self.restart, self.leave]
        self.rng.choice(kinds)()
        self.compare(self.directory)

    def end(self) -> None:
        """Once the network is quiet, one round of heartbeats puts everything right."""
        self.network.clear()
        for name in self.names:
            if self.directory.apply(self.logs[name].heartbeat()) is not Applied.DUPLICATE:
                self.ask(name)
            assert held(self.directory, name) == set(self.logs[name].keys())
        self.follow()


@pytest.mark.parametrize("seed", range(10))
def test_random_walk_of_sources_and_a_faulty_network(seed: int) -> None:
    walk = Walk(seed)
    for _ in range(400):
        walk.step()
    walk.end()


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_under_a_tight_bound(seed: int) -> None:
    """What is dropped is missing, nothing else is wrong: what is known of each source is part of what it holds."""
    rng = random.Random(seed)
    directory = Directory(clock=ManualClock(), max_keys=60)
    logs = [EventLog(SourceId(f"pool:{i}"), NODE, 1) for i in range(3)]
    for _ in range(400):
        log = rng.choice(logs)
        for _ in range(rng.randint(1, 12)):
            (log.stored if rng.random() < 0.7 else log.removed)(key(rng.randrange(200)))
        before = log.sequence
        for b in log.page(1, before).batches:
            directory.apply(b)
        directory.check()
        assert len(directory) <= 60
        for known in logs:
            if known.sequence:
                assert held(directory, known.source) <= set(known.keys())
        sample = rng.sample(range(200), 5)
        for source, count in directory.match(keys(*sample)).blocks.items():
            assert set(keys(*sample[:count])) <= held(directory, source)
    assert directory.dropped_keys > 0

from __future__ import annotations

import random

import pytest

from cpd_ray.ids import KEY_BYTES, BlockKey, NodeId, SourceId, split_keys
from cpd_ray.messages import EventsPage, KvEvents
from kv.events import MAX_BATCH_KEYS, MIN_LOGGED_KEYS, BatchLog, EventLog

SOURCE, NODE = SourceId("pool:w"), NodeId("n")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(KEY_BYTES, "big"))


def log_of(epoch: int = 3, *, capacity_batches: int = 4096) -> EventLog:
    return EventLog(SOURCE, NODE, epoch, capacity_batches=capacity_batches)


class Reader:
    """Follows by the rules of the messages, and fails on anything that they do not allow."""

    def __init__(self) -> None:
        self.epoch, self.sequence = -1, 0
        self.keys: set[BlockKey] = set()

    def take(self, page: EventsPage) -> None:
        assert page.batches, "an answer says at least that the source lives"
        for batch in page.batches:
            if batch.cleared:
                self.keys.clear()
            else:
                assert batch.epoch == self.epoch
                assert batch.sequence == self.sequence + 1 or (not batch.stored and batch.sequence == self.sequence)
            self.epoch, self.sequence = batch.epoch, batch.sequence
            self.keys -= set(split_keys(batch.removed))
            self.keys |= set(split_keys(batch.stored))


def test_a_new_reader_gets_a_snapshot_then_only_what_is_new() -> None:
    log, reader = log_of(), Reader()
    log.stored(key(1))
    log.stored(key(2))
    reader.take(log.page(reader.epoch, reader.sequence))
    assert reader.keys == {key(1), key(2)}
    log.removed(key(1))
    log.stored(key(3))
    page = log.page(reader.epoch, reader.sequence)
    assert page.batches == (KvEvents(SOURCE, NODE, 3, 2, stored=key(3), removed=key(1)),)
    reader.take(page)
    assert reader.keys == set(log.keys()) == {key(2), key(3)}


def test_nothing_new_is_a_heartbeat() -> None:
    log = log_of()
    assert log.page(3, 0).batches == (KvEvents(SOURCE, NODE, 3, 0),)
    log.stored(key(1))
    assert log.heartbeat() == KvEvents(SOURCE, NODE, 3, 1), "whoever has not read batch 1 sees that there is one"
    assert log.page(3, 1).batches == (log.heartbeat(),)


def test_another_epoch_or_a_number_still_to_come_gets_a_snapshot() -> None:
    log = log_of()
    log.stored(key(1))
    for epoch, sequence in ((2, 1), (4, 1), (3, 2), (3, -1)):
        (batch,) = log.page(epoch, sequence).batches
        assert batch == KvEvents(SOURCE, NODE, 3, 1, stored=key(1), cleared=True)


def test_the_last_change_of_a_key_in_a_batch_counts() -> None:
    log = log_of()
    log.stored(key(1))
    log.flush()
    log.removed(key(1))
    log.stored(key(1))
    log.stored(key(2))
    log.removed(key(2))
    reader = Reader()
    reader.epoch, reader.sequence, reader.keys = 3, 1, {key(1)}
    reader.take(log.page(3, 1))
    assert reader.keys == {key(1)} == set(log.keys())


def test_saying_the_same_twice_says_nothing() -> None:
    log = log_of()
    log.stored(key(1))
    log.flush()
    log.stored(key(1))
    log.removed(key(2))
    log.flush()
    assert log.sequence == 1


def test_flushing_nothing_makes_no_batch() -> None:
    log = log_of()
    log.flush()
    assert log.sequence == 0
    assert log.snapshot() == KvEvents(SOURCE, NODE, 3, 0, cleared=True)


def test_an_unread_log_stays_bounded() -> None:
    log = log_of(capacity_batches=8)
    for number in range(3 * MAX_BATCH_KEYS):
        log.stored(key(number))
        log.removed(key(number))
    log.check()
    assert log.sequence >= 3, "open batches are closed by themselves"
    for number in range(20):
        log.stored(key(number))
        log.flush()
        log.check()
    assert log.page(3, log.sequence - 8).batches[0].cleared is False
    assert log.page(3, log.sequence - 9).batches[0].cleared is True


def test_what_is_longer_than_a_snapshot_is_sent_as_one() -> None:
    log = log_of()
    for number in range(2 * MIN_LOGGED_KEYS):
        log.stored(key(number))
        log.flush()
    for number in range(2 * MIN_LOGGED_KEYS):
        log.removed(key(number))
    (batch,) = log.page(3, 2 * MIN_LOGGED_KEYS).batches[:1]
    assert batch.cleared
    assert batch.stored == b""


@pytest.mark.parametrize("seed", range(8))
def test_readers_that_ask_now_and_then_see_what_is_held(seed: int) -> None:
    rng = random.Random(seed)
    log = log_of(capacity_batches=rng.choice([1, 3, 50]))
    readers = [Reader() for _ in range(3)]
    for _ in range(600):
        number = key(rng.randrange(30))
        rng.choice([log.stored, log.removed])(number)
        if rng.random() < 0.2:
            log.flush()
        if rng.random() < 0.1:
            reader = rng.choice(readers)
            reader.take(log.page(reader.epoch, reader.sequence))
            assert reader.keys == set(log.keys())
        log.check()


def test_a_batch_out_of_turn_is_our_bug() -> None:
    log = BatchLog(5, capacity_batches=2)
    with pytest.raises(AssertionError):
        log.append(KvEvents(SOURCE, NODE, 1, 7), limit_keys=10)
    assert log.after(5) == ()
    assert log.after(4) is None

from __future__ import annotations

import random
from typing import Literal

import numpy as np
import pytest

from cpd_ray.ids import KEY_BYTES, split_keys
from kv.key_table import ABSENT, LEAST_CAPACITY, MAX_FILL, NO_LABEL, KeyTable, Slots, as_keys, home_slots


def crowded(rng: random.Random, count: int) -> list[bytes]:
    """Keys that all want one of a few slots: neighbours in the middle, and around the border."""
    wanted = [0, 1, LEAST_CAPACITY - 1, LEAST_CAPACITY - 2, 500, 501, 502, 511]
    keys: list[bytes] = []
    while len(keys) < count:
        some = rng.randbytes(KEY_BYTES * 10_000)
        homes = home_slots(as_keys(some), LEAST_CAPACITY)
        keys += [some[KEY_BYTES * i : KEY_BYTES * (i + 1)] for i in np.flatnonzero(np.isin(homes, wanted))]
    return keys[:count]


def found(table: KeyTable, keys: list[bytes]) -> list[int]:
    return [int(label) for label in table.labels(table.find(as_keys(b"".join(keys))))]


def slots_of(table: KeyTable, keys: list[bytes]) -> Slots:
    return table.find(as_keys(b"".join(keys)))


@pytest.mark.parametrize("seed", range(4))
def test_random_walk_against_a_dict(seed: int) -> None:
    rng = random.Random(seed)
    universe = crowded(rng, 450)
    table, oracle = KeyTable(), dict[bytes, int]()
    for _ in range(200):
        some = [rng.choice(universe) for _ in range(rng.randint(0, 40))]  # some of them twice
        match rng.randrange(4):
            case 0 | 1:
                if not table.has_room(len(some)):
                    table.rebuild(len(some))
                label = rng.randint(1, 9)
                known, new = table.place(as_keys(b"".join(some)), label)
                assert set(split_keys(table.keys(known))) == oracle.keys() & set(some)
                assert len(known) == len(set(known.tolist()))
                assert new == len(set(some) - oracle.keys())
                oracle.update((key, label) for key in set(some) - oracle.keys())
            case 2:
                slots = np.unique(slots_of(table, some))
                table.delete(slots[slots != ABSENT])
                for key in set(some):
                    oracle.pop(key, None)
            case _:
                slots = np.unique(slots_of(table, some))
                slots = slots[slots != ABSENT]
                labels = np.arange(1, len(slots) + 1)
                table.label(slots, labels)
                oracle.update(zip(split_keys(table.keys(slots)), labels.tolist(), strict=True))
        table.check()
        assert len(table) == len(oracle)
        sample = rng.sample(universe, 30)
        assert found(table, sample) == [oracle.get(key, NO_LABEL) for key in sample]
    assert set(split_keys(table.keys(table.occupied()))) == oracle.keys()


def test_it_grows_and_keeps_everything() -> None:
    rng, table = random.Random(1), KeyTable()
    keys = [rng.randbytes(KEY_BYTES) for _ in range(20_000)]
    for start in range(0, len(keys), 500):
        if not table.has_room(500):
            table.rebuild(500)
        table.place(as_keys(b"".join(keys[start : start + 500])), 1 + start // 500)
    table.check()
    assert found(table, keys) == [1 + i // 500 for i in range(len(keys))]
    assert table.nbytes / len(table) < 24 / (MAX_FILL / 2) + 1


def test_deleting_and_placing_for_ever_needs_no_growth() -> None:
    rng, table = random.Random(2), KeyTable()
    live: list[bytes] = []
    for _ in range(300):
        new = [rng.randbytes(KEY_BYTES) for _ in range(50)]
        if not table.has_room(50):
            table.rebuild(50)
        table.place(as_keys(b"".join(new)), 1)
        live += new
        if len(live) > 300:
            old, live = live[:50], live[50:]
            table.delete(slots_of(table, old))
        table.check()
    assert table.nbytes == KeyTable().nbytes


def test_the_oldest_are_those_not_used_for_longest() -> None:
    rng, table = random.Random(3), KeyTable()
    groups = [[rng.randbytes(KEY_BYTES) for _ in range(10)] for _ in range(4)]
    for group in groups:
        table.place(as_keys(b"".join(group)), 1)
    table.touch(slots_of(table, groups[0]))
    table.label(slots_of(table, groups[1][:5]), np.full(5, 2))
    oldest = set(split_keys(table.keys(table.oldest(5))))
    assert oldest == set(groups[1][5:])
    assert set(split_keys(table.keys(table.oldest(6)))) == set(groups[1][5:] + groups[2]), "equally old keys go together"


def test_any_sixteen_bytes_are_a_key() -> None:
    table = KeyTable()
    odd = [bytes(KEY_BYTES), b"\xff" * KEY_BYTES, bytes(15) + b"\1", b"\1" + bytes(15)]
    assert found(table, odd) == [NO_LABEL] * 4
    table.place(as_keys(b"".join(odd[:2])), 5)
    assert found(table, odd) == [5, 5, NO_LABEL, NO_LABEL]
    table.check()


@pytest.mark.parametrize("order", ["little", "big"])
@pytest.mark.parametrize("step", [1, 1 << 20, 1 << 64, (1 << 64) + 1])
def test_keys_that_were_counted_up_spread_as_well(order: Literal["little", "big"], step: int) -> None:
    homes = home_slots(as_keys(b"".join((i * step).to_bytes(KEY_BYTES, order) for i in range(10_000))), 1 << 14)
    assert np.bincount(homes).max() <= 12


def test_no_keys_at_all() -> None:
    table = KeyTable()
    assert found(table, []) == []
    assert table.place(as_keys(b""), 1)[1] == 0
    table.delete(table.find(as_keys(b"")))
    table.check()

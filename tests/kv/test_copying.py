"""Slot copies: right bytes, nothing else touched, neighbours merged."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv.copying import checksums, copy_slots, merged_runs
from kv.memory import Extent, SlottedMemory

SLOT = 24


def memory(extent_slots: list[int], seed: int) -> tuple[SlottedMemory, list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    buffers = [rng.integers(0, 256, n * SLOT, dtype=np.uint8) for n in extent_slots]
    return SlottedMemory.over(buffers, SLOT), buffers


def rows(buffers: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(buffers).reshape(-1, SLOT)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.data(),
)
def test_copies_equal_a_loop_over_rows(a: list[int], b: list[int], data: st.DataObject) -> None:
    source, from_buffers = memory(a, 1)
    into, to_buffers = memory(b, 2)
    count = data.draw(st.integers(0, min(sum(a), sum(b))))
    source_slots = data.draw(st.permutations(range(sum(a))))[:count]
    into_slots = data.draw(st.one_of(st.permutations(range(sum(b))), st.just(range(sum(b)))))[:count]
    expected = rows(to_buffers).copy()
    expected[list(into_slots)] = rows(from_buffers)[list(source_slots)]
    assert copy_slots(source, source_slots, into, into_slots) == count * SLOT
    assert (rows(to_buffers) == expected).all()


def test_only_neighbours_on_both_sides_are_merged() -> None:
    at = np.array([0, 1, 2, 5, 6, 9], dtype=np.int64) * SLOT
    to = np.array([4, 5, 6, 7, 9, 10], dtype=np.int64) * SLOT
    start, into, nbytes = merged_runs(at, to, SLOT)
    assert [n // SLOT for n in nbytes.tolist()] == [3, 1, 1, 1]
    assert (start // SLOT).tolist() == [0, 5, 6, 9]
    assert (into // SLOT).tolist() == [4, 7, 9, 10]


def test_a_copy_never_runs_over_the_border_of_an_extent() -> None:
    source, from_buffers = memory([4, 4], 3)
    into, to_buffers = memory([8], 4)
    copy_slots(source, range(8), into, range(8))
    assert (rows(to_buffers) == rows(from_buffers)).all()


def test_what_does_not_match_is_refused() -> None:
    source, _ = memory([4], 1)
    into, buffers = memory([4], 2)
    before = rows(buffers).copy()
    with pytest.raises(ValueError, match="equally many"):
        copy_slots(source, [0, 1], into, [0])
    with pytest.raises(IndexError):
        copy_slots(source, [0, 4], into, [0, 1])
    with pytest.raises(IndexError):
        copy_slots(source, [0, 1], into, [0, -1])
    other = SlottedMemory.over([np.zeros(SLOT * 2, dtype=np.uint8)], SLOT * 2)
    with pytest.raises(ValueError, match="slots of"):
        copy_slots(source, [0], other, [0])
    device = SlottedMemory([Extent(4096, SLOT, None, device=0)], SLOT)
    with pytest.raises(ValueError, match="device"):
        copy_slots(source, [0], device, [0])
    assert (rows(buffers) == before).all()


def test_checksums_tell_one_changed_byte() -> None:
    source, buffers = memory([3], 5)
    before = checksums(source, [0, 1, 2])
    buffers[0][SLOT + 7] ^= 1
    after = checksums(source, [0, 1, 2])
    assert [x == y for x, y in zip(before, after, strict=True)] == [True, False, True]

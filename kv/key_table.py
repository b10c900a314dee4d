"""A hash table from block keys to small labels, for millions of keys, in two numpy arrays.

Owns slots, growth and the order of last use; knows not what a label means. Keys are looked up, placed and deleted in batches, so
that the waits for memory overlap: 1,600 keys that are in no cache are found in about half of a dict's time and half of its
memory, while a batch of eight takes ten times as long. Open addressing with linear probing.
Invariant: from a key's home slot to the slot it is in, no slot is empty.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
"""Block keys, `[n, 2]`."""
Slots = npt.NDArray[np.int64]
Labels = npt.NDArray[np.int64]

ABSENT = -1
NO_LABEL = 0
MAX_LABEL = (1 << 24) - 1
LEAST_CAPACITY = 1024
MAX_FILL = 0.6

_LABEL_BITS = np.uint64(24)
_LABEL = np.uint64(MAX_LABEL)
_MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, near 2**64 / golden ratio: Knuth's multiplicative hashing
_STRIDE = 8

_EMPTY = np.uint64(0)
_DELETED = np.uint64(1) << _LABEL_BITS  # a time of use without a label: probing goes on over it


def as_keys(joined: bytes) -> Keys:
    """Joined block keys as a table takes them."""
    return np.frombuffer(joined, dtype=np.uint64).reshape(-1, 2)


def home_slots(keys: Keys, capacity: int) -> Slots:
    """Where each key is looked for first, in a table of `capacity` (a power of two) slots."""
    mixed = (keys[:, 0] + keys[:, 1] * _MIX) * _MIX  # digests need no mixing, but keys that somebody counted up would
    return (mixed >> np.uint64(65 - capacity.bit_length())).view(np.int64)


class KeyTable:
    """Labels are 1..MAX_LABEL. A slot number is good until the next `place` or `rebuild`."""

    def __init__(self) -> None:
        self._time = 1  # counts uses; each slot remembers its last
        self._allocate(LEAST_CAPACITY)

    def __len__(self) -> int:
        return self._len

    @property
    def nbytes(self) -> int:
        return self._keys.nbytes + self._entries.nbytes

    # -- looking -----------------------------------------------------------------------------------------------------

    def find(self, keys: Keys) -> Slots:
        """The slot of each key, or ABSENT."""
        home = home_slots(keys, self._capacity)
        entries = self._entries.take(home)
        found = _equal(self._keys.take(home, axis=0), keys) & (entries & _LABEL != 0)
        slots = np.where(found, home, ABSENT)
        on = np.flatnonzero(~found & (entries != _EMPTY))
        if len(on):
            slots[on] = self._find_beyond(home[on], keys[on])
        return slots

    def labels(self, slots: Slots) -> Labels:
        """The label in each slot; NO_LABEL for ABSENT."""
        labels = (self._entries.take(slots, mode="clip") & _LABEL).view(np.int64)
        return np.where(slots == ABSENT, NO_LABEL, labels)

    def keys(self, slots: Slots) -> bytes:
        """The keys in the slots, joined."""
        return self._keys.take(slots, axis=0).tobytes()

    def occupied(self) -> Slots:
        """The slots that hold a key."""
        return np.flatnonzero(self._entries & _LABEL)

    def oldest(self, count: int) -> Slots:
        """The slots of the `count` keys that were not placed, labelled or touched for longest, and of those as old as the last of them."""
        slots = self.occupied()
        used = self._entries.take(slots) >> _LABEL_BITS
        return slots[used <= np.partition(used, count - 1)[count - 1]]

    # -- changing ----------------------------------------------------------------------------------------------------

    def has_room(self, count: int) -> bool:
        """`count` more keys can be placed before a `rebuild`."""
        return self._filled + count <= MAX_FILL * self._capacity

    def place(self, keys: Keys, label: int) -> tuple[Slots, int]:
        """Give those `keys` that are not here a slot and the `label`; returns the (distinct) slots of the others, and how many are new."""
        assert self.has_room(len(keys)), "a table without room"
        assert NO_LABEL < label <= MAX_LABEL, f"label {label}"
        slots, before = self.find(keys), self._len
        new = keys[slots == ABSENT]
        self._claim(new, np.full(len(new), self._entry_time() | np.uint64(label)))
        known = slots[slots != ABSENT]
        return np.unique(known) if len(known) else known, self._len - before

    def label(self, slots: Slots, labels: Labels) -> None:
        """Set the label in each slot."""
        self._entries[slots] = labels.view(np.uint64) | self._entry_time()

    def touch(self, slots: Slots) -> None:
        """The keys in these slots are used now."""
        self._entries[slots] = self._entries.take(slots) & _LABEL | self._entry_time()

    def delete(self, slots: Slots) -> None:
        """Remove the keys in these (distinct) slots."""
        ends_a_run = self._entries.take(slots + 1 & self._last) == _EMPTY
        self._entries[slots] = np.where(ends_a_run, _EMPTY, _DELETED)
        self._filled -= int(ends_a_run.sum())
        self._len -= len(slots)

    def rebuild(self, count: int) -> None:
        """Make room for `count` more keys (growing when needed), and clean out the traces of deleted ones."""
        slots = self.occupied()
        keys, entries = self._keys[slots], self._entries[slots]
        capacity = LEAST_CAPACITY
        while len(slots) + count > MAX_FILL * capacity * 0.75:  # not to be full again at once
            capacity *= 2
        self._allocate(capacity)
        home = home_slots(keys, capacity)
        order, index = np.argsort(home), np.arange(len(keys))
        at = np.maximum.accumulate(home[order] - index) + index  # each at home, or after the one before it
        fits = int(np.searchsorted(at, capacity))  # the rest goes round
        self._keys[at[:fits]], self._entries[at[:fits]] = keys[order[:fits]], entries[order[:fits]]
        self._len = self._filled = fits
        self._claim(keys[order[fits:]], entries[order[fits:]])

    def check(self) -> None:
        """Assert every invariant."""
        slots = self.occupied()
        assert len(slots) == self._len, "keys miscounted"
        assert int((self._entries != _EMPTY).sum()) == self._filled, "filled slots miscounted"
        assert self._filled <= MAX_FILL * self._capacity, "too full to probe"
        assert np.array_equal(self.find(self._keys[slots]), slots), "a key that is not found where it is"
        assert not len(slots) or int(self._entries.max() >> _LABEL_BITS) <= self._time, "a use in the future"

    # -- slots -------------------------------------------------------------------------------------------------------

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self._last = capacity - 1
        self._keys = np.zeros((capacity, 2), dtype=np.uint64)
        self._entries = np.zeros(capacity, dtype=np.uint64)  # time of last use, then label
        self._filled = 0  # slots that are not empty
        self._len = 0

    def _find_beyond(self, home: Slots, keys: Keys) -> Slots:
        """As `find`, for keys that are not at home: several slots at a time, so that the farthest is reached in few steps."""
        slots = np.full(len(keys), ABSENT, dtype=np.int64)
        todo, stride = np.arange(len(keys)), np.arange(1, _STRIDE + 1)
        while len(todo):
            at = home[:, None] + stride & self._last
            entries = self._entries.take(at)
            found = _equal(self._keys.take(at, axis=0), keys[:, None]) & (entries & _LABEL != 0)
            row, column = found.nonzero()
            slots[todo[row]] = at[row, column]
            on = np.flatnonzero(~(found | (entries == _EMPTY)).any(axis=1))
            todo, keys, home = todo[on], keys[on], home[on] + _STRIDE
        return slots

    def _entry_time(self) -> np.uint64:
        self._time += 1
        return np.uint64(self._time) << _LABEL_BITS

    def _claim(self, keys: Keys, entries: npt.NDArray[np.uint64]) -> None:
        """A slot, the first free one from its home on, for each key of `keys`, none of which is here. Where several want one slot
        the last to write has it; of the others, those that are the same key are done, and the rest go on."""
        first, stride = home_slots(keys, self._capacity), np.arange(_STRIDE)
        while len(keys):
            at = first[:, None] + stride & self._last
            free = self._entries.take(at) & _LABEL == 0
            column = free.argmax(axis=1)
            row = np.arange(len(keys))
            can = free[row, column]
            first = np.where(can, first, first + _STRIDE)
            row, slots = row[can], at[row, column][can]
            before = self._entries.take(slots)
            self._entries[slots] = row
            has = self._entries.take(slots) == row.view(np.uint64)
            mine = slots[has]
            self._keys[mine] = keys[row[has]]
            self._entries[mine] = entries[row[has]]
            self._len += len(mine)
            self._filled += int((before[has] == _EMPTY).sum())
            left = np.ones(len(keys), dtype=np.bool_)
            left[row] = ~_equal(self._keys.take(slots, axis=0), keys[row])
            keys, entries, first = keys[left], entries[left], first[left]


def _equal(some: Keys, others: Keys) -> npt.NDArray[np.bool_]:
    return (some[..., 0] == others[..., 0]) & (some[..., 1] == others[..., 1])

"""Which holders have which keys: each key's label stands for a set of holders, an integer with a bit for each.

Owns holders' bits, the sets and the bound on keys; knows no source by name, nor epochs or sequence numbers. A holder that goes
is taken out of the sets, not out of the keys, so that costs the same however much it held; keys that nobody has are cleared
out when room is needed. Invariant: no set has a bit of a holder that is not there.

Over `max_keys`, a sixteenth of them goes: those that were neither stored by anyone nor matched for longest. As a match uses
all that leads to its end, tails go before the heads that requests share. What is dropped is a miss, never a wrong answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cpd_ray.ids import KEY_BYTES, BlockKey
from kv.key_table import KeyTable, Slots, as_keys

RUN_KEYS = 4096
"""Keys are added and looked at in runs of at most this many."""
DROP_FRACTION = 16
"""A run to add is no longer than this part of `max_keys` either: no more keys are ever too many, or equally old."""


class HolderTable:
    """A *bit* is an integer with one bit set, and names a holder from `take` to `retire`."""

    def __init__(self, max_keys: int) -> None:
        if max_keys < 1:
            raise ValueError(f"a table of at most {max_keys} keys")
        self.max_keys = max_keys
        self.dropped_keys = 0
        self._table = KeyTable()
        self._sets = [0]  # by label; label 0 is an absent key's
        self._keys_with = [0]  # by label
        self._label_of: dict[int, int] = {}  # a set may have more labels than this, once a holder has gone
        self._free_labels: list[int] = []
        self._count: dict[int, int] = {}  # keys by holder
        self._free_bits: list[int] = []

    def __len__(self) -> int:
        """Keys that someone has."""
        return len(self._table) - self._orphans()

    @property
    def nbytes(self) -> int:
        return self._table.nbytes

    # -- holders -----------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """A new holder, of nothing."""
        bit = self._free_bits.pop() if self._free_bits else 1 << len(self._count)
        self._count[bit] = 0
        return bit

    def retire(self, bit: int) -> None:
        """The holder is gone, and everything it had with it."""
        del self._count[bit]
        self._free_bits.append(bit)
        self._sets = [members & ~bit for members in self._sets]
        self._label_of = {members: label for label, members in enumerate(self._sets) if members}

    def bits(self) -> list[int]:
        """The holders that are there, ascending."""
        return sorted(self._count)

    def count(self, bit: int) -> int:
        """How many keys the holder has here."""
        return self._count[bit]

    def keys_of(self, bit: int) -> bytes:
        """The (joined) keys that the holder has here."""
        has = np.array([bool(members & bit) for members in self._sets])
        slots = self._table.occupied()
        return self._table.keys(slots[has[self._table.labels(slots)]])

    # -- keys --------------------------------------------------------------------------------------------------------

    def add(self, bit: int, keys: bytes) -> None:
        """The holder now has these (joined) keys."""
        run_bytes = min(RUN_KEYS, 1 + self.max_keys // DROP_FRACTION) * KEY_BYTES
        for start in range(0, len(keys), run_bytes):
            self._add_run(bit, keys[start : start + run_bytes])
            self._drop_surplus()

    def remove(self, bit: int, keys: bytes) -> None:
        """The holder no longer has these (joined) keys; those it never had are ignored."""
        if keys:
            slots = np.unique(self._table.find(as_keys(keys)))
            self._change(slots[slots >= 0], leaves=bit)

    def leading(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """By holder, how many of the leading `keys` it has; holders of none are left out."""
        runs: dict[int, int] = {}
        still, first = sum(self._count), 0
        while still and first < len(keys):
            slots = self._table.find(as_keys(b"".join(keys[first : first + RUN_KEYS])))
            labels = self._table.labels(slots)
            found = len(slots)
            for start in [0, *(np.flatnonzero(labels[1:] != labels[:-1]) + 1).tolist()]:
                members = self._sets[labels[start]]
                runs.update((bit, first + start) for bit in _bits(still & ~members))
                still &= members
                if not still:
                    found = start
                    break
            self._table.touch(slots[:found])
            first += found
        runs.update((bit, first) for bit in _bits(still))
        return {bit: count for bit, count in runs.items() if count}

    def check(self) -> None:
        """Assert every invariant, by counting anew."""
        self._table.check()
        labels = self._table.labels(self._table.occupied())
        by_label = np.bincount(labels, minlength=len(self._sets)).tolist()
        assert by_label == self._keys_with, "keys by label are miscounted"
        assert self._sets[0] == 0 and len(self._table) <= self.max_keys, "label 0 is in use, or there are too many keys"
        everyone = sum(self._count)
        assert all(members & ~everyone == 0 for members in self._sets), "a set with a holder that is not there"
        for bit, count in self._count.items():
            assert count == sum(n for n, members in zip(by_label, self._sets, strict=True) if members & bit), (
                "a holder's keys miscounted"
            )
        assert not everyone & sum(self._free_bits), "a bit is in use and free"
        assert all(members and self._sets[label] == members for members, label in self._label_of.items()), "a label of another set"
        free = set(self._free_labels)
        assert len(free) == len(self._free_labels), "a label is free twice"
        assert free == {label for label, n in enumerate(by_label) if label and not n}, "labels of no key are not the free ones"

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def _add_run(self, bit: int, joined: bytes) -> None:
        keys = as_keys(joined)
        if not self._table.has_room(len(keys)):
            self._delete_orphans()
            self._table.rebuild(len(keys))
        label = self._take_label(bit)
        known, new = self._table.place(keys, label)
        self._keys_with[label] += new
        self._count[bit] += new
        self._change(known, joins=bit)
        self._give_back(label)

    def _change(self, slots: Slots, *, joins: int = 0, leaves: int = 0) -> None:
        """A holder joins or leaves the sets of the keys in these (distinct) slots."""
        if not len(slots):
            return
        labels, inverse, counts = np.unique(self._table.labels(slots), return_inverse=True, return_counts=True)
        changed = np.zeros_like(labels)
        for i, (label, count) in enumerate(zip(labels.tolist(), counts.tolist(), strict=True)):
            before = self._sets[label]
            after = (before | joins) & ~leaves
            changed[i] = label if after == before else self._take_label(after) if after else 0
            self._keys_with[label] -= count
            self._keys_with[changed[i]] += count
            for bit in _bits(after ^ before):
                self._count[bit] += count if after & bit else -count
        self._keys_with[0] = 0
        after_labels = changed[inverse]
        self._table.label(slots[after_labels > 0], after_labels[after_labels > 0])
        self._table.delete(slots[after_labels == 0])
        for label in labels.tolist():
            self._give_back(label)

    def _drop_surplus(self) -> None:
        if len(self._table) > self.max_keys:
            self._delete_orphans()
        surplus = len(self._table) - self.max_keys
        if surplus > 0:
            slots = self._table.oldest(surplus + self.max_keys // DROP_FRACTION)
            self.dropped_keys += len(slots)
            self._delete(slots)

    def _orphans(self) -> int:
        return sum(n for n, members in zip(self._keys_with, self._sets, strict=True) if not members)

    def _delete_orphans(self) -> None:
        if self._orphans():
            nobody = np.array([not members for members in self._sets])
            slots = self._table.occupied()
            self._delete(slots[nobody[self._table.labels(slots)]])

    def _delete(self, slots: Slots) -> None:
        by_label = np.bincount(self._table.labels(slots))
        self._table.delete(slots)
        for label in np.flatnonzero(by_label).tolist():
            self._keys_with[label] -= int(by_label[label])
            for bit in _bits(self._sets[label]):
                self._count[bit] -= int(by_label[label])
            self._give_back(label)

    def _take_label(self, members: int) -> int:
        label = self._label_of.get(members)
        if label is None:
            if self._free_labels:
                label = self._free_labels.pop()
                self._sets[label] = members
            else:
                label = len(self._sets)
                self._sets.append(members)
                self._keys_with.append(0)
            self._label_of[members] = label
        return label

    def _give_back(self, label: int) -> None:
        """Free a label that no key has."""
        if self._keys_with[label]:
            return
        if self._label_of.get(self._sets[label]) == label:
            del self._label_of[self._sets[label]]
        self._sets[label] = 0
        self._free_labels.append(label)


def _bits(members: int) -> list[int]:
    bits = []
    while members:
        bit = members & -members
        bits.append(bit)
        members ^= bit
    return bits

"""Which places hold which key, for millions of keys: one dict from key to a shared integer whose bits are the holders.

Owns bits, their reuse and the bound on keys; knows no source by name, nor epochs or sequence numbers. A holder that goes is
*retired*: it disappears from every answer at once, and its bit is cleaned out of the table bit by bit as other work is done,
before it is given to anyone else. Invariant: a bit is live, retired or free; keys may carry live and retired bits only.

Over `max_keys`, the keys first stored longest ago go, in runs, save those that were found by a recent `leading`: a chain's keys
were stored together, so whole idle chains go and shared heads stay. What is dropped is a miss, no wrong answer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from itertools import chain, islice

from cpd_ray.ids import KEY_BYTES, BlockKey

SWEEP_RATIO = 2
"""Keys cleaned of retired bits for each key added or removed."""
SWEEP_LEAST_KEYS = 256
RUN_BYTES = 4096 * KEY_BYTES
"""More keys than these are never over `max_keys`, however large what is added at once."""
MASKS_LEAST = 4096
"""Masks are forgotten and collected anew when there are more than these, and twice as many as were in use last time."""
RECENT_FRACTION = 16
"""A sixteenth of `max_keys` may be remembered as found recently."""
TRIM_FRACTION = 64
"""Over `max_keys`, a 64th of them is looked at to drop, which bounds the pause."""


class HolderTable:
    """A *bit* is an integer with one bit set; see the module. All answers name live bits only."""

    def __init__(self, max_keys: int) -> None:
        if max_keys < 1:
            raise ValueError(f"a table of at most {max_keys} keys")
        self.max_keys = max_keys
        self.dropped_keys = 0
        self._holders: dict[BlockKey, int] = {}
        self._masks: dict[int, int] = {}  # equal masks are one object: what is shared costs nothing a key
        self._count: dict[int, int] = {}  # keys by live bit
        self._live = 0
        self._retired = 0
        self._free: list[int] = []
        self._sweep: Iterator[BlockKey] | None = None
        self._masks_limit = MASKS_LEAST
        self._sweeping = 0  # the retired bits that no key will carry when the sweep has ended
        self._recent: deque[tuple[BlockKey, ...]] = deque()
        self._recent_keys = 0

    def __len__(self) -> int:
        """Keys in the table, those included that only retired holders had."""
        return len(self._holders)

    # -- holders -----------------------------------------------------------------------------------------------------

    def take(self) -> int:
        """A bit for a new holder, of nothing."""
        bit = self._free.pop() if self._free else 1 << (self._live | self._retired).bit_length()
        self._live |= bit
        self._count[bit] = 0
        return bit

    def retire(self, bit: int) -> None:
        """The holder is gone, and everything it held with it."""
        del self._count[bit]
        self._live &= ~bit
        self._retired |= bit

    def count(self, bit: int) -> int:
        """How many keys the holder has here."""
        return self._count[bit]

    def keys_of(self, bit: int) -> Iterator[BlockKey]:
        """The keys that the holder has here, in the order first stored. Looks at every key."""
        return (key for key, mask in self._holders.items() if mask & bit)

    def live_bits(self) -> list[int]:
        """The bits of the holders that are there, ascending."""
        return _bits(self._live)

    # -- keys --------------------------------------------------------------------------------------------------------

    def add(self, bit: int, keys: bytes) -> None:
        """The holder now has these (joined) keys."""
        for start in range(0, len(keys), RUN_BYTES):
            self._add_run(bit, keys, start, min(start + RUN_BYTES, len(keys)))
            while len(self._holders) > self.max_keys:
                self._trim()
        self.sweep(max(SWEEP_RATIO * len(keys) // KEY_BYTES, SWEEP_LEAST_KEYS))

    def _add_run(self, bit: int, keys: bytes, first: int, end: int) -> None:
        holders, get, live = self._holders, self._holders.get, self._live
        step: dict[int, int] = {}  # mask before -> mask after, this holder having joined
        known = 0
        for start in range(first, end, KEY_BYTES):
            key = BlockKey(keys[start : start + KEY_BYTES])
            old = get(key, 0)
            if old & bit:
                known += 1
                continue
            new = step.get(old)
            if new is None:
                new = step[old] = self._shared(old & live | bit)
            holders[key] = new
        self._count[bit] += (end - first) // KEY_BYTES - known

    def remove(self, bit: int, keys: bytes) -> None:
        """The holder no longer has these (joined) keys; those it never had are ignored."""
        holders, get, rest = self._holders, self._holders.get, self._live & ~bit
        step: dict[int, int] = {}
        for start in range(0, len(keys), KEY_BYTES):
            key = BlockKey(keys[start : start + KEY_BYTES])
            old = get(key, 0)
            if not old & bit:
                continue
            self._count[bit] -= 1
            if not old & rest:
                del holders[key]
                continue
            new = step.get(old)
            if new is None:
                new = step[old] = self._shared(old & rest)
            holders[key] = new
        self.sweep(max(SWEEP_RATIO * len(keys) // KEY_BYTES, SWEEP_LEAST_KEYS))

    def leading(self, keys: Sequence[BlockKey]) -> dict[int, int]:
        """By bit, how many of the leading `keys` the holder has; holders of none are left out. Stops where the last one stops."""
        runs: dict[int, int] = {}
        still, get, count = self._live, self._holders.get, 0
        if still:
            for key in keys:
                mask = get(key, 0) & still
                if mask != still:
                    if count:
                        runs.update((bit, count) for bit in _bits(still & ~mask))
                    still = mask
                    if not still:
                        break
                count += 1
        if count:
            runs.update((bit, count) for bit in _bits(still))
            self._found(keys, count)
        return runs

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def sweep(self, limit_keys: int) -> None:
        """Go on cleaning out retired bits, looking at no more than `limit_keys` keys; does nothing when there is nothing to clean."""
        if self._sweep is None:
            if not self._retired and len(self._masks) <= self._masks_limit:
                return
            self._sweep, self._sweeping = iter(list(self._holders)), self._retired
            self._masks = {}  # masks that nothing uses any more are forgotten: those in use come back as they are met
        holders, get, live, seen = self._holders, self._holders.get, self._live, 0
        for key in islice(self._sweep, limit_keys):
            seen += 1
            mask = get(key)
            if mask is None:
                continue
            if mask & live:
                holders[key] = self._shared(mask & live)
            else:
                del holders[key]
        if seen < limit_keys:
            self._free += _bits(self._sweeping)
            self._retired &= ~self._sweeping
            self._sweep, self._sweeping = None, 0
            self._masks_limit = max(MASKS_LEAST, 2 * len(self._masks))

    def check(self) -> None:
        """Assert every invariant, by counting anew."""
        masks = Counter(self._holders.values())
        assert len(self._holders) <= self.max_keys, "more keys than allowed"
        assert not self._live & self._retired, "a bit is live and retired"
        assert not (self._live | self._retired) & sum(self._free), "a free bit is in use"
        assert self._sweeping & ~self._retired == 0, "a bit is swept that is not retired"
        assert all(mask and mask & ~(self._live | self._retired) == 0 for mask in masks), "a key with no holder, or with a free bit"
        count = {bit: sum(n for mask, n in masks.items() if mask & bit) for bit in _bits(self._live)}
        assert count == self._count, "a holder's keys are miscounted"
        assert self._recent_keys == sum(map(len, self._recent)), "recently found keys miscounted"
        assert self._recent_keys <= self.max_keys // RECENT_FRACTION, "too many keys remembered as recently found"
        if self._sweep is None:
            shared = self._masks
            assert all(shared.get(mask) is mask for mask in self._holders.values()), "equal masks that are not one object"

    def _shared(self, mask: int) -> int:
        return self._masks.setdefault(mask, mask)

    def _found(self, keys: Sequence[BlockKey], count: int) -> None:
        limit = self.max_keys // RECENT_FRACTION
        if 2 * len(self._holders) < self.max_keys or count > limit:
            return
        self._recent.append(tuple(keys[:count]))  # not the whole: a match may be short and its prompt long
        self._recent_keys += count
        while self._recent_keys > limit:
            self._recent_keys -= len(self._recent.popleft())

    def _trim(self) -> None:
        holders = self._holders
        oldest = list(islice(holders, max(1, self.max_keys // TRIM_FRACTION)))
        recent = set(chain.from_iterable(self._recent))
        gone: Counter[int] = Counter()
        for key in oldest:
            mask = holders.pop(key)
            if key in recent:
                holders[key] = mask
            else:
                gone[mask & self._live] += 1
        for mask, count in gone.items():
            for bit in _bits(mask):
                self._count[bit] -= count
        self.dropped_keys += sum(gone.values())


def _bits(mask: int) -> list[int]:
    bits = []
    while mask:
        bit = mask & -mask
        bits.append(bit)
        mask ^= bit
    return bits

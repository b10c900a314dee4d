"""In which order cached blocks leave: least recently used, tails before the heads that they hang on.

Owns the forest of keys (each after its parent) and which of them are in use; knows no places, bytes or reference counts.
A key is *pinned* while it, or any key below it, is held. Whenever a key ceases to be pinned it goes to the end of the order,
and whatever pins a key pins all its ancestors; so in the order children stand before their parents, and the front is a tail.
Invariant: popping the front never removes a key whose child is present. All operations take amortised constant time.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

from cpd_ray.ids import BlockKey


class PrefixOrder:
    """A parent need not be present: its children are roots until it comes (back)."""

    def __init__(self) -> None:
        self._parent: dict[BlockKey, BlockKey | None] = {}
        self._held: set[BlockKey] = set()
        self._pinned_children: dict[BlockKey, int] = {}  # of any key, present or not; never 0
        self._children: dict[BlockKey, int] = {}  # present ones, of any key; never 0
        self._order: OrderedDict[BlockKey, None] = OrderedDict()

    def __len__(self) -> int:
        """How many keys could leave, one after another."""
        return len(self._order)

    def __contains__(self, key: BlockKey) -> bool:
        return key in self._parent

    def parent_of(self, key: BlockKey) -> BlockKey | None:
        """The key before `key`; None at the root. Raises KeyError when `key` is absent."""
        return self._parent[key]

    def is_held(self, key: BlockKey) -> bool:
        """Somebody uses `key` itself."""
        return key in self._held

    def first(self, count: int) -> list[BlockKey]:
        """The next `count` keys to leave, the first to go first."""
        return list(islice(self._order, count))

    def add(self, key: BlockKey, parent: BlockKey | None) -> None:
        """A new key, held."""
        assert key not in self._parent, "a key is added once"
        assert key != parent, "a key is not its own parent"
        self._parent[key] = parent
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1
        self._held.add(key)
        self._pin_above(parent)

    def hold(self, key: BlockKey) -> None:
        """Somebody uses a key that nobody used."""
        assert key not in self._held, "held already"
        self._held.add(key)
        if key not in self._pinned_children:
            del self._order[key]
            self._pin_above(self._parent[key])

    def let_go(self, key: BlockKey) -> None:
        """Nobody uses the key any more: it becomes the last to leave, after all that is below it."""
        self._held.remove(key)
        leaving: BlockKey | None = key
        while leaving is not None and leaving in self._parent and not self._is_pinned(leaving):
            self._order[leaving] = None
            leaving = self._unpin_child_of(self._parent[leaving])

    def pop(self) -> BlockKey:
        """Remove the first key to leave; raises KeyError when all are pinned."""
        key, _ = self._order.popitem(last=False)
        parent = self._parent.pop(key)
        if parent is not None:
            left = self._children.pop(parent) - 1
            if left:
                self._children[parent] = left
        return key

    def demote(self, chain: Sequence[BlockKey]) -> int:
        """Let a chain (parents first) be the first to leave, its tail before its head: as far up as nothing else hangs on it and nobody
        uses it. Returns how many keys that were."""
        tail: list[BlockKey] = []
        for key in reversed(chain):
            if key not in self._order or self._children.get(key, 0) > bool(tail):
                break
            tail.append(key)
        for key in reversed(tail):
            self._order.move_to_end(key, last=False)
        return len(tail)

    def check(self) -> None:
        """Assert every invariant, by counting anew."""
        pinned: set[BlockKey] = set()
        for held in self._held:
            key: BlockKey | None = held
            while key is not None and key in self._parent and key not in pinned:
                pinned.add(key)
                key = self._parent[key]
        children: dict[BlockKey, int] = {}
        for key in pinned:
            if (parent := self._parent[key]) is not None:
                children[parent] = children.get(parent, 0) + 1
        assert children == self._pinned_children, "pinned children miscounted"
        assert Counter(p for p in self._parent.values() if p is not None) == Counter(self._children), "children miscounted"
        assert set(self._order) == set(self._parent) - pinned, "the order is not exactly what is not pinned"
        place = {key: i for i, key in enumerate(self._order)}
        for key, i in place.items():
            if (parent := self._parent[key]) is not None:
                assert place.get(parent, i + 1) > i, "a parent would leave before its child"

    def _is_pinned(self, key: BlockKey) -> bool:
        return key in self._held or key in self._pinned_children

    def _pin_above(self, parent: BlockKey | None) -> None:
        """A child of `parent` has become pinned."""
        while parent is not None:
            was_pinned = self._is_pinned(parent)
            self._pinned_children[parent] = self._pinned_children.get(parent, 0) + 1
            if was_pinned or parent not in self._parent:
                return
            del self._order[parent]
            parent = self._parent[parent]

    def _unpin_child_of(self, parent: BlockKey | None) -> BlockKey | None:
        """A child of `parent` has ceased to be pinned; returns the parent."""
        if parent is not None:
            left = self._pinned_children.pop(parent) - 1
            if left:
                self._pinned_children[parent] = left
        return parent

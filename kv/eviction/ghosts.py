"""What a policy remembers of blocks that are gone. Owns a bounded memory, the latest first; knows no block that is there.

Invariant: never more than `most` entries.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

from cpd_ray.ids import BlockKey

T = TypeVar("T")


class Ghosts(Generic[T]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._known: OrderedDict[BlockKey, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def remember(self, key: BlockKey, what: T) -> None:
        self._known[key] = what
        self._known.move_to_end(key)
        if len(self._known) > self._most:
            self._known.popitem(last=False)

    def recall(self, key: BlockKey) -> T | None:
        """What was remembered of `key`, which is there again: it is forgotten here."""
        return self._known.pop(key, None)

"""Who computes which key at the moment, so that nobody else does.

Owns announcements; knows neither states nor references of blocks. Invariant: a key is announced for one block, a block for one key.
"""

from __future__ import annotations

from collections.abc import KeysView

from cpd_ray.ids import BlockId, BlockKey, RequestId


class SingleFlight:
    """An announcement lasts until it is withdrawn, by block or by key."""

    def __init__(self) -> None:
        self._by_key: dict[BlockKey, tuple[RequestId, BlockId]] = {}
        self._by_block: dict[BlockId, BlockKey] = {}

    def announce(self, owner: RequestId, block: BlockId, key: BlockKey) -> bool:
        """`owner` will put `key` into `block`; False when another does already."""
        if self._by_key.setdefault(key, (owner, block)) != (owner, block):
            return False
        self._by_block[block] = key
        return True

    def owner_of(self, key: BlockKey) -> RequestId | None:
        """Who announced `key`."""
        announced = self._by_key.get(key)
        return announced[0] if announced else None

    def may_hold(self, block: BlockId, key: BlockKey) -> bool:
        """`block` is not announced for another key."""
        return self._by_block.get(block, key) == key

    def withdraw(self, block: BlockId) -> None:
        """Nobody computes into `block` any more; no error when nobody did."""
        if (key := self._by_block.pop(block, None)) is not None:
            del self._by_key[key]

    def settle(self, key: BlockKey) -> None:
        """Nobody has to compute `key` any more; no error when nobody did."""
        if announced := self._by_key.pop(key, None):
            del self._by_block[announced[1]]

    def blocks(self) -> KeysView[BlockId]:
        return self._by_block.keys()

    def keys(self) -> KeysView[BlockKey]:
        return self._by_key.keys()

    def check(self) -> None:
        """Assert the invariant."""
        assert {block: key for key, (_, block) in self._by_key.items()} == self._by_block, "keys and blocks disagree"

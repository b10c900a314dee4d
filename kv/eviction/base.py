"""What a slab asks when it needs room: which blocks go next.

A policy keeps its own books of the blocks that are there and how they hang together; it holds no bytes, slots or leases.
Invariant: a block is never chosen while a block of which it is the parent is still there, nor while `blocked` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from cpd_ray.ids import BlockKey

Blocked = Callable[[BlockKey], bool]


class EvictionPolicy(Protocol):
    name: str

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        """`key` is there from now on. Its parent may be absent, or come later."""
        ...

    def hit(self, keys: Sequence[BlockKey]) -> None:
        """A prompt has read these; all are there."""
        ...

    def remove(self, key: BlockKey) -> None:
        """`key` is gone, not by the policy's choice. It may have children."""
        ...

    def victims(self, count: int, blocked: Blocked) -> list[BlockKey]:
        """Up to `count` blocks to drop, in this order (a child before its parent). The policy forgets them."""
        ...

    def check(self, present: Collection[BlockKey]) -> None:
        """Assert that the books are in order and speak of exactly `present`."""
        ...


class Node:
    """A block in a policy's books. `children`: how many blocks there name it as parent. `queued`: `Leaves` will look at it. `score`, `hits`,
    `seen`, `main` are the policy's own."""

    __slots__ = ("children", "hits", "key", "main", "parent", "queued", "score", "seen")

    def __init__(self, key: BlockKey, parent: BlockKey | None) -> None:
        self.key = key
        self.parent = parent
        self.children = 0
        self.queued = False
        self.score = 0.0
        self.hits = 0
        self.seen = 0.0
        self.main = False


class PrefixForest:
    """Who is whose parent, parents that are absent included."""

    def __init__(self) -> None:
        self.nodes: dict[BlockKey, Node] = {}
        self._waiting: dict[BlockKey, int] = {}  # absent parent -> its children that are there

    def add(self, key: BlockKey, parent: BlockKey | None) -> Node:
        nodes = self.nodes
        assert key not in nodes, "inserted twice"
        node = nodes[key] = Node(key, parent)
        if parent is not None:
            above = nodes.get(parent)
            if above is not None:
                above.children += 1
            else:
                self._waiting[parent] = self._waiting.get(parent, 0) + 1
        if self._waiting:
            node.children = self._waiting.pop(key, 0)
        return node

    def drop(self, node: Node) -> Node | None:
        """Forget a block; returns its parent when that has just become a leaf."""
        del self.nodes[node.key]
        if node.children:
            self._waiting[node.key] = node.children
        if node.parent is None:
            return None
        above = self.nodes.get(node.parent)
        if above is not None:
            above.children -= 1
            return None if above.children else above
        left = self._waiting[node.parent] - 1
        if left:
            self._waiting[node.parent] = left
        else:
            del self._waiting[node.parent]
        return None

    def check(self, present: Collection[BlockKey]) -> None:
        assert self.nodes.keys() == set(present), "the policy's books differ from what is there"
        children: dict[BlockKey, int] = {}
        for node in self.nodes.values():
            if node.parent is not None:
                children[node.parent] = children.get(node.parent, 0) + 1
        for key, node in self.nodes.items():
            assert node.key == key
            assert node.children == children.pop(key, 0), "children miscounted"
        assert children == self._waiting, "absent parents miscounted"

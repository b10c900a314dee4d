"""The leaves of a forest by score, lowest first: the heap beneath every policy.

Owns the order only. Invariant: a node's score only grows while it is queued, so that its place in the heap is a lower bound, mended when
it is popped: a hit costs no heap operation, and a choice O(log n) amortised.
"""

from __future__ import annotations

import heapq

from kv.eviction.base import Node, PrefixForest


class Leaves:
    """Some of a forest's leaves. Nodes that got children, were dropped or went elsewhere (`main` changed) fall out when they are met."""

    def __init__(self, forest: PrefixForest, *, main: bool = False) -> None:
        self._nodes = forest.nodes
        self._main = main
        self._heap: list[tuple[float, int, Node]] = []
        self._fresh: list[Node] = []
        self._pushed = 0

    def add(self, node: Node) -> None:
        """A node that is, or may remain, a leaf: most new ones get a child before anyone asks, and never enter the heap."""
        node.queued = True
        self._fresh.append(node)
        if len(self._fresh) + len(self._heap) > 2 * len(self._nodes) + 64:
            self._compact()

    def pop(self, more: Node | None = None) -> Node | None:
        """Take out the leaf with the lowest score, `more` being one besides those that were added; None when there is none."""
        if self._fresh:
            self._queue_fresh()
        heap = self._heap
        if more is not None:
            if not heap or more.score <= heap[0][0]:
                return more
            more.queued = True
            self._pushed += 1
            entry = heapq.heappushpop(heap, (more.score, self._pushed, more))
        elif heap:
            entry = heapq.heappop(heap)
        else:
            return None
        while True:
            score, _, node = entry
            if self._is_mine(node):
                if node.children:
                    node.queued = False
                elif node.score > score:
                    self._pushed += 1
                    entry = heapq.heappushpop(heap, (node.score, self._pushed, node))
                    continue
                else:
                    node.queued = False
                    return node
            if not heap:
                return None
            entry = heapq.heappop(heap)

    def check(self) -> None:
        live = [node for node in (*(node for _, _, node in self._heap), *self._fresh) if self._is_mine(node)]
        mine = [node for node in self._nodes.values() if node.main == self._main]
        assert len(live) == len({id(node) for node in live}), "a block is queued twice"
        assert {node.key for node in live} == {node.key for node in mine if node.queued}, "queue flags are wrong"
        assert all(node.queued for node in mine if not node.children), "a leaf is not queued"
        assert all(score <= node.score for score, _, node in self._heap), "a score went down"

    def _is_mine(self, node: Node) -> bool:
        return self._nodes.get(node.key) is node and node.main is self._main

    def _queue_fresh(self) -> None:
        heap = self._heap
        for node in self._fresh:
            if not self._is_mine(node):
                continue
            if node.children:
                node.queued = False
            else:
                self._pushed += 1
                heapq.heappush(heap, (node.score, self._pushed, node))
        self._fresh.clear()

    def _compact(self) -> None:
        mine = [node for node in (*(node for _, _, node in self._heap), *self._fresh) if self._is_mine(node)]
        self._fresh.clear()
        for node in mine:
            node.queued = not node.children
        self._heap = [(node.score, i, node) for i, node in enumerate(mine) if node.queued]
        self._pushed = len(self._heap)
        heapq.heapify(self._heap)

"""Policies that give each block a score and drop the leaf with the lowest: least recently used, and aged least frequently used.

Invariant: a score only grows while its block stays, so that a leaf's place in the heap is a lower bound and is mended when popped.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from cpd_ray.ids import BlockKey
from kv.eviction.base import Blocked, Node, PrefixForest


class ScoredPolicy:
    """The heap of leaves. A hit costs no heap operation; a choice costs O(log n) amortised."""

    name = "scored"

    def __init__(self) -> None:
        self._forest = PrefixForest()
        self._nodes = self._forest.nodes
        self._heap: list[tuple[float, int, Node]] = []
        self._fresh: list[Node] = []
        self._pushed = 0

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._forest.add(key, parent)
        node.queued = True
        self._score_new(node)
        self._fresh.append(node)  # most get a child before anyone asks for a victim, and never enter the heap
        if len(self._fresh) + len(self._heap) > 2 * len(self._nodes) + 64:
            self._compact()

    def hit(self, keys: Sequence[BlockKey]) -> None:
        raise NotImplementedError

    def remove(self, key: BlockKey) -> None:
        leaf = self._forest.drop(key)
        if leaf is not None and not leaf.queued:
            self._push(leaf)

    def victims(self, count: int, blocked: Blocked) -> list[BlockKey]:
        self._queue_fresh()
        heap, nodes = self._heap, self._nodes
        chosen: list[BlockKey] = []
        aside: list[Node] = []
        while heap and len(chosen) < count:
            score, _, node = heapq.heappop(heap)
            if nodes.get(node.key) is not node:
                continue
            if node.children:
                node.queued = False
            elif node.score > score:
                self._push(node)
            elif blocked(node.key):
                aside.append(node)
            else:
                self._score_victim(node)
                chosen.append(node.key)
                self.remove(node.key)
        for node in aside:
            self._push(node)
        return chosen

    def check(self, present: Collection[BlockKey]) -> None:
        self._forest.check(present)
        live = [node for _, _, node in self._heap if self._nodes.get(node.key) is node]
        live += [node for node in self._fresh if self._nodes.get(node.key) is node]
        assert len(live) == len({node.key for node in live}), "a block is queued twice"
        assert {node.key for node in live} == {node.key for node in self._nodes.values() if node.queued}, "queue flags are wrong"
        assert all(node.queued for node in self._nodes.values() if not node.children), "a leaf is not queued"
        assert all(score <= node.score for score, _, node in self._heap), "a score went down"

    def _score_new(self, node: Node) -> None:
        raise NotImplementedError

    def _score_victim(self, node: Node) -> None:
        """Called with the block that goes."""

    def _push(self, node: Node) -> None:
        node.queued = True
        self._pushed += 1
        heapq.heappush(self._heap, (node.score, self._pushed, node))

    def _queue_fresh(self) -> None:
        for node in self._fresh:
            if node.children or self._nodes.get(node.key) is not node:
                node.queued = False
            else:
                self._push(node)
        self._fresh.clear()

    def _compact(self) -> None:
        leaves = {node.key: node for node in self._nodes.values() if node.queued and not node.children}
        for node in self._nodes.values():
            node.queued = node.key in leaves
        self._fresh.clear()
        self._heap = [(node.score, i, node) for i, node in enumerate(leaves.values())]
        self._pushed = len(self._heap)
        heapq.heapify(self._heap)


class LeastRecentlyUsed(ScoredPolicy):
    """The leaf that was read or written longest ago goes."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._tick = 0.0

    def hit(self, keys: Sequence[BlockKey]) -> None:
        self._tick += 1
        tick, nodes = self._tick, self._nodes
        for key in keys:
            nodes[key].score = tick

    def _score_new(self, node: Node) -> None:
        self._tick += 1
        node.score = self._tick


class AgedLeastFrequentlyUsed(ScoredPolicy):
    """The leaf with the fewest reads goes, where a read's worth fades as others are dropped: the score is the number of reads plus the score
    of the last victim at the time of the last read (LFU with dynamic aging, Arlitt et al. 1999)."""

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0

    def hit(self, keys: Sequence[BlockKey]) -> None:
        age, nodes = self._age, self._nodes
        for key in keys:
            node = nodes[key]
            node.hits += 1
            node.score = age + node.hits

    def _score_new(self, node: Node) -> None:
        node.score = self._age

    def _score_victim(self, node: Node) -> None:
        self._age = max(self._age, node.score)

"""Policies of two queues: newcomers prove themselves in a small one before they may stay in the main one.

Both are told by name from their papers and kept to leaves here; neither is the default (see bench/LOG.md). Invariant: a block is in one
queue, and `main` says which.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cpd_ray.ids import BlockKey
from kv.eviction.base import Blocked, Node, PrefixForest
from kv.eviction.ghosts import Ghosts
from kv.eviction.leaves import Leaves


class TwoQueues:
    """`small_share` of the slots for newcomers; as many ghosts as `ghost_share` of them."""

    name = "two queues"

    def __init__(self, slots: int, *, small_share: float, ghost_share: float) -> None:
        self._forest = PrefixForest()
        self._nodes = self._forest.nodes
        self._queues = {main: Leaves(self._forest, main=main) for main in (False, True)}
        self._small_most = max(1, int(small_share * slots))
        self._small = 0
        self._tick = 0.0
        self._ghosts: Ghosts[bool] = Ghosts(max(1, int(ghost_share * slots)))

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._forest.add(key, parent)
        node.main = self._ghosts.recall(key) is not None
        self._small += not node.main
        self._stamp(node)
        self._queues[node.main].add(node)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        raise NotImplementedError

    def remove(self, key: BlockKey) -> None:
        self._drop(self._nodes[key])

    def victims(self, count: int, blocked: Blocked) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        aside: list[Node] = []
        empty: set[bool] = set()
        while len(chosen) < count and len(empty) < 2:
            main = self._small <= self._small_most if not empty else not next(iter(empty))
            node = self._queues[main].pop()
            if node is None:
                empty.add(main)
            elif blocked(node.key):
                aside.append(node)
            elif self._stays(node):
                self._queues[node.main].add(node)
                empty.clear()
            else:
                if not node.main:
                    self._ghosts.remember(node.key, True)
                chosen.append(node.key)
                self._drop(node)
                empty.clear()
        for node in aside:
            self._queues[node.main].add(node)
        return chosen

    def check(self, present: Collection[BlockKey]) -> None:
        self._forest.check(present)
        for queue in self._queues.values():
            queue.check()
        assert self._small == sum(not node.main for node in self._nodes.values()), "newcomers miscounted"

    def _stays(self, node: Node) -> bool:
        """Decide on a leaf that has come to the front of its queue; one that stays has a new score."""
        return False

    def _stamp(self, node: Node) -> None:
        self._tick += 1
        node.score = self._tick

    def _promote(self, node: Node) -> None:
        self._small -= 1
        node.main = True

    def _drop(self, node: Node) -> None:
        self._small -= not node.main
        leaf = self._forest.drop(node)
        if leaf is not None and not leaf.queued:
            self._queues[leaf.main].add(leaf)


class TwoQ(TwoQueues):
    """2Q (Johnson and Shasha 1994): newcomers leave first in, first out; what is asked for again after that joins the main queue, which is
    least recently used."""

    name = "2q"

    def __init__(self, slots: int) -> None:
        super().__init__(slots, small_share=0.25, ghost_share=0.5)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            node = self._nodes[key]
            if node.main:
                self._stamp(node)


class S3Fifo(TwoQueues):
    """S3-FIFO (Yang et al. 2023): newcomers that were read while they waited move to the main queue, whose blocks go round once more for
    each of their last (at most three) reads."""

    name = "s3fifo"

    def __init__(self, slots: int) -> None:
        super().__init__(slots, small_share=0.1, ghost_share=0.9)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        for key in keys:
            node = self._nodes[key]
            node.hits = min(3, node.hits + 1)

    def _stays(self, node: Node) -> bool:
        if not node.hits:
            return False
        if node.main:
            node.hits -= 1
        else:
            node.hits = 0
            self._promote(node)
        self._stamp(node)
        return True

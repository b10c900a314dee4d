"""Policies that give each block a score and drop the leaf with the lowest.

Least recently used; least frequently used with aging; and reuse horizon, the slab's default. Invariant: as `Leaves` wants it, a score only
grows while its block stays.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import log2

from cpd_ray.ids import BlockKey
from kv.eviction.base import Blocked, Node, PrefixForest
from kv.eviction.ghosts import Ghosts
from kv.eviction.leaves import Leaves


class ScoredPolicy:
    """What the policies share: the forest and the heap of leaves."""

    name = "scored"

    def __init__(self) -> None:
        self._forest = PrefixForest()
        self._nodes = self._forest.nodes
        self._leaves = Leaves(self._forest)

    def insert(self, key: BlockKey, parent: BlockKey | None) -> None:
        node = self._forest.add(key, parent)
        self._score_new(node)
        self._leaves.add(node)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        raise NotImplementedError

    def remove(self, key: BlockKey) -> None:
        leaf = self._forest.drop(self._nodes[key])
        if leaf is not None and not leaf.queued:
            self._leaves.add(leaf)

    def victims(self, count: int, blocked: Blocked) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        aside: list[Node] = []
        leaves, drop = self._leaves, self._forest.drop
        above: Node | None = None
        while len(chosen) < count:
            node = leaves.pop(above)
            above = None
            if node is None:
                break
            if blocked(node.key):
                aside.append(node)
                continue
            self._score_victim(node)
            chosen.append(node.key)
            above = drop(node)
            if above is not None and above.queued:
                above = None
        if above is not None:
            leaves.add(above)
        for node in aside:
            leaves.add(node)
        return chosen

    def check(self, present: Collection[BlockKey]) -> None:
        self._forest.check(present)
        self._leaves.check()

    def _score_new(self, node: Node) -> None:
        raise NotImplementedError

    def _score_victim(self, node: Node) -> None:
        """Called with a block that goes for want of room."""


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
    """The leaf with the fewest reads goes, where a read is worth less the longer ago it was: the score is the binary logarithm of the sum
    of 2^-(age / half-life) over a block's reads and its writing, which keeps its order as time passes (the "combined recency and
    frequency" of Lee et al., LRFU, 2001). Time is counted in blocks written, the half-life is `half_life` slabs of them."""

    name = "lfu"

    def __init__(self, slots: int, half_life: float = 1.0) -> None:
        super().__init__()
        self._tick = 0.0
        self._half_life = half_life * slots

    def hit(self, keys: Sequence[BlockKey]) -> None:
        now, nodes = self._tick / self._half_life, self._nodes
        for key in keys:
            node = nodes[key]
            node.score = now + log2(1.0 + 2.0 ** (node.score - now))

    def _score_new(self, node: Node) -> None:
        self._tick += 1
        node.score = self._tick / self._half_life


class ReuseHorizon(ScoredPolicy):
    """Least recently used, except that a block known to be read again is kept longer, by a multiple of how long reuse takes here.

    That time, the horizon, is learnt: the `QUANTILE` of the distances (in blocks written) between a block's first two uses, also when it was
    dropped meanwhile, which is why the dropped are remembered for a while. With `n` uses after the first, the score is the time of the
    last use plus log2(1 + n) times the horizon; less of it where the slab holds more than half a horizon anyway, as all that will be read
    again lives that long there. What is used once only goes soon, and a burst of such prompts does not wash out the others.
    """

    name = "reuse_horizon"
    QUANTILE = 0.75
    PACE = 4.0
    """How fast the horizon follows: in about so many first reuses as a quarter of the slots it changes e-fold."""
    REMEMBERED = 4
    """Dropped blocks remembered, in slabs of them."""

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._tick = 0.0
        self._slots = slots
        self.horizon = float(slots)
        up = min(0.1, self.PACE / slots)
        self._longer, self._shorter = 1.0 + up * self.QUANTILE, 1.0 - up * (1.0 - self.QUANTILE)
        self._ghosts: Ghosts[tuple[int, float]] = Ghosts(self.REMEMBERED * slots)

    def hit(self, keys: Sequence[BlockKey]) -> None:
        tick, nodes, learn, longer = self._tick, self._nodes, self._learn, self._kept_longer()
        for key in keys:
            node = nodes[key]
            if not node.hits:
                learn(tick - node.seen)
            node.hits += 1
            node.seen = tick
            score = tick + longer * log2(1 + node.hits)
            if score > node.score:
                node.score = score

    def remove(self, key: BlockKey) -> None:
        self._score_victim(self._nodes[key])
        super().remove(key)

    def _kept_longer(self) -> float:
        return self.horizon * min(1.0, self.horizon / (2 * self._slots))

    def _learn(self, distance: float) -> None:
        """A step towards the quantile: up and down balance where a quarter of the distances are longer."""
        self.horizon *= self._longer if distance > self.horizon else self._shorter

    def _score_new(self, node: Node) -> None:
        self._tick += 1
        known = self._ghosts.recall(node.key)
        if known is not None:
            hits, seen = known
            if not hits:
                self._learn(self._tick - seen)
            node.hits = hits + 1
        node.seen = self._tick
        node.score = self._tick + (self._kept_longer() * log2(1 + node.hits) if node.hits else 0.0)

    def _score_victim(self, node: Node) -> None:
        self._ghosts.remember(node.key, (node.hits, node.seen))

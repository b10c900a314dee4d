"""Virtual time: a heap of events and the clock that production code reads.

Owns order, nothing else. Invariant: time never goes back, and events of the same moment run in the order in which they were set.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """A `Clock` that jumps from event to event."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._count = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def now_s(self) -> float:
        return self._now_s

    def at(self, when_s: float, do: Callable[..., object], *args: Any) -> None:
        """Run `do(*args)` then; raises ValueError for a moment that is past."""
        if not when_s >= self._now_s:
            raise ValueError(f"{when_s} s is before now, {self._now_s} s")
        self._count += 1
        heapq.heappush(self._heap, (when_s, self._count, do, args))

    def after(self, delay_s: float, do: Callable[..., object], *args: Any) -> None:
        self.at(self._now_s + delay_s, do, *args)

    def run(self, until_s: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Run events up to and including `until_s`, then stand there; sooner if `stop()` says so after an event."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self._now_s, _, do, args = heapq.heappop(heap)
            do(*args)
            if stop():
                return
        self._now_s = max(self._now_s, until_s)

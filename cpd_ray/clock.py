"""Time as an argument: production passes `SystemClock`, tests and the simulator pass `ManualClock`.

Invariant: `now_s` never goes back, and means nothing outside the process that read it.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Monotonic seconds."""
        ...


class SystemClock:
    """The process's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves when told to."""

    def __init__(self, now_s: float = 0.0) -> None:
        self._now_s = now_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back {-seconds} s")
        self._now_s += seconds

"""Whether, when an answer has ended, its context should be brought to a prefill worker's pool before the next turn comes. Pure.

An agent or a person who has come back once comes back again, some seconds later and with the same context: fetching it meanwhile
takes the fetch out of the next turn's time to first token. Owns the rule and what it has learnt of pauses, not the fetch. Invariant:
never a worker that is draining, or of another role than prefill (there warm requests run), and none while prompts wait there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from cpd_ray.ids import BlockKey, WorkerId
from cpd_ray.types import Role
from placement.routing.types import Route, Snapshot


@dataclass(frozen=True, slots=True)
class TurnAhead:
    """`most_backlog_s`: a worker with more than this before it is left alone. `after_cold`: also after a context's first turn, which
    may have been its only one."""

    most_backlog_s: float = 1.0
    after_cold: bool = True

    def expects(self, route: Route) -> bool:
        """Whether a next turn is counted on after a request of this kind. If so its blocks may leave the pool at once, when they have been
        handed over: they come back before they are needed, and until then the room is others'."""
        return route is Route.WARM or self.after_cold

    def worker(self, route: Route, ran_on: WorkerId, snapshot: Snapshot) -> WorkerId | None:
        """The worker to prepare: the one that has most of it already, else the least busy; None for none."""
        if not self.expects(route):
            return None
        able = [w for w in snapshot.workers if w.role is Role.PREFILL and not w.draining and w.backlog_s <= self.most_backlog_s]
        best = min(able, key=lambda w: (w.worker != ran_on, w.backlog_s), default=None)
        return best.worker if best is not None else None


class Pauses:
    """How long it takes until the next turn comes, learnt from those that came: what is brought too early only fills the pool.

    `early_share` of the turns may come before their context does. Bounded: the latest `most_contexts` ends, the latest `most_pauses` pauses.
    """

    def __init__(self, *, early_share: float = 0.05, most_contexts: int = 4096, most_pauses: int = 256) -> None:
        if not 0 <= early_share < 1 or most_contexts < 1 or most_pauses < 1:
            raise ValueError("pauses are learnt from at least one context and one pause, with a share below 1 coming early")
        self._early_share = early_share
        self._most_contexts = most_contexts
        self._ended_s: OrderedDict[BlockKey, float] = OrderedDict()
        self._pauses_s: deque[float] = deque(maxlen=most_pauses)

    def ended(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """An answer has ended; `keys` of its whole context."""
        if not keys:
            return
        self._ended_s.pop(keys[-1], None)
        self._ended_s[keys[-1]] = now_s
        if len(self._ended_s) > self._most_contexts:
            self._ended_s.popitem(last=False)

    def arrived(self, keys: Sequence[BlockKey], now_s: float) -> None:
        """A request has come: if it continues a context that ended here, the pause was this long."""
        for key in reversed(keys):
            ended_s = self._ended_s.pop(key, None)
            if ended_s is not None:
                self._pauses_s.append(now_s - ended_s)
                return

    def wait_s(self, fetch_s: float, least_s: float) -> float:
        """How long after an end to begin a fetch of `fetch_s`, at least `least_s`: at once until enough pauses have been seen."""
        if len(self._pauses_s) < 20:
            return least_s
        soonest_s = sorted(self._pauses_s)[int(self._early_share * len(self._pauses_s))]
        return max(least_s, soonest_s - 2 * fetch_s)

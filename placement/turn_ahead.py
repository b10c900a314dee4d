"""Whether, when an answer has ended, its context should be brought to a prefill worker's pool before the next turn comes. Pure.

An agent or a person who has come back once comes back again, some seconds later and with the same context: fetching it meanwhile
takes the fetch out of the next turn's time to first token. Owns the rule, not the fetch. Invariant: never a worker that is draining,
or of another role than prefill (there warm requests run), and none while prompts wait there.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.ids import WorkerId
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

"""The paper's policy: a fixed rule parts cold from warm, and each goes to its own pool.

Invariant: a request leaves its own pool only when that pool has no worker for it.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.types import Role
from placement.cost_model import CostModel
from placement.routing.candidates import OWN_POOL, ColdRule, candidates, in_role, seconds
from placement.routing.types import Candidate, Decision, RequestView, Snapshot


def nearest_then_idle(candidate: Candidate) -> tuple[int, int, int, float]:
    """Sort key: longest prefix cached or being computed, of it the most in the nearest tier, then least backlog."""
    spared = candidate.cached_tokens + candidate.joined_tokens
    return (-spared, -candidate.pool_tokens, -candidate.node_tokens, candidate.backlog_s)


@dataclass(frozen=True, slots=True)
class ThresholdPolicy:
    model: CostModel
    rule: ColdRule
    name: str = "threshold"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        """Own pool if it has a worker, else the other; in it the best prefix, then the least backlog."""
        considered = candidates(request, snapshot, self.model)
        route = self.rule.route(request)
        own = in_role(considered, OWN_POOL[route])
        chosen = min(own or considered, key=nearest_then_idle)
        why = f"{self.rule.describe(request, route)}: {chosen.role} worker with {chosen.cached_tokens} tokens in reach and "
        why += f"{seconds(chosen.backlog_s)} of backlog"
        if not own:
            missing: Role = OWN_POOL[route]
            why += f", since the {missing} pool has no worker"
        return Decision(route, chosen, considered, self.name, why)

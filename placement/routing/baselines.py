"""What the policies are measured against: plain prefill-decode disaggregation, which knows no cold and no warm pool.

Each spreads over every prefill-capable worker, whatever its role. Invariant: pure; round robin counts by the request's own
sequence number.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.cost_model import CostModel
from placement.routing.candidates import ColdRule, candidates, seconds
from placement.routing.types import Decision, RequestView, Snapshot


@dataclass(frozen=True, slots=True)
class RoundRobinPolicy:
    """Each worker in turn."""

    model: CostModel
    rule: ColdRule
    name: str = "round_robin"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        considered = candidates(request, snapshot, self.model)
        turn = request.sequence % len(considered)
        return Decision(
            self.rule.route(request),
            considered[turn],
            considered,
            self.name,
            f"turn {turn + 1} of {len(considered)} (request {request.sequence})",
        )


@dataclass(frozen=True, slots=True)
class AffinityPolicy:
    """The worker that itself holds (or is computing) most of the prompt; among equals the least backlog."""

    model: CostModel
    rule: ColdRule
    name: str = "affinity"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        considered = candidates(request, snapshot, self.model)
        chosen = min(considered, key=lambda c: (-(c.pool_tokens + c.node_tokens + c.joined_tokens), c.backlog_s))
        held = chosen.pool_tokens + chosen.node_tokens + chosen.joined_tokens
        return Decision(
            self.rule.route(request),
            chosen,
            considered,
            self.name,
            f"holds or computes {held} of {request.total_tokens} tokens itself, with {seconds(chosen.backlog_s)} of backlog",
        )


@dataclass(frozen=True, slots=True)
class SharedCachePolicy:
    """Any worker can read any node's slab, so only load counts, and plainly: the fewest requests, as load balancers count."""

    model: CostModel
    rule: ColdRule
    name: str = "shared"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        considered = candidates(request, snapshot, self.model)
        requests = {w.worker: w.running + w.waiting for w in snapshot.workers}
        chosen = min(considered, key=lambda c: (requests[c.worker], -c.cached_tokens))
        return Decision(
            self.rule.route(request),
            chosen,
            considered,
            self.name,
            f"fewest requests, {requests[chosen.worker]}, with {chosen.cached_tokens} tokens in reach",
        )


@dataclass(frozen=True, slots=True)
class AffinitySharedPolicy:
    """The least predicted time to first token over all workers: prefixes draw by the fetch and the compute that they spare. With
    shortest-remaining scheduling in the workers this is the best plain disaggregation that we know how to build."""

    model: CostModel
    rule: ColdRule
    name: str = "affinity_shared"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        considered = candidates(request, snapshot, self.model)
        chosen = min(considered, key=lambda c: (c.ttft_s, c.inflicted_s))
        return Decision(
            self.rule.route(request),
            chosen,
            considered,
            self.name,
            f"least predicted time to first token, {seconds(chosen.ttft_s)}",
        )

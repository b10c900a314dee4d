"""How long a prompt would take on a worker, and what that costs the others there: the arithmetic of a routing decision.

Owns the formulas only: the coefficients are measured by the workers (`StepCost`, `fetch_bytes_per_s`) and arrive in the snapshot.
Invariant: a candidate's tokens add up (`pool + node + cluster + joined + new == total`) and at least one token is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.messages import StepCost
from cpd_ray.types import Tier
from placement.routing.types import Candidate, RequestView, Snapshot, WorkerView


def prefill_s(cost: StepCost, context_tokens: int, new_tokens: int, chunk_tokens: int) -> float:
    """Seconds to compute `new_tokens` after `context_tokens` in chunks: each chunk attends to all before it, so the sum over the
    chunks of new * (context + new / 2) is the whole prompt's, while the fixed cost is paid once a chunk."""
    steps = -(-new_tokens // chunk_tokens)
    attention = new_tokens * (context_tokens + new_tokens / 2)
    return steps * (cost.base_s + cost.per_sequence_s) + cost.per_token_s * new_tokens + cost.per_attention_s * attention


def fetch_s(tokens: int, bytes_per_token: int, bytes_per_s: float) -> float:
    """Seconds to bring the KV of `tokens` from a tier of that rate."""
    return tokens * bytes_per_token / bytes_per_s if tokens else 0.0


def usable_tokens(tokens: int, request: RequestView) -> int:
    """Of `tokens` cached leading tokens, those that spare work: whole blocks, and never the prompt's last token."""
    return min(tokens, request.total_tokens - 1) // request.block_size * request.block_size


@dataclass(frozen=True, slots=True)
class CostModel:
    """`chunk_tokens`: the step's token budget. `shortest_remaining`: how the workers order their prompts (else first come);
    `aging`: seconds of remaining work that the scheduler forgives a prompt for each second that it has waited."""

    chunk_tokens: int = 2048
    shortest_remaining: bool = True
    aging: float = 0.0

    def candidate(self, request: RequestView, worker: WorkerView, snapshot: Snapshot) -> Candidate:
        """The numbers of running `request` on `worker` now."""
        pool, node, cluster = self._tiers(request, worker, snapshot)
        cached = pool + node + cluster
        joined = max(0, usable_tokens(request.by_flight.get(worker.worker, 0), request) - cached)
        new = request.total_tokens - cached - joined
        rates = worker.fetch_bytes_per_s
        fetch = sum(
            fetch_s(tokens, snapshot.bytes_per_token, rates[tier])
            for tokens, tier in ((node, Tier.NODE), (cluster, Tier.CLUSTER))
            if tokens
        )
        own = prefill_s(worker.step_cost, cached + joined, new, self.chunk_tokens)
        # whoever computes the joined part is in the queue: it counts as work ahead, and only there
        rank = own + (prefill_s(worker.step_cost, cached, joined, self.chunk_tokens) if joined else 0.0)
        return Candidate(
            worker=worker.worker,
            role=worker.role,
            pool_tokens=pool,
            node_tokens=node,
            cluster_tokens=cluster,
            new_tokens=new,
            backlog_s=self.ahead_s(worker, rank, request.waited_s),
            fetch_s=fetch,
            prefill_s=own,
            inflicted_s=self.inflicted_s(worker, own, request.waited_s),
            joined_tokens=joined,
        )

    def ahead_s(self, worker: WorkerView, own_s: float, waited_s: float = 0.0) -> float:
        """Seconds of work that goes before a prompt of `own_s` seconds. Without `queue_s` all of the backlog is taken to."""
        if not self.shortest_remaining or not worker.queue_s:
            return worker.backlog_s
        rank = own_s - self.aging * waited_s
        return sum(s for s, age in self._queue(worker) if s - self.aging * age <= rank)

    def inflicted_s(self, worker: WorkerView, own_s: float, waited_s: float = 0.0) -> float:
        """Seconds, summed over the prompts behind, that a prompt of `own_s` seconds delays them by."""
        if not self.shortest_remaining or not worker.queue_s:
            return 0.0
        rank = own_s - self.aging * waited_s
        return own_s * sum(1 for s, age in self._queue(worker) if s - self.aging * age > rank)

    @staticmethod
    def _queue(worker: WorkerView) -> zip[tuple[float, float]]:
        ages = worker.queue_age_s or (0.0,) * len(worker.queue_s)
        return zip(worker.queue_s, ages, strict=True)

    def _tiers(self, request: RequestView, worker: WorkerView, snapshot: Snapshot) -> tuple[int, int, int]:
        """Tokens from the own pool, the own node's slab and another node's; a tier that is slower than computing is left out."""
        pool = usable_tokens(request.by_worker.get(worker.worker, 0), request)
        node = max(0, usable_tokens(request.by_node.get(worker.node, 0), request) - pool)
        node = node if self._worth(worker, Tier.NODE, pool, node, snapshot) else 0
        elsewhere = max((tokens for name, tokens in request.by_node.items() if name != worker.node), default=0)
        cluster = max(0, usable_tokens(elsewhere, request) - pool - node)
        cluster = cluster if self._worth(worker, Tier.CLUSTER, pool + node, cluster, snapshot) else 0
        return pool, node, cluster

    def _worth(self, worker: WorkerView, tier: Tier, before: int, tokens: int, snapshot: Snapshot) -> bool:
        rate = worker.fetch_bytes_per_s.get(tier)
        if not tokens or not rate:
            return False
        return fetch_s(tokens, snapshot.bytes_per_token, rate) < prefill_s(worker.step_cost, before, tokens, self.chunk_tokens)

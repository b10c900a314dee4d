"""Where to decode: cached prefix, free KV and load, in seconds.

A worker's cost is the handover (KV that it lacks over its fetch rate) plus the answer's decode steps at the batch that it would have.
Invariant: a worker is chosen only if its free and evictable blocks hold prompt and answer.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.errors import Unavailable
from cpd_ray.types import Role, Tier
from placement.cost_model import fetch_s
from placement.routing.candidates import seconds
from placement.routing.types import DecodeDecision, RequestView, Snapshot, WorkerView


def blocks_needed(request: RequestView) -> int:
    """Blocks of prompt and whole answer."""
    return -(-(request.total_tokens + request.max_new_tokens) // request.block_size)


def cached_tokens(request: RequestView, worker: WorkerView) -> int:
    return min(request.by_worker.get(worker.worker, 0), request.total_tokens) // request.block_size * request.block_size


@dataclass(frozen=True, slots=True)
class DecodeCostPolicy:
    """`answer_tokens`: how many tokens an answer is taken to have where `max_new_tokens` allows more."""

    answer_tokens: int = 400
    name: str = "decode_cost"

    def decide(self, request: RequestView, snapshot: Snapshot) -> DecodeDecision | None:
        """The least cost among those with room; None when all are full; raises Unavailable when no decode worker lives."""
        living = [w for w in snapshot.workers if w.role is Role.DECODE and not w.draining]
        if not living:
            raise Unavailable("no decode worker is left")
        need = blocks_needed(request)
        if all(w.pool.total < need for w in living):
            raise Unavailable(f"no decode worker's pool holds the {need} blocks of this request")
        with_room = [w for w in living if self._room(request, w) >= need]
        if not with_room:
            return None
        best = min(with_room, key=lambda w: (self._cost_s(request, w, snapshot), w.running + w.waiting))
        cached = cached_tokens(request, best)
        free = best.pool.free + best.pool.cached
        cost = self._cost_s(request, best, snapshot)
        reason = f"holds {cached} of {request.total_tokens} tokens, {free} blocks free, {best.running + best.waiting} running: {seconds(cost)}"
        return DecodeDecision(best.worker, cached, free, best.running + best.waiting, reason)

    @staticmethod
    def _room(request: RequestView, worker: WorkerView) -> int:
        """Blocks that can be had. A prefix that another answer holds is not subtracted from the need: that errs on the safe side."""
        return worker.pool.free + worker.pool.cached

    def _cost_s(self, request: RequestView, worker: WorkerView, snapshot: Snapshot) -> float:
        lacking = request.total_tokens - cached_tokens(request, worker)
        rate = worker.fetch_bytes_per_s.get(Tier.CLUSTER) or worker.fetch_bytes_per_s.get(Tier.NODE)
        handover = fetch_s(lacking, snapshot.bytes_per_token, rate) if rate else 0.0
        batch = worker.running + worker.waiting + 1
        context = worker.pool.active * request.block_size + request.total_tokens
        step = worker.step_cost.predict_s(batch, context, batch)
        return handover + min(request.max_new_tokens, self.answer_tokens) * step

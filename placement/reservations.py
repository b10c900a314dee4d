"""Room in decode workers that is promised to requests still in prefill.

Owns the promises, not the blocks. Invariant: a request has at most one promise, and what a worker view shows as free excludes the
promised: so prefill never produces more KV than decode can take, which would pile up as leases and lock both pools.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from cpd_ray.ids import RequestId, WorkerId
from placement.routing.decode import blocks_needed
from placement.routing.types import DecodeDecision, DecodePolicy, RequestView, Snapshot, WorkerView


@dataclass(frozen=True, slots=True)
class Promise:
    worker: WorkerId
    blocks: int


class DecodeReservations:
    """One router's promises."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = policy
        self._promises: dict[RequestId, Promise] = {}

    def reserve(self, request: RequestView, snapshot: Snapshot) -> DecodeDecision | None:
        """Promise room for prompt and answer on the policy's choice; None when nobody has room now. A second call for the same
        request decides anew. Raises Unavailable as the policy does."""
        self.release(request.request_id)
        decision = self._policy.decide(request, replace(snapshot, workers=tuple(self.apply(snapshot.workers))))
        if decision is not None:
            self._promises[request.request_id] = Promise(decision.worker, blocks_needed(request))
        return decision

    def release(self, request_id: RequestId) -> None:
        """The request has its blocks, or ended. Unknown ids are ignored."""
        self._promises.pop(request_id, None)

    def worker_gone(self, worker: WorkerId) -> list[RequestId]:
        """Breaks the promises on a dead worker; returns whose they were."""
        broken = [request_id for request_id, promise in self._promises.items() if promise.worker == worker]
        for request_id in broken:
            del self._promises[request_id]
        return broken

    def worker_of(self, request_id: RequestId) -> WorkerId | None:
        """Who promised room to the request; None when nobody did or the promise was broken."""
        promise = self._promises.get(request_id)
        return promise.worker if promise else None

    def workers(self) -> set[WorkerId]:
        """All who have promised room."""
        return {promise.worker for promise in self._promises.values()}

    def promised_blocks(self, worker: WorkerId) -> int:
        return sum(promise.blocks for promise in self._promises.values() if promise.worker == worker)

    def __len__(self) -> int:
        return len(self._promises)

    def apply(self, workers: Iterable[WorkerView]) -> Iterable[WorkerView]:
        """The views with promised blocks no longer free, and the promised requests counted as waiting."""
        for view in workers:
            mine = [promise.blocks for promise in self._promises.values() if promise.worker == view.worker]
            if not mine:
                yield view
                continue
            blocks = sum(mine)
            free = max(0, view.pool.free - blocks)
            cached = max(0, view.pool.cached - max(0, blocks - view.pool.free))
            taken = view.pool.free + view.pool.cached - free - cached
            pool = replace(view.pool, free=free, cached=cached, active=view.pool.active + taken)
            yield replace(view, pool=pool, waiting=view.waiting + len(mine))

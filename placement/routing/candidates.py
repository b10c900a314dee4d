"""What all prefill policies share: who may take a request at all, cold or warm, and the choice's description.

Owns no preference: that is each policy's. Invariant: a worker that drains, or whose pool could never hold the prompt, is never a
candidate.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cpd_ray.errors import Unavailable
from cpd_ray.types import Role
from placement.cost_model import CostModel
from placement.routing.types import Candidate, RequestView, Route, Snapshot

PREFILLING = (Role.PRE_PREFILL, Role.PREFILL)
OWN_POOL = {Route.COLD: Role.PRE_PREFILL, Route.WARM: Role.PREFILL}


@dataclass(frozen=True, slots=True)
class ColdRule:
    """The paper's: cold iff less than `ratio` of the prompt is cached and at least `min_tokens` are not."""

    ratio: float = 0.1
    min_tokens: int = 2500

    def route(self, request: RequestView) -> Route:
        cached = min(request.cached_anywhere, request.total_tokens)
        cold = cached < self.ratio * request.total_tokens and request.total_tokens - cached >= self.min_tokens
        return Route.COLD if cold else Route.WARM

    def describe(self, request: RequestView, route: Route) -> str:
        cached = min(request.cached_anywhere, request.total_tokens)
        return f"{route} with {cached} of {request.total_tokens} tokens cached"


def candidates(request: RequestView, snapshot: Snapshot, model: CostModel) -> tuple[Candidate, ...]:
    """Every prefill-capable worker that could hold the prompt, in the snapshot's order; raises Unavailable when there is none."""
    need_blocks = -(-request.total_tokens // request.block_size)
    able = [w for w in snapshot.workers if w.role in PREFILLING and not w.draining and w.pool.total >= need_blocks]
    if not able:
        raise Unavailable("no worker is left that could prefill this request")
    return tuple(model.candidate(request, worker, snapshot) for worker in able)


def in_role(considered: Iterable[Candidate], role: Role) -> list[Candidate]:
    return [candidate for candidate in considered if candidate.role is role]


def seconds(value_s: float) -> str:
    """A duration as a person reads it."""
    return f"{value_s:.1f} s" if value_s >= 10 else f"{value_s * 1000:.0f} ms" if value_s < 1 else f"{value_s:.2f} s"

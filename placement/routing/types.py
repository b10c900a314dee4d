"""What a routing policy sees and what it returns. Pure data: the router builds it, the policy reads it, nobody changes it.

Invariant: a `Decision` carries every number that the choice was made on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from cpd_ray.ids import NodeId, RequestId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost
from cpd_ray.types import Role


class Route(StrEnum):
    """What the request was found to be."""

    COLD = "cold"
    WARM = "warm"


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A live worker as the router believes it to be: its last report, plus what this router has sent since (`backlog_*` include that).

    `fetch_bytes_per_s`: measured rate from the tiers below its pool: `node`, `cluster`; a tier without a rate can't be read.
    `queue_s`: predicted remaining prefill seconds of each prompt accepted and not finished; empty when the worker doesn't say.
    `queue_age_s`: how long each of those has waited (same order). `draining` workers take nothing new.
    """

    worker: WorkerId
    role: Role
    node: NodeId
    running: int
    waiting: int
    backlog_tokens: int
    backlog_s: float
    pool: PoolCounts
    step_cost: StepCost
    fetch_bytes_per_s: Mapping[str, float]
    queue_s: tuple[float, ...] = ()
    queue_age_s: tuple[float, ...] = ()
    draining: bool = False


@dataclass(frozen=True, slots=True)
class RequestView:
    """A request and where its leading tokens are cached (committed KV only). `by_worker`, `by_node`: leading tokens in each worker's
    pool and each node's slab; absent means none. `waited_s`: since it arrived. `sequence`: how many requests this router saw before.
    `by_flight`: leading tokens that it has in common with a prompt which was sent to that worker and isn't computed yet. `in_reach`:
    leading tokens that a prefill worker could take: from its pool or a slab, not from a pool of another role, which nobody else reads."""

    request_id: RequestId
    total_tokens: int
    block_size: int
    by_worker: Mapping[WorkerId, int]
    by_node: Mapping[NodeId, int]
    max_new_tokens: int = 1
    waited_s: float = 0.0
    sequence: int = 0
    by_flight: Mapping[WorkerId, int] = field(default_factory=dict)
    in_reach: int | None = None

    @property
    def cached_anywhere(self) -> int:
        """Leading tokens that make the prompt warm: `in_reach` of a prefill worker when the router says so, else what any slab or pool
        holds."""
        return max([0, *self.by_worker.values(), *self.by_node.values()]) if self.in_reach is None else self.in_reach


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a decision may depend on. `bytes_per_token` of KV."""

    workers: tuple[WorkerView, ...]
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker considered, with the numbers: tokens taken from each tier (they add up, nearest tier first), tokens that another prompt
    there computes already (`joined_tokens`), tokens to compute, seconds."""

    worker: WorkerId
    role: Role
    pool_tokens: int
    node_tokens: int
    cluster_tokens: int
    new_tokens: int
    backlog_s: float
    fetch_s: float
    prefill_s: float
    inflicted_s: float
    joined_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.backlog_s + self.fetch_s + self.prefill_s

    @property
    def cached_tokens(self) -> int:
        return self.pool_tokens + self.node_tokens + self.cluster_tokens

    @property
    def cost_s(self) -> float:
        return self.ttft_s + self.inflicted_s


@dataclass(frozen=True, slots=True)
class Decision:
    """Where to prefill, and why. `chosen` is one of `considered`. `reason` is one short sentence with the figures in it."""

    route: Route
    chosen: Candidate
    considered: tuple[Candidate, ...]
    policy: str
    reason: str

    @property
    def predicted_ttft_s(self) -> float:
        return self.chosen.ttft_s


class PrefillPolicy(Protocol):
    """Pure. Raises Unavailable when no prefill-capable worker is left."""

    @property
    def name(self) -> str: ...

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision: ...


@dataclass(frozen=True, slots=True)
class DecodeDecision:
    worker: WorkerId
    cached_tokens: int
    free_blocks: int
    load: int
    reason: str


class DecodePolicy(Protocol):
    """Pure. Returns None when no decode worker has room for the request now; raises Unavailable when there is none at all."""

    @property
    def name(self) -> str: ...

    def decide(self, request: RequestView, snapshot: Snapshot) -> DecodeDecision | None: ...

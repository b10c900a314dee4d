"""Who may enter prefill now, who waits, and who is sent away.

Owns the queue's bookkeeping, not the waiting itself: an asyncio shell or the simulator asks `next_ready`. Tenants share by weight
(start-time fair queueing over predicted prefill seconds); within a tenant the order is shortest first with aging, and `priority` is
a head start. Invariant: a ticket is queued, in flight or gone; at most `max_in_flight` are in flight and `max_queued` queued.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from cpd_ray.clock import Clock
from cpd_ray.errors import DuplicateRequest, Overloaded
from cpd_ray.ids import RequestId


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """`aging`: seconds of prefill forgiven for each second waited: a request is overtaken only by those that arrive within
    `cost_s / aging` of it. `priority_s`: the head start that one step of priority is worth. `max_wait_s`: after that the queue
    gives a request back."""

    max_in_flight: int = 24
    max_queued: int = 256
    aging: float = 0.1
    priority_s: float = 10.0
    max_wait_s: float = 120.0

    def __post_init__(self) -> None:
        if self.max_in_flight < 1 or self.max_queued < 0:
            raise ValueError("admission needs room for one request in flight, and a queue of 0 or more")
        if not self.aging > 0 or self.priority_s < 0 or not self.max_wait_s > 0:
            raise ValueError("admission needs aging and max_wait_s above 0 and priority_s of 0 or more")

    def shared_by(self, routers: int) -> AdmissionLimits:
        """One of `routers` equal routers' limits: ceil of its share."""
        return AdmissionLimits(
            -(-self.max_in_flight // routers), -(-self.max_queued // routers), self.aging, self.priority_s, self.max_wait_s
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request before prefill. `cost_s`: predicted seconds of its fetch and prefill."""

    request_id: RequestId
    cost_s: float
    arrived_s: float
    tenant: str = ""
    priority: int = 0


@dataclass(slots=True)
class _Tenant:
    """`served`: weighted prefill seconds let in so far (virtual time). `heap` may hold tickets that have left the queue."""

    weight: float
    served: float = 0.0
    heap: list[tuple[float, int, Ticket]] = field(default_factory=list)
    queued: dict[RequestId, Ticket] = field(default_factory=dict)


def _always(_: Ticket) -> bool:
    return True


class Admission:
    """`weights`: a tenant's share of prefill seconds while others wait; 1 where unnamed."""

    def __init__(self, limits: AdmissionLimits, clock: Clock, *, weights: Mapping[str, float] | None = None) -> None:
        self._limits = limits
        self._clock = clock
        self._weights = dict(weights or {})
        if any(not weight > 0 for weight in self._weights.values()):
            raise ValueError("a tenant's weight must be above 0")
        self._tenants: dict[str, _Tenant] = {}
        self._tenant_of: dict[RequestId, str] = {}
        self._in_flight: dict[RequestId, Ticket] = {}
        self._virtual = 0.0
        self._arrivals = 0
        self._seconds_per_done: float | None = None
        self._last_done_s: float | None = None

    @property
    def queued(self) -> int:
        return len(self._tenant_of)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def reconfigure(self, limits: AdmissionLimits) -> None:
        """New limits from now on; what is in flight or queued beyond them stays."""
        self._limits = limits

    def offer(self, ticket: Ticket) -> Ticket | None:
        """Queue it. A full queue sends away the last ticket of the tenant that holds most of it for its weight: that ticket is
        returned (its caller is overloaded) or, when it is this one, Overloaded is raised. DuplicateRequest for a known id."""
        if ticket.request_id in self._tenant_of or ticket.request_id in self._in_flight:
            raise DuplicateRequest(f"request {ticket.request_id} is in flight")
        displaced = None
        if self.queued >= self._limits.max_queued and not self._enters_at_once():
            displaced = self._last_of_the_greediest(ticket)
            if displaced is ticket:
                raise Overloaded("too many requests are waiting", retry_after_s=self.retry_after_s())
            self._forget(displaced.request_id)
        tenant = self._tenants.get(ticket.tenant)
        if tenant is None:
            tenant = self._tenants[ticket.tenant] = _Tenant(self._weights.get(ticket.tenant, 1.0))
        if not tenant.queued:  # idle time earns no credit
            tenant.served = max(tenant.served, self._virtual)
        tenant.queued[ticket.request_id] = ticket
        self._tenant_of[ticket.request_id] = ticket.tenant
        self._arrivals += 1
        heapq.heappush(tenant.heap, (self._rank(ticket), self._arrivals, ticket))
        return displaced

    def next_ready(self, may_enter: Callable[[Ticket], bool] = _always) -> Ticket | None:
        """The next ticket in order, now in flight; None when nobody waits, no place is free, or `may_enter` (which may reserve
        room for decoding) says not yet of the one whose turn it is: others don't slip past it."""
        if len(self._in_flight) >= self._limits.max_in_flight:
            return None
        waiting = [tenant for tenant in self._tenants.values() if tenant.queued]
        if not waiting:
            return None
        tenant = min(waiting, key=lambda t: (t.served, self._head(t)))
        ticket = self._head(tenant)[2]
        if not may_enter(ticket):
            return None
        heapq.heappop(tenant.heap)
        self._virtual = tenant.served
        tenant.served += ticket.cost_s / tenant.weight
        self._forget(ticket.request_id)
        self._in_flight[ticket.request_id] = ticket
        if not self._tenant_of:  # nobody waits: old accounts are settled
            self._tenants.clear()
        return ticket

    def done(self, request_id: RequestId) -> None:
        """Its prefill ended, it failed, or its client left: gives back its place, queued or in flight. Unknown ids are ignored, so
        that every path may call it."""
        if request_id in self._tenant_of:
            self._forget(request_id)
            return
        if self._in_flight.pop(request_id, None) is None:
            return
        now_s = self._clock.now_s()
        if self._last_done_s is not None:
            gap_s = now_s - self._last_done_s
            before = self._seconds_per_done
            self._seconds_per_done = gap_s if before is None else before + 0.1 * (gap_s - before)
        # an idle spell says nothing of the service rate
        self._last_done_s = now_s if self._in_flight or self._tenant_of else None

    def expire(self) -> list[Ticket]:
        """Takes out and returns the tickets that have waited longer than `max_wait_s`."""
        limit_s = self._clock.now_s() - self._limits.max_wait_s
        late = [t for tenant in self._tenants.values() for t in tenant.queued.values() if t.arrived_s < limit_s]
        for ticket in late:
            self._forget(ticket.request_id)
        return late

    def retry_after_s(self) -> float:
        """When the present queue should be through at the measured rate of completions; a second while nothing was measured."""
        if self._seconds_per_done is None:
            return 1.0
        return min(max(self._seconds_per_done * (self.queued + 1), 0.1), self._limits.max_wait_s)

    def check(self) -> None:
        """Asserts the invariant."""
        queued = {request_id: name for name, t in self._tenants.items() for request_id in t.queued}
        assert queued == self._tenant_of, "a queued ticket is known by exactly one tenant"
        assert not queued.keys() & self._in_flight.keys(), "a ticket is queued or in flight, not both"
        for name, tenant in self._tenants.items():
            alive = {entry[2].request_id for entry in tenant.heap if tenant.queued.get(entry[2].request_id) is entry[2]}
            assert alive == tenant.queued.keys(), f"tenant {name!r}: heap and queue disagree"
            assert len(tenant.heap) <= 2 * len(tenant.queued) + 8, f"tenant {name!r}: the heap keeps too many of the departed"
            assert tenant.queued or tenant.served > self._virtual, f"tenant {name!r} is remembered for nothing"

    def _enters_at_once(self) -> bool:
        return not self.queued and len(self._in_flight) < self._limits.max_in_flight

    def _rank(self, ticket: Ticket) -> float:
        # cost - aging * waited orders like cost + aging * arrived, which doesn't change with time
        return ticket.cost_s + (ticket.arrived_s - ticket.priority * self._limits.priority_s) * self._limits.aging

    def _head(self, tenant: _Tenant) -> tuple[float, int, Ticket]:
        while tenant.queued.get(tenant.heap[0][2].request_id) is not tenant.heap[0][2]:
            heapq.heappop(tenant.heap)
        return tenant.heap[0]

    def _last_of_the_greediest(self, newcomer: Ticket) -> Ticket:
        held = {name: len(t.queued) / t.weight for name, t in self._tenants.items() if t.queued}
        weight = self._weights.get(newcomer.tenant, 1.0)
        held[newcomer.tenant] = held.get(newcomer.tenant, 0.0) + 1 / weight
        name = max(held, key=lambda n: (held[n], n == newcomer.tenant))
        candidates: Iterable[Ticket] = self._tenants[name].queued.values() if name in self._tenants else ()
        last = max(candidates, key=self._rank, default=newcomer)
        if name == newcomer.tenant and self._rank(newcomer) >= self._rank(last):
            return newcomer
        return last

    def _forget(self, request_id: RequestId) -> None:
        """Out of the queue; the heap's entry goes later, and the tenant once its account says nothing."""
        name = self._tenant_of.pop(request_id)
        tenant = self._tenants[name]
        del tenant.queued[request_id]
        if len(tenant.heap) > 2 * len(tenant.queued) + 8:
            tenant.heap = [entry for entry in tenant.heap if tenant.queued.get(entry[2].request_id) is entry[2]]
            heapq.heapify(tenant.heap)
        for idle in [n for n, t in self._tenants.items() if not t.queued and t.served <= self._virtual]:
            del self._tenants[idle]

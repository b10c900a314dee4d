"""The router: which worker prefills a prompt, which one decodes it, and what happens when one of them dies.

Owns requests in flight and their admission. Where KV is comes from the directory, load from the fleet, the choice from
`placement`, the calls are the courier's. Invariant: a client gets each token once, in order, and after a request's end nothing is
counted, reserved or leased for it (what could not be told to a worker lapses there by itself).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.courier import Courier
from actors.fleet import Fleet
from actors.flight import Flight, Found, node_runs
from actors.gate import Gate
from actors.membership import Membership
from actors.served_model import ServedModel
from cpd_ray.clock import Clock
from cpd_ray.config import RuntimeConfig
from cpd_ray.errors import CacheMissed, CPDError, DuplicateRequest, KVError, PeerGone, PoolExhausted, Unavailable, WorkerGone
from cpd_ray.ids import BlockKey, NodeId, RequestId, WorkerId, join_keys, pool_source, slab_source
from cpd_ray.messages import NodeRun, PinBlocks, PrefillResult
from cpd_ray.types import GenerateRequest, Role, TokenChunk
from kv.directory import Directory
from kv.keys import block_keys
from kv.node import KvNode
from placement.admission import Admission, AdmissionLimits, Ticket
from placement.reservations import DecodeReservations
from placement.routing.decode import DecodeCostPolicy
from placement.routing.prefixes import by_flight
from placement.routing.registry import make_policy
from placement.routing.types import Decision, RequestView, Snapshot

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 4
"""How often a request is tried before its client hears of failures; a cache miss counts as one."""
WRITTEN_WITHIN_S, WRITTEN_POLL_S = 5.0, 0.01
"""How long warming waits for the last blocks to be written down, which happens beside computing, before it pins what is there."""
_TRIED_AGAIN = (CacheMissed, WorkerGone, PoolExhausted)


@dataclass(frozen=True, slots=True)
class RouterCounts:
    in_flight: int
    queued: int


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming a context came to: `pinned_blocks` of its `blocks` full blocks stay for the time asked."""

    tokens: int
    blocks: int
    pinned_blocks: int
    worker: WorkerId
    node: NodeId
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a router stands on."""

    membership: Membership
    fleet: Fleet
    directory: Directory
    clock: Clock


class Router:
    """`routers`: how many equal routers share `max_in_flight`. `seeds`: where a request without a seed gets one."""

    def __init__(
        self,
        model: ServedModel,
        around: Surroundings,
        runtime: RuntimeConfig,
        *,
        routers: int = 1,
        seeds: random.Random | None = None,
    ) -> None:
        self.model = model
        self.membership = around.membership
        self._fleet, self._directory, self._clock = around.fleet, around.directory, around.clock
        self._courier = Courier(around.fleet, around.membership, around.clock)
        self._routers = routers
        self._seeds = seeds or random.SystemRandom()
        self._flights: dict[RequestId, Flight] = {}
        self._prefilling: dict[RequestId, tuple[Flight, WorkerId]] = {}
        self._sequence = 0
        self._reservations = DecodeReservations(DecodeCostPolicy())
        self._admission = Admission(_limits(runtime, routers), around.clock, weights=runtime.admission.tenant_weights)
        self._gate = Gate(self._admission, self._reserve_decode)
        self.reconfigure(runtime)
        around.membership.on_change = self._look_again

    def reconfigure(self, runtime: RuntimeConfig) -> None:
        """New knobs from the next decision on; requests in flight go on."""
        routing = runtime.routing
        self._policy = make_policy(
            routing.policy,
            cold_ratio=routing.cold_ratio,
            cold_min_tokens=routing.cold_min_uncached_tokens,
            spill_after_s=routing.spill_after_s,
            chunk_tokens=runtime.engine.step_tokens,
            shortest_remaining=runtime.engine.order == "shortest",
            aging=1 / runtime.engine.aging_s,
        )
        self._courier.handover_ttl_s = runtime.handover_ttl_s
        self._gate.reconfigure(_limits(runtime, self._routers))

    @property
    def counts(self) -> RouterCounts:
        """Requests being worked on, and requests that wait for their turn."""
        return RouterCounts(in_flight=len(self._flights) - self._gate.queued, queued=self._gate.queued)

    def check(self) -> None:
        """Assert that what is counted belongs to requests in flight."""
        self._admission.check()
        assert self._gate.queued + self._gate.in_flight <= len(self._flights), "a place is held by no request"
        assert len(self._reservations) <= len(self._flights), "room for decoding is promised to no request"
        assert self._flights or not self._fleet.uncounted(), "load is counted for no request"

    async def close(self) -> None:
        """Stop following the others; wait for what is still to be told to workers."""
        await self.membership.stop()
        await self._courier.close()

    # -- deciding ----------------------------------------------------------------------------------------------------

    def plan(self, request: GenerateRequest) -> Decision:
        """What would be decided for this request now; runs nothing. Raises as `generate` would."""
        return self._decide(self._flight(request))

    def _flight(self, request: GenerateRequest) -> Flight:
        self.model.check(request)
        root = self.model.root(request.adapter, request.salt)
        sampling = request.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=self._seeds.getrandbits(63))
        keys = tuple(block_keys(root, request.tokens, self.model.block_tokens))
        self._sequence += 1
        return Flight(request, sampling, root, keys, self.model.block_tokens, self._clock.now_s(), self._sequence)

    def _found(self, flight: Flight) -> Found:
        """Where the prompt's leading blocks are now, among those that are there."""
        leading = self._directory.match(flight.keys).blocks
        workers = {w: leading.get(pool_source(w), 0) for w in self._fleet.workers()}
        nodes = {n: leading.get(slab_source(n), 0) for n in self.membership.node_reports}
        others = ((worker, other.keys) for other, worker in self._prefilling.values() if other is not flight)
        return Found(
            by_worker={w: b for w, b in workers.items() if b},
            by_node={n: b for n, b in nodes.items() if b},
            by_flight=by_flight(flight.keys, others),
            prefill_workers=frozenset(self._fleet.workers(Role.PREFILL)),
        )

    def _sources(self, flight: Flight) -> tuple[NodeRun, ...]:
        return node_runs(self._found(flight).by_node)

    def _view(self, flight: Flight) -> RequestView:
        return flight.view(self._found(flight), self._clock.now_s())

    def _snapshot(self, flight: Flight, only: Role | None = None) -> Snapshot:
        snapshot = self._fleet.snapshot()
        left = tuple(w for w in snapshot.workers if w.worker not in flight.excluded and (only is None or w.role is only))
        return replace(snapshot, workers=left)

    def _decide(self, flight: Flight, only: Role | None = None) -> Decision:
        return self._policy.decide(self._view(flight), self._snapshot(flight, only))

    def _reserve_decode(self, ticket: Ticket) -> bool:
        flight = self._flights[ticket.request_id]
        return self._reservations.reserve(self._view(flight), self._snapshot(flight)) is not None

    def _look_again(self) -> None:
        """Workers or their loads have changed."""
        for worker in self._reservations.workers() - set(self._fleet.workers(Role.DECODE)):
            self._reservations.worker_gone(worker)
        for worker in self._fleet.lost():
            self._courier.give_up(worker)
        self._gate.tick()

    # -- answering ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """The answer in chunks; the last has finish_reason, usage and trace. Closing the generator aborts the request everywhere.

        Raises InvalidRequest and its kin at once, Overloaded when the queue is full, Unavailable when no worker is left.
        """
        with self._in_flight(request) as flight:
            while True:
                flight.attempts += 1
                try:
                    stream = self._attempt(flight)
                    async with contextlib.aclosing(stream):
                        async for chunk in stream:
                            yield chunk
                    return
                except _TRIED_AGAIN as fault:
                    self._learn(flight, fault)

    @contextlib.contextmanager
    def _in_flight(self, request: GenerateRequest) -> Iterator[Flight]:
        if request.request_id in self._flights:
            raise DuplicateRequest(f"request {request.request_id!r} is in flight", param="request_id")
        flight = self._flights[request.request_id] = self._flight(request)
        try:
            yield flight
        finally:
            del self._flights[request.request_id]
            self._reservations.release(request.request_id)
            self._gate.nudge()

    def _learn(self, flight: Flight, fault: CPDError) -> None:
        """From a failed attempt; raises Unavailable after the last one. The room promised for it goes to whoever's turn comes first."""
        self._reservations.release(flight.request.request_id)
        if isinstance(fault, CacheMissed):
            flight.actual_cached = fault.cached_tokens
        if flight.attempts >= MAX_ATTEMPTS:
            raise Unavailable("the workers that took this request failed; try again") from fault
        log.warning("request %s: attempt %d: %s", flight.request.request_id, flight.attempts, fault)

    async def _attempt(self, flight: Flight) -> AsyncGenerator[TokenChunk, None]:
        """Prefill what is known, send the next token, decode the rest."""
        result, decode = await self._prefill(flight)
        handover = result.handover
        try:
            if result.token is None:
                raise WorkerGone("the prefill worker gave no token")
            chunk = flight.deliver(len(flight.sent), (result.token,), (result.logprobs,) if result.logprobs else ())
            yield flight.known(chunk) if result.finish_reason is None else flight.last(chunk, result.finish_reason)
            if result.finish_reason is not None:
                return
            if handover is None or decode is None:
                raise WorkerGone("no decode worker holds room for this request any more")
            pieces = self._courier.decode(flight, decode, handover, self._sources(flight))
            handover = None
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    self._reservations.release(flight.request.request_id)
                    chunk = flight.deliver(piece.index, piece.tokens, piece.logprobs)
                    yield chunk if piece.finish_reason is None else flight.last(chunk, piece.finish_reason)
        finally:
            if handover is not None:
                self._courier.end(handover)

    async def _prefill(self, flight: Flight) -> tuple[PrefillResult, WorkerId | None]:
        """Wait for a turn and for room to decode, then prefill."""
        waiting_s = self._clock.now_s()
        async with self._gate.admit(self._ticket(flight)):
            flight.spend({"admission": self._clock.now_s() - waiting_s})
            decision = self._decide(flight)
            flight.decided(decision)
            with self._prefills(flight, decision.chosen.worker):
                result = await self._courier.prefill(flight, decision.chosen, self._sources(flight))
            return result, self._reservations.worker_of(flight.request.request_id)

    @contextlib.contextmanager
    def _prefills(self, flight: Flight, worker: WorkerId) -> Iterator[None]:
        """While this is open, equal prefixes are sent to the same worker."""
        self._prefilling[flight.request.request_id] = (flight, worker)
        try:
            yield
        finally:
            del self._prefilling[flight.request.request_id]

    def _ticket(self, flight: Flight) -> Ticket:
        chosen = self._decide(flight).chosen
        request = flight.request
        # what failed elsewhere has waited before: a head start, and a longest wait of its own
        priority = request.priority + (flight.attempts > 1)
        return Ticket(request.request_id, chosen.fetch_s + chosen.prefill_s, self._clock.now_s(), request.tenant, priority)

    # -- warming -----------------------------------------------------------------------------------------------------

    async def warm(self, request: GenerateRequest, ttl_s: float) -> Warmed:
        """Compute and commit a context's KV on a pre-prefill worker (any other when there is none), and pin it for `ttl_s`.

        Raises as `generate`; Unavailable when the worker's node cache is gone.
        """
        with self._in_flight(request) as flight:
            while True:
                flight.attempts += 1
                try:
                    return await self._warm(flight, ttl_s)
                except _TRIED_AGAIN as fault:
                    self._learn(flight, fault)

    async def _warm(self, flight: Flight, ttl_s: float) -> Warmed:
        there = set(self._fleet.workers(Role.PRE_PREFILL)) - flight.excluded
        decision = self._decide(flight, Role.PRE_PREFILL if there else None)
        worker = decision.chosen.worker
        name = next(r.node for r in self._fleet.reports() if r.worker == worker)
        flight.decided(decision)
        result = await self._courier.prefill(flight, decision.chosen, self._sources(flight), commit_only=True)
        node = self.membership.roster.nodes().get(name)
        try:
            if node is None:
                raise PeerGone(f"node {name} has left")
            await self._written(node, worker, flight.keys)
            pin = PinBlocks(flight.keys[-1].hex() if flight.keys else "", join_keys(flight.keys), ttl_s)
            pinned = await node.pin(pin)
        except KVError as error:
            raise Unavailable("the cache of the worker's node is gone; try again") from error
        return Warmed(flight.request.prompt_tokens, len(flight.keys), pinned, worker, name, result.cached.total)

    async def _written(self, node: KvNode, worker: WorkerId, keys: Sequence[BlockKey]) -> None:
        """Return once `worker` has written down to its node what it computed, or can't, or takes too long."""
        joined, client = join_keys(keys), self._fleet.client(worker)
        until_s = self._clock.now_s() + WRITTEN_WITHIN_S
        while await node.match(joined) < len(keys) and self._clock.now_s() < until_s:
            if not (await client.report()).unwritten_blocks:
                return
            await asyncio.sleep(WRITTEN_POLL_S)


def _limits(runtime: RuntimeConfig, routers: int) -> AdmissionLimits:
    admission = runtime.admission
    limits = AdmissionLimits(
        max_in_flight=admission.max_in_flight,
        max_queued=admission.max_queued,
        aging=1 / admission.aging_s,
        max_wait_s=admission.max_wait_s,
    )
    return limits.shared_by(routers)

"""The router in virtual time: the real directory, fleet view, admission, decode reservations and policies, called as `actors.router`
calls them, with events in the place of awaits.

Owns the passage of simulated requests. Decides nothing. Invariant: a request is queued, in prefill, in handover or in decode, and its
record is completed exactly once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from actors.engine.interface import EngineOutput
from actors.fleet import Fleet
from actors.flight import node_runs
from bench.sim.cache import EPOCH, SimNode, occupy
from bench.sim.decode import DecodeJob, SimDecodeWorker
from bench.sim.loop import EventLoop
from bench.sim.prefill import PrefillJob, SimPrefillWorker
from bench.sim.records import Record
from bench.sim.systems import System
from cpd_ray.errors import Overloaded
from cpd_ray.ids import BlockKey, LeaseId, NodeId, RequestId, WorkerId, pool_source, slab_source
from cpd_ray.types import Role
from kv.directory import Applied, Directory
from kv.events import EventLog
from placement.admission import Admission, AdmissionLimits, Ticket
from placement.reservations import DecodeReservations
from placement.routing.decode import DecodeCostPolicy
from placement.routing.prefixes import by_flight
from placement.routing.registry import make_policy
from placement.routing.types import Decision, RequestView
from placement.turn_ahead import Pauses, TurnAhead

POLL_S = 0.2
"""How often the router asks for reports and events, as `actors.membership` does."""
PREPARE_AFTER_S = 0.5
"""After an answer's end, until its last blocks are in a slab and the directory has heard of them."""


@dataclass(slots=True)
class SimFlight:
    """`keys`: of the full blocks of prompt and, where a later turn continues it, answer."""

    record: Record
    keys: tuple[BlockKey, ...]
    prompt_blocks: int
    sequence: int
    ended: Callable[[], None]
    decision: Decision | None = None
    leave: Callable[..., Any] | None = None

    @property
    def request_id(self) -> RequestId:
        return RequestId(self.record.name)


class SimRouter:
    """`prefills` and `decodes` by worker, `nodes` by name."""

    def __init__(
        self,
        system: System,
        nodes: Mapping[NodeId, SimNode],
        prefills: Mapping[WorkerId, SimPrefillWorker],
        decodes: Mapping[WorkerId, SimDecodeWorker],
        loop: EventLoop,
        *,
        block_tokens: int,
    ) -> None:
        self._nodes, self._prefills, self._decodes, self._loop = nodes, prefills, decodes, loop
        self._block_tokens = block_tokens
        block_bytes = next(iter(nodes.values())).block_bytes
        self._fleet = Fleet("sim", loop, bytes_per_token=block_bytes // block_tokens)
        self._directory = Directory(clock=loop, timeout_s=1e9)
        self._admission = Admission(AdmissionLimits(max_in_flight=system.max_in_flight, aging=1 / system.aging_s), loop)
        self._reservations = DecodeReservations(DecodeCostPolicy())
        self._policy = make_policy(
            system.policy,
            spill_after_s=system.spill_after_s,
            chunk_tokens=system.chunk_tokens,
            shortest_remaining=system.order == "shortest",
            aging=1 / system.aging_s,
        )
        self._turn_ahead = TurnAhead() if system.turn_ahead else None
        self._pauses = Pauses()
        self._flights: dict[RequestId, SimFlight] = {}
        self._prefilling: dict[RequestId, tuple[WorkerId, tuple[BlockKey, ...]]] = {}
        self._read: dict[str, int] = {}
        self._sequence = 0
        self.refused = 0
        self.poll()

    # -- what the members say ----------------------------------------------------------------------------------------

    def poll(self) -> None:
        """One round over everyone, and the next one later."""
        workers: list[SimPrefillWorker | SimDecodeWorker] = [*self._prefills.values(), *self._decodes.values()]
        for worker in workers:
            self._fleet.heard(cast(Any, worker), worker.report())
            self._follow(worker.events)
        for node in self._nodes.values():
            self._follow(node.events)
        for late in self._admission.expire():
            self._refuse(late)
        self._nudge()
        self._loop.after(POLL_S, self.poll)

    def _follow(self, events: EventLog) -> None:
        page = events.page(EPOCH if events.source in self._read else EPOCH - 1, self._read.get(events.source, 0))
        for batch in page.batches:
            applied = self._directory.apply(batch)
            assert applied in (Applied.APPLIED, Applied.DUPLICATE), f"{events.source} and the directory lost each other: {applied}"
            self._read[events.source] = batch.sequence

    # -- a request's passage -----------------------------------------------------------------------------------------

    def arrive(self, record: Record, keys: tuple[BlockKey, ...], ended: Callable[[], None]) -> None:
        """A request that has been tokenised."""
        self._sequence += 1
        flight = SimFlight(record, keys, record.prompt_tokens // self._block_tokens, self._sequence, ended)
        self._flights[flight.request_id] = flight
        self._pauses.arrived(keys[: flight.prompt_blocks], self._loop.now_s())
        chosen = self._decide(flight).chosen
        ticket = Ticket(flight.request_id, chosen.fetch_s + chosen.prefill_s, record.arrival_s)
        try:
            displaced = self._admission.offer(ticket)
        except Overloaded:
            displaced = ticket
        if displaced is not None:
            self._refuse(displaced)
        self._nudge()

    def _refuse(self, ticket: Ticket) -> None:
        self.refused += 1
        self._flights.pop(ticket.request_id).ended()

    def _nudge(self) -> None:
        while (ticket := self._admission.next_ready(self._may_enter)) is not None:
            self._send(self._flights[ticket.request_id])

    def _may_enter(self, ticket: Ticket) -> bool:
        flight = self._flights[ticket.request_id]
        return self._reservations.reserve(self._view(flight), self._fleet.snapshot()) is not None

    def _decide(self, flight: SimFlight) -> Decision:
        return self._policy.decide(self._view(flight), self._fleet.snapshot())

    def _where(self, flight: SimFlight) -> tuple[dict[WorkerId, int], dict[NodeId, int]]:
        leading = self._directory.match(flight.keys[: flight.prompt_blocks]).blocks
        workers = {w: leading.get(pool_source(w), 0) for w in (*self._prefills, *self._decodes)}
        return workers, {n: leading.get(slab_source(n), 0) for n in self._nodes}

    def _view(self, flight: SimFlight) -> RequestView:
        workers, nodes = self._where(flight)
        size = self._block_tokens
        readers = self._prefills.values()
        near = {w.node.name for w in readers}
        reach = [workers[w.worker] for w in readers]
        reach += [blocks for node, blocks in nodes.items() if node in near or any(w.shared for w in readers)]
        return RequestView(
            request_id=flight.request_id,
            total_tokens=flight.record.prompt_tokens,
            block_size=size,
            by_worker={w: n * size for w, n in workers.items() if n},
            by_node={n: b * size for n, b in nodes.items() if b},
            max_new_tokens=flight.record.output_tokens,
            waited_s=self._loop.now_s() - flight.record.arrival_s,
            sequence=flight.sequence,
            in_reach=max(reach) * size,
            by_flight={w: n * size for w, n in by_flight(flight.keys[: flight.prompt_blocks], self._prefilling.values()).items()},
        )

    def _send(self, flight: SimFlight) -> None:
        decision = flight.decision = self._decide(flight)
        chosen, record = decision.chosen, flight.record
        record.route, record.role = decision.route, chosen.role
        record.believed_cached_tokens = chosen.cached_tokens
        record.predicted_ttft_s = self._loop.now_s() - record.arrival_s + decision.predicted_ttft_s
        dispatch = self._fleet.dispatch(
            chosen.worker, flight.request_id, new_tokens=chosen.new_tokens, seconds=chosen.fetch_s + chosen.prefill_s
        )
        origin = dispatch.__enter__()
        flight.leave = dispatch.__exit__
        runs = node_runs(self._where(flight)[1])
        keys = flight.keys[: flight.prompt_blocks]
        self._prefilling[flight.request_id] = (chosen.worker, keys)
        job = PrefillJob(
            request_id=flight.request_id,
            prompt_tokens=record.prompt_tokens,
            keys=keys,
            sources=tuple(self._nodes[run.node] for run in runs),
            may_fetch_blocks=self._fetchable(chosen.worker, runs),
            prefilled=lambda output, lease: self._prefilled(flight, output, lease),
        )
        self._prefills[chosen.worker].add(job, origin.sequence)

    def _fetchable(self, worker: WorkerId, runs: Sequence[Any]) -> int:
        own = self._prefills[worker]
        reachable = [run.blocks for run in runs if own.shared or run.node == own.node.name]
        return max(reachable, default=0)

    def _prefilled(self, flight: SimFlight, output: EngineOutput, lease: LeaseId) -> None:
        assert flight.leave is not None and flight.decision is not None and output.cached is not None
        flight.leave(None, None, None)
        del self._prefilling[flight.request_id]
        record = flight.record
        record.ttft_s = self._loop.now_s() - record.arrival_s
        record.cached_tokens = output.cached.total
        record.computed_tokens = output.computed_tokens
        self._admission.done(flight.request_id)
        decode = self._reservations.worker_of(flight.request_id)
        assert decode is not None, "prefill began without room to decode"
        self._hand_over(flight, self._prefills[flight.decision.chosen.worker], self._decodes[decode], lease)
        self._nudge()

    def _hand_over(self, flight: SimFlight, prefill: SimPrefillWorker, decode: SimDecodeWorker, lease: LeaseId) -> None:
        dispatch = self._fleet.dispatch(decode.worker, flight.request_id, new_tokens=0, seconds=0.0)
        origin = dispatch.__enter__()

        def transfer(blocks: int, done: Callable[[], None]) -> None:
            nbytes = blocks * decode.node.block_bytes
            self._loop.at(occupy(self._loop.now_s(), nbytes, prefill.node.out, decode.node.into), done)

        def began() -> None:
            staged = (
                self._turn_ahead is not None and flight.decision is not None and self._turn_ahead.expects(flight.decision.route)
            )
            prefill.end_handover(lease)
            if staged:  # its last blocks are still being written down
                self._loop.after(PREPARE_AFTER_S, prefill.pool.demote, flight.keys[: flight.prompt_blocks])
            self._reservations.release(flight.request_id)
            self._nudge()

        def ended() -> None:
            dispatch.__exit__(None, None, None)
            flight.record.end_s = self._loop.now_s()
            del self._flights[flight.request_id]
            self._pauses.ended(flight.keys, self._loop.now_s())
            fetch_s = len(flight.keys) * decode.node.block_bytes / prefill.node.into.bytes_per_s
            self._loop.after(self._pauses.wait_s(fetch_s, PREPARE_AFTER_S), self._prepare_next, flight)
            flight.ended()

        record = flight.record
        job = DecodeJob(flight.request_id, record.prompt_tokens, record.output_tokens, flight.keys, transfer, began, ended)
        decode.add(job, origin.sequence)

    def _prepare_next(self, flight: SimFlight) -> None:
        """Bring the context to where its next turn will run."""
        decision, full = flight.decision, len(flight.keys)
        if self._turn_ahead is None or decision is None or not full:
            return
        worker = self._turn_ahead.worker(decision.route, decision.chosen.worker, self._fleet.snapshot())
        if worker is None:
            return
        leading = self._directory.match(flight.keys).blocks
        runs = node_runs({n: leading.get(slab_source(n), 0) for n in self._nodes})
        fetchable = self._fetchable(worker, runs)
        if max(fetchable, leading.get(pool_source(worker), 0)) < full - 1:
            return  # what the slabs do not have (yet) would be computed
        job = PrefillJob(
            request_id=RequestId(f"{flight.request_id}+"),
            prompt_tokens=full * self._block_tokens + 1,
            keys=flight.keys,
            sources=tuple(self._nodes[run.node] for run in runs),
            may_fetch_blocks=fetchable,
            prefilled=lambda output, lease: None,
        )
        self._prefills[worker].prepare(job)

    def check(self) -> None:
        """Assert the books of everything that is real."""
        self._admission.check()
        self._directory.check()
        for worker in self._prefills.values():
            worker.scheduler.check()
        for decode in self._decodes.values():
            decode.pool.check()
        for node in self._nodes.values():
            node.slab.check()

    @property
    def idle(self) -> bool:
        """No request is on its way."""
        return not self._flights

    @property
    def roles(self) -> set[Role]:
        return {worker.role for worker in self._prefills.values()}

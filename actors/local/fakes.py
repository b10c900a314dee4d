"""A worker that keeps no tensors, for the router's tests and for trying out a router alone: it implements the client protocols.

Its answers depend on the tokens known, the seed and the place, as a model's do, so a lost, doubled or changed token shows. Invariant:
nothing of a request stays here after its end but the lease of a handover, until it is ended or lapses.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from cpd_ray import tokens as token_buffers
from cpd_ray.clock import Clock
from cpd_ray.errors import CPDError, DuplicateRequest, UnknownLease, WorkerDraining, WorkerGone
from cpd_ray.ids import BlockKey, LeaseId, NodeId, RequestId, WorkerId, pool_source
from cpd_ray.messages import (
    DecodeChunk,
    DecodeRequest,
    EventsAfter,
    EventsPage,
    Handover,
    Origin,
    PeerDescriptor,
    PoolCounts,
    PrefillRequest,
    PrefillResult,
    RegionRef,
    StepCost,
    WorkerReport,
    WorkerState,
)
from cpd_ray.types import CachedTokens, FinishReason, Role
from kv.events import EventLog
from kv.keys import block_keys

VOCABULARY = 997
FAKE_COST = StepCost(base_s=1e-3, per_token_s=1e-4, per_attention_s=0.0, per_sequence_s=1e-5)


def next_token(known: Sequence[int], seed: int) -> int:
    """What follows `known`, prompt or answer."""
    digest = hashlib.blake2b(token_buffers.pack(known), key=seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCABULARY


def answer(prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
    """The whole answer of an undisturbed request."""
    known = list(prompt)
    for _ in range(max_tokens):
        known.append(next_token(known, seed))
    return known[len(prompt) :]


@dataclass(frozen=True, slots=True)
class FakeShape:
    """What a fake worker is: `blocks` of `block_tokens` in its pool; `handover_grace_s` beyond a lease's own time."""

    worker: WorkerId
    role: Role
    node: NodeId
    epoch: int = 1
    blocks: int = 64
    block_tokens: int = 4
    handover_grace_s: float = 2.0


@dataclass(slots=True)
class FakeWorker:
    """`fault(point)` may return an error to raise at `prefill`, `prefilled` (the KV is leased, the reply is lost), `decode`, `chunk`
    or `report`; `rest(point)` is how many turns of the event loop pass there first. A `dead` worker answers nothing any more."""

    shape: FakeShape
    clock: Clock
    fault: Callable[[str], CPDError | None] = lambda point: None
    rest: Callable[[str], int] = lambda point: 0
    state: WorkerState = WorkerState.READY
    dead: bool = False
    prefills: int = 0
    active: dict[RequestId, int] = field(default_factory=dict)
    leases: dict[LeaseId, tuple[int, float]] = field(default_factory=dict)
    lost: set[LeaseId] = field(default_factory=set)
    log: EventLog = field(init=False)
    _seen: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = self.shape
        self.log = EventLog(pool_source(shape.worker), shape.node, shape.epoch)

    # -- WorkerClient ------------------------------------------------------------------------------------------------

    async def report(self) -> WorkerReport:
        await self._reach("report")
        shape, active = self.shape, sum(self.active.values())
        leased = sum(blocks for blocks, _ in self.leases.values())
        return WorkerReport(
            worker=shape.worker,
            role=shape.role,
            node=shape.node,
            epoch=shape.epoch,
            state=self.state,
            running=len(self.active),
            waiting=0,
            backlog_tokens=0,
            backlog_s=0.0,
            pool=PoolCounts(shape.blocks, max(0, shape.blocks - active - leased), 0, active, leased, 0),
            step_cost=FAKE_COST,
            block_size=shape.block_tokens,
            fetch_bytes_per_s={},
            seen=dict(self._seen),
        )

    async def events(self, after: EventsAfter) -> EventsPage:
        await self._reach("events")
        return self.log.page(after.epoch, after.sequence)

    async def describe(self) -> PeerDescriptor:
        await self._reach("describe")
        return PeerDescriptor(self.shape.worker, "fake", b"", b"", ())

    async def connect(self, peer: PeerDescriptor) -> None:
        await self._reach("connect")

    async def clear_pool(self) -> int:
        keys = list(self.log.keys())
        for key in keys:
            self.log.removed(key)
        return len(keys)

    # -- PrefillClient, DecodeClient ---------------------------------------------------------------------------------

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        with self._accept(request.request_id, request.origin, request.tokens, 1):
            await self._reach("prefill")
            known = list(token_buffers.unpack(request.tokens))
            keys = block_keys(BlockKey(request.root), request.tokens, self.shape.block_tokens)
            held = self.log.keys()
            cached = next((i for i, key in enumerate(keys) if key not in held), len(keys)) * self.shape.block_tokens
            self.prefills += 1
            for key in keys:
                self.log.stored(key)
            seed = request.sampling.seed or 0
            token = None if request.commit_only else next_token(known, seed)
            more = token is not None and len(known) - request.prompt_tokens + 1 < request.sampling.max_tokens
            handover = self._lease(request, len(known)) if more else None
            if handover is not None:
                self.lost.add(handover.lease_id)
            await self._reach("prefilled")
            if handover is not None:
                self.lost.discard(handover.lease_id)
            finish = None if more or request.commit_only else FinishReason.LENGTH
            return PrefillResult(
                request.request_id, token, None, finish, CachedTokens(pool=min(cached, len(known) - 1)), {}, handover, len(keys)
            )

    async def end_handover(self, lease: LeaseId) -> None:
        if self.dead:
            raise WorkerGone(f"{self.shape.worker} is dead")
        if self.leases.pop(lease, None) is None:
            raise UnknownLease(f"no lease {lease}")

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        known = list(token_buffers.unpack(request.tokens))
        index = len(known) - request.prompt_tokens
        with self._accept(request.request_id, request.origin, request.tokens, request.sampling.max_tokens - index):
            await self._reach("decode")
            while index < request.sampling.max_tokens:
                await self._reach("chunk")
                known.append(next_token(known, request.sampling.seed or 0))
                last = index + 1 == request.sampling.max_tokens
                yield DecodeChunk(
                    request.request_id,
                    index,
                    (known[-1],),
                    finish_reason=FinishReason.LENGTH if last else None,
                    cached=CachedTokens(),
                )
                index += 1

    # -- within ------------------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """End the leases that have lapsed."""
        for lease in [lease for lease, (_, until_s) in self.leases.items() if self.clock.now_s() >= until_s]:
            del self.leases[lease]
            self.lost.discard(lease)

    def check(self) -> None:
        """Assert that no more is held than there is, and what is held is for something."""
        assert all(blocks > 0 for blocks in self.active.values()), "a request that holds nothing"
        assert self.lost <= self.leases.keys(), "a lease was lost that is not held"

    async def _reach(self, point: str) -> None:
        """Let time pass, then fail if it is to be so."""
        for _ in range(self.rest(point)):
            await asyncio.sleep(0)
        if self.dead:
            raise WorkerGone(f"{self.shape.worker} is dead")
        error = self.fault(point)
        if error is not None:
            raise error

    @contextmanager
    def _accept(self, request_id: RequestId, origin: Origin, tokens: bytes, more: int) -> Iterator[None]:
        if self.dead:
            raise WorkerGone(f"{self.shape.worker} is dead")
        if self.state is not WorkerState.READY:
            raise WorkerDraining(f"{self.shape.worker} is {self.state}")
        if request_id in self.active:
            raise DuplicateRequest(f"request {request_id!r} is in flight here")
        if origin.router:
            self._seen[origin.router] = max(origin.sequence, self._seen.get(origin.router, 0))
        self.active[request_id] = -(-(token_buffers.count(tokens) + more) // self.shape.block_tokens)
        try:
            yield
        finally:
            del self.active[request_id]

    def _lease(self, request: PrefillRequest, known: int) -> Handover:
        shape = self.shape
        blocks = -(-known // shape.block_tokens)
        lease = LeaseId(f"{shape.worker}-{shape.epoch}-{self.prefills}")
        self.leases[lease] = (blocks, self.clock.now_s() + request.handover_ttl_s + shape.handover_grace_s)
        region = RegionRef(shape.worker, "pool", shape.epoch)
        return Handover(shape.worker, shape.node, lease, region, tuple(range(blocks)), known, request.handover_ttl_s)

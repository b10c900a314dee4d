"""What every worker is, whatever its role: an engine, its way to the lower tiers, and what it tells the others.

Owns the request's passage through one worker (accept, fetch sources, release) and the worker's reports. Does not decide where
anything goes. Invariant: a request accepted here leaves nothing behind, on every path, but a lease that ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import dataclass, replace

from actors.engine.interface import Engine, EngineOutput, EngineRequest, FetchPlan, FetchResult
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import DuplicateRequest, InvalidRequest, WorkerDraining
from cpd_ray.ids import KEY_BYTES, BlockId, BlockKey, NodeId, RequestId, WorkerId
from cpd_ray.messages import (
    EventsAfter,
    EventsPage,
    Handover,
    NodeRun,
    Origin,
    PeerDescriptor,
    WorkerReport,
    WorkerState,
)
from cpd_ray.types import Role
from kv.events import EventLog
from kv.keys import block_keys
from kv.tiers import TieredKv


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a worker is. `epoch` changes with every restart. `model`: digest of what it serves."""

    worker: WorkerId
    role: Role
    node: NodeId
    epoch: int
    model: str = ""


@dataclass(frozen=True, slots=True)
class Sources:
    """Where one request's KV may be found below the pool."""

    runs: tuple[NodeRun, ...] = ()
    handover: Handover | None = None


class TierPort:
    """The engine's `KvPort` over the tiers: knows, for each request under way, where the router believes its KV to be."""

    def __init__(self, tiers: TieredKv) -> None:
        self.tiers = tiers
        self._sources: dict[RequestId, Sources] = {}

    @contextlib.contextmanager
    def sources(self, request: RequestId, sources: Sources) -> Iterator[None]:
        """`fetch` of `request` looks there while this is open."""
        self._sources[request] = sources
        try:
            yield
        finally:
            del self._sources[request]

    async def fetch(self, plan: FetchPlan) -> FetchResult:
        where = self._sources.get(plan.request_id, Sources())
        landed = FetchResult()
        if where.handover is not None:
            landed = await self._fetch_handover(where.handover, plan)
        done = len(landed.landed)
        if done < len(plan.blocks) and not landed.poisoned:
            rest = await self.tiers.fetch(plan.keys[done:], plan.blocks[done:], where.runs)
            landed = replace(landed, landed=landed.landed + tuple(rest.landed), poisoned=tuple(rest.poisoned))
        return landed

    async def _fetch_handover(self, handover: Handover, plan: FetchPlan) -> FetchResult:
        theirs = handover.blocks[plan.first : plan.first + len(plan.blocks)]
        into = list(plan.blocks[: len(theirs)])
        whole = plan.first + len(plan.blocks)
        tail = plan.tail_block if len(handover.blocks) > whole else None
        slots = list(theirs)
        if tail is not None:
            slots.append(handover.blocks[whole])
            into.append(tail)
        result = await self.tiers.fetch_handover(handover, slots, into)
        if len(result.landed) == len(slots):
            return FetchResult(landed=tuple(result.landed[: len(theirs)]), tail=tail is not None)
        return FetchResult(poisoned=tuple(result.poisoned))

    def committed(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        self.tiers.store(parent, keys, blocks)


class Worker:
    """Role-free part of a worker; `actors.prefill` and `actors.decode` add what a role does."""

    def __init__(self, identity: Identity, engine: Engine, port: TierPort, events: EventLog) -> None:
        self.identity = identity
        self.engine = engine
        self.tiers = port.tiers
        self.descriptor = port.tiers.transport.describe()
        self._port = port
        self._events = events
        self._state = WorkerState.STARTING
        self._seen: dict[str, int] = {}
        self._active: set[RequestId] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def healthy(self) -> bool:
        """Whether the engine answers requests."""
        return self.engine.healthy

    async def start(self) -> None:
        """Take requests from now on."""
        await self.engine.start()
        self._state = WorkerState.READY

    async def drain(self) -> None:
        """Take nothing new; return when what runs has ended and all that was computed is written down."""
        self._state = WorkerState.DRAINING
        await self._idle.wait()
        await self.tiers.drain()

    async def stop(self) -> None:
        """End now: what runs is aborted."""
        self._state = WorkerState.DRAINING
        await self.engine.stop()
        await self.tiers.close()
        await asyncio.to_thread(self.tiers.transport.close)

    # -- what it tells the others ------------------------------------------------------------------------------------

    def report(self) -> WorkerReport:
        """The load and the state now."""
        load = self.engine.load()
        return WorkerReport(
            worker=self.identity.worker,
            role=self.identity.role,
            node=self.identity.node,
            epoch=self.identity.epoch,
            state=self._state,
            running=load.running,
            waiting=load.waiting,
            backlog_tokens=load.backlog_tokens,
            backlog_s=load.backlog_s,
            pool=self.engine.pool.counts(),
            step_cost=load.step_cost,
            block_size=self.engine.block_size,
            fetch_bytes_per_s=self.tiers.bytes_per_s(),
            queue_s=load.queue_s,
            queue_age_s=load.queue_age_s,
            seen=dict(self._seen),
            unwritten_blocks=self.tiers.unwritten_blocks,
            model=self.identity.model,
        )

    def events(self, after: EventsAfter) -> EventsPage:
        """What the pool gained and lost since."""
        return self._events.page(after.epoch, after.sequence)

    def describe(self) -> PeerDescriptor:
        """What a reader of this worker's pool connects with."""
        return self.descriptor

    async def connect(self, peer: PeerDescriptor) -> None:
        """Learn a peer before its first use: the first transfer to one is slow."""
        await asyncio.to_thread(self.tiers.transport.connect, peer)

    def clear_pool(self) -> int:
        """Forget what is cached and not in use; returns how many blocks."""
        return self.engine.pool.clear()

    def tick(self) -> None:
        """Periodic: end lapsed leases, free quarantined blocks whose transfers have ended."""
        self.engine.pool.expire()
        self.engine.pool.sweep()
        self.tiers.tick()

    # -- a request's passage -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accept(self, request_id: RequestId, origin: Origin) -> Iterator[None]:
        """Count a request in and out; raises WorkerDraining, DuplicateRequest."""
        if self._state is not WorkerState.READY:
            raise WorkerDraining(f"worker {self.identity.worker} is {self._state}")
        if request_id in self._active:
            raise DuplicateRequest(f"request {request_id!r} is in flight here", param="request_id")
        if origin.router:
            self._seen[origin.router] = max(origin.sequence, self._seen.get(origin.router, 0))
        self._active.add(request_id)
        self._idle.clear()
        try:
            yield
        finally:
            self._active.discard(request_id)
            if not self._active:
                self._idle.set()

    async def run(self, request: EngineRequest, sources: Sources) -> AsyncGenerator[EngineOutput, None]:
        """The engine's outputs; raises the request's own error. Closing aborts the request."""
        if sources.handover is not None and sources.handover.peer is not None:
            self.tiers.meet(sources.handover.peer)
        with self._port.sources(request.request_id, sources):
            stream = self.engine.generate(request)
            async with contextlib.aclosing(stream):  # type: ignore[type-var]
                async for output in stream:
                    if output.error is not None:
                        raise output.error
                    yield output

    def check_tokens(self, tokens: bytes) -> memoryview:
        """The ids; raises InvalidRequest for one outside the model's vocabulary."""
        ids = token_buffers.unpack(tokens)
        if ids and max(ids) >= self.engine.vocab_size:
            raise InvalidRequest(f"token id {max(ids)} is outside the vocabulary of {self.engine.vocab_size}", param="prompt")
        return ids

    def keys(self, root: bytes, tokens: bytes) -> tuple[BlockKey, ...]:
        """Keys of the full blocks of `tokens`; raises InvalidRequest for a root that is no key."""
        if len(root) != KEY_BYTES:
            raise InvalidRequest(f"a root key has {KEY_BYTES} bytes, not {len(root)}", param="root")
        return tuple(block_keys(BlockKey(root), tokens, self.engine.block_size))

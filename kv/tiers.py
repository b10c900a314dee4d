"""A worker's way to what is cached below its pool: its own node's slab, other nodes' slabs, another worker's pool.

Owns the order of asking, deadlines, checks and the measured rates; not the pool, nor any slab. A fault below is a miss, never an error.
Invariant: a destination block is reported as landed only when its bytes are its key's; it is given back to the pool's quarantine, not to
its caller, while a transfer may still write to it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from cpd_ray.clock import Clock
from cpd_ray.errors import ChecksumMismatch, KVError, LeaseLapsed
from cpd_ray.ids import BlockId, BlockKey, NodeId, join_keys
from cpd_ray.messages import Handover, LeaseBlocks, LeaseGrant, NodeRun, PeerDescriptor
from cpd_ray.types import Tier
from kv.copying import checksums, copy_slots
from kv.node import KvNode
from kv.patience import Patience
from kv.rates import Rates
from kv.remote import RemoteSlabs, end_lease
from kv.sides import PoolSide, SlabSide
from kv.transport.base import StillMoving, Transport
from kv.waiting import heed, outlast
from kv.write_down import WriteCounters, WriteDown

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TierSettings:
    """`timeout_s`: for a transfer; `answer_s`: for a node's answer. `checksums`: written with every block and verified with every read.
    `most_sources`: other nodes asked for one fetch. `queue_share`: how much of the pool may wait to be written down. Priors: rates until
    something was measured."""

    timeout_s: float = 10.0
    answer_s: float = 2.0
    checksums: bool = False
    most_sources: int = 2
    queue_share: float = 0.5
    prior_node_bytes_per_s: float = 4e9
    prior_cluster_bytes_per_s: float = 1e9


@dataclass(slots=True)
class TierCounters:
    """Since the start: blocks that landed, by tier; and what made a fetch come back with less."""

    blocks: dict[str, int] = field(default_factory=lambda: {Tier.NODE: 0, Tier.CLUSTER: 0})
    lapsed: int = 0
    poisoned_blocks: int = 0
    checksum_mismatches: int = 0
    failures: int = 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """`landed[i]`: the tier that the i-th block came from, for the leading run that is usable. `poisoned`: blocks that the pool now keeps
    in quarantine: their references are gone, and the caller needs others in their place."""

    landed: tuple[str, ...] = ()
    poisoned: tuple[BlockId, ...] = ()


class TieredKv:
    """Event-loop thread only. `own` is None while the node's slab is not mapped; `others` may change under our feet."""

    def __init__(
        self,
        worker: str,
        pool: PoolSide,
        own: SlabSide | None,
        others: Mapping[NodeId, KvNode],
        transport: Transport,
        *,
        clock: Clock,
        settings: TierSettings | None = None,
    ) -> None:
        self._settings = settings = settings or TierSettings()
        self.transport = transport
        self.pool_region = pool.region
        self.counters = TierCounters()
        self._worker = worker
        self._pool = pool
        self._own = own
        self._clock = clock
        self._patience = Patience(clock, answer_s=settings.answer_s)
        self._remote = RemoteSlabs(worker, others, transport, self._patience, clock)
        self._rates = Rates({Tier.NODE: settings.prior_node_bytes_per_s, Tier.CLUSTER: settings.prior_cluster_bytes_per_s})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-fetch")
        most_waiting = max(1, int(settings.queue_share * pool.pool.total_blocks))
        self._writer = WriteDown(worker, pool, self._patience, most_waiting=most_waiting, checksums=settings.checksums)
        self._meetings: dict[str, tuple[PeerDescriptor, asyncio.Task[None]]] = {}

    # -- reading -----------------------------------------------------------------------------------------------------

    async def fetch(self, keys: Sequence[BlockKey], blocks: Sequence[BlockId], sources: Sequence[NodeRun]) -> Fetched:
        """Bring a run of `keys` into `blocks`, which the caller references: from the own slab as far as it goes, then from `sources`, the one
        that promises most first. Never raises for what is missing or broken below."""
        assert len(keys) == len(blocks), "a key without a block"
        landed: list[str] = [Tier.NODE] * await self._from_own(keys, blocks)
        own = self._own.node.node if self._own is not None else None
        names = [
            run.node for run in sorted(sources, key=lambda run: -run.blocks) if run.node in self._remote.nodes and run.node != own
        ]
        for name in names[: self._settings.most_sources]:
            at = len(landed)
            if at == len(keys):
                break
            count, poisoned = await self._from_node(name, keys[at:], blocks[at:], keys[at - 1] if at else None)
            landed += [Tier.CLUSTER] * count
            if poisoned:
                return Fetched(tuple(landed), poisoned)
        return Fetched(tuple(landed))

    async def fetch_handover(
        self, handover: Handover, slots: Sequence[int], blocks: Sequence[BlockId], *, received_s: float | None = None
    ) -> Fetched:
        """Bring `slots` of the handing worker's pool into `blocks`, all or none; a partly filled tail block is a block like another.
        `received_s`: this process's clock when the handover came (now, when None)."""
        deadline_s = (self._clock.now_s() if received_s is None else received_s) + handover.ttl_s
        begun_s = self._clock.now_s()
        try:
            if handover.peer is not None:
                await self._met(handover.peer)
            left_s = min(self._settings.timeout_s, deadline_s - self._clock.now_s())
            if left_s <= 0:
                raise LeaseLapsed("the handover has lapsed")
            await self.transport.read(handover.region, slots, self._pool.region, blocks, timeout_s=left_s)
            if self._clock.now_s() >= deadline_s:
                raise LeaseLapsed("the handover lapsed while it was read")
        except StillMoving as moving:
            return Fetched((), self._quarantine(blocks, moving))
        except KVError as error:
            self._count(error)
            self._meetings.pop(handover.region.peer, None)
            return Fetched()
        self._landed(Tier.CLUSTER, len(blocks), begun_s)
        return Fetched((Tier.CLUSTER,) * len(blocks))

    async def probe(self, keys: Sequence[BlockKey], sources: Sequence[NodeRun]) -> int:
        """How many leading keys some slab holds now: a question, not a promise."""
        joined = join_keys(keys)
        asks = [self._match_own(joined), *(self._remote.match(run.node, joined) for run in sources[: self._settings.most_sources])]
        answers = await asyncio.gather(*asks, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, KVError):
                raise answer
        return max(answer for answer in (*answers, 0) if isinstance(answer, int))

    def meet(self, peer: PeerDescriptor) -> None:
        """Begin to connect to another worker's pool, so that its handover need not wait for that."""
        known = self._meetings.get(peer.peer)
        if known is None or known[0] != peer or (known[1].done() and (known[1].cancelled() or known[1].exception())):
            task = asyncio.get_running_loop().create_task(asyncio.to_thread(self.transport.connect, peer))
            task.add_done_callback(heed)
            self._meetings[peer.peer] = (peer, task)

    # -- writing -----------------------------------------------------------------------------------------------------

    def store(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        """Write these blocks (a run in chain order) down to the own slab, beside whatever goes on. Holds references of its own until then;
        takes nothing when too much is waiting already, or there is no slab."""
        if self._own is not None:
            self._writer.put(self._own, parent, keys, blocks)

    def tick(self) -> None:
        """Periodic: see to what a node that was out of reach has not heard."""
        self._writer.tick()

    async def written_down(self) -> None:
        """Return when all that was stored until now has been written, or can't be."""
        await self._writer.settled()

    async def drain(self) -> None:
        """Return when all that was to be written has been, or can't be, and every lease has been given back."""
        await self._writer.drain()
        await self._patience.drain()

    def remap(self, own: SlabSide | None) -> None:
        """The node's slab is mapped anew (or not at all), for instance after its owner restarted."""
        self._own = own

    async def close(self) -> None:
        """Stop writing; return when nothing but the transport reads or writes the pool's memory for us any more."""
        await self._writer.close()
        await self._patience.drain()
        await asyncio.to_thread(self._thread.shutdown)

    def bytes_per_s(self) -> dict[str, float]:
        """Measured, by tier below the pool; a tier that can't be read has none."""
        rates = self._rates.bytes_per_s()
        return rates if self._own is not None else {Tier.CLUSTER: rates[Tier.CLUSTER]}

    @property
    def unwritten_blocks(self) -> int:
        """Stored, and not yet written down."""
        return self._writer.waiting_blocks

    @property
    def written(self) -> WriteCounters:
        return self._writer.counters

    # -- within ------------------------------------------------------------------------------------------------------

    async def _from_own(self, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> int:
        own = self._own
        if own is None or not keys:
            return 0
        node, begun_s = own.node, self._clock.now_s()
        request = LeaseBlocks(self._worker, join_keys(keys), remote=False)
        try:
            grant = await self._patience.ask(node.node, lambda: node.lease(request))
            if grant.lease_id is None:
                return 0
            count = await self._copy_leased(own, grant, keys, blocks[: len(grant.slots)], begun_s + grant.ttl_s)
        except KVError as error:
            self._count(error)
            return 0
        self._landed(Tier.NODE, count, begun_s)
        return count

    async def _copy_leased(
        self, own: SlabSide, grant: LeaseGrant, keys: Sequence[BlockKey], blocks: Sequence[BlockId], deadline_s: float
    ) -> int:
        wrong: Sequence[BlockKey] = ()
        try:
            if grant.epoch != own.epoch:
                raise LeaseLapsed("the node's slab is not the one that is mapped here")
            await self._in_thread(lambda: copy_slots(own.memory, grant.slots, self._pool.memory, blocks))
            if self._clock.now_s() >= deadline_s:
                raise LeaseLapsed(f"{len(blocks)} blocks were copied after their lease")
            good = await self._verified(grant.checksums, blocks)
            wrong = keys[good : good + 1] if good < len(blocks) else ()
        finally:
            self._patience.tell(own.node.node, lambda: end_lease(own.node, grant, wrong))
        return good

    async def _from_node(
        self, name: NodeId, keys: Sequence[BlockKey], blocks: Sequence[BlockId], parent: BlockKey | None
    ) -> tuple[int, tuple[BlockId, ...]]:
        """(leading blocks that landed, blocks in quarantine)."""
        begun_s = self._clock.now_s()
        try:
            lease = await self._remote.lease(name, keys)
            if lease is None:
                return 0, ()
            blocks = blocks[: lease.blocks]
            wrong: Sequence[BlockKey] = ()
            try:
                await self._remote.move(lease, self._pool.region, blocks, timeout_s=self._settings.timeout_s)
                count = await self._verified(lease.grant.checksums, blocks)
                wrong = keys[count : count + 1] if count < len(blocks) else ()
            except StillMoving as moving:
                return 0, self._quarantine(blocks, moving)
            finally:
                self._remote.release(lease, wrong)
        except KVError as error:
            self._count(error)
            return 0, ()
        self._landed(Tier.CLUSTER, count, begun_s)
        self._note_remote(name, keys[:count], parent)
        return count, ()

    def _note_remote(self, source: NodeId, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """Tell the own node, which may want a copy."""
        if keys and self._own is not None:
            node = self._own.node
            self._patience.tell(node.node, lambda: node.note_remote_reads(source, join_keys(keys), parent or b""))

    async def _verified(self, known: Sequence[int], blocks: Sequence[BlockId]) -> int:
        """How many leading blocks hold what was once written for their keys."""
        if not self._settings.checksums or len(known) != len(blocks):
            return len(blocks)
        found = await self._in_thread(lambda: checksums(self._pool.memory, blocks))
        good = next((i for i, (a, b) in enumerate(zip(found, known, strict=True)) if a != b), len(blocks))
        if good < len(blocks):
            self._count(ChecksumMismatch(f"block {good} of {len(blocks)} is not what was written"))
        return good

    async def _match_own(self, joined: bytes) -> int:
        if self._own is None:
            return 0
        node = self._own.node
        return await self._patience.ask(node.node, lambda: node.match(joined))

    async def _met(self, peer: PeerDescriptor) -> None:
        self.meet(peer)
        await asyncio.shield(self._meetings[peer.peer][1])

    async def _in_thread(self, do: Callable[[], T]) -> T:
        """Run on the fetch thread, to the end even when we are cancelled: the memory is in use until then."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, do)
        if await outlast(future):
            raise asyncio.CancelledError
        return future.result()

    def _quarantine(self, blocks: Sequence[BlockId], moving: StillMoving) -> tuple[BlockId, ...]:
        self.counters.poisoned_blocks += len(blocks)
        self._pool.pool.quarantine(blocks, moving.settled)
        return tuple(blocks)

    def _landed(self, tier: Tier, blocks: int, begun_s: float) -> None:
        nbytes = blocks * self._pool.memory.slot_bytes
        self.counters.blocks[tier] += blocks
        self._rates.observe(tier, nbytes, self._clock.now_s() - begun_s)

    def _count(self, error: KVError) -> None:
        if isinstance(error, LeaseLapsed):
            self.counters.lapsed += 1
        elif isinstance(error, ChecksumMismatch):
            self.counters.checksum_mismatches += 1
        else:
            self.counters.failures += 1

"""Writing a worker's blocks down to its node's slab, in the background: reserve, copy, commit.

Owns the queue and the references that keep queued blocks in the pool; not the pool, nor the slab. Invariant: every reference taken by
`put` is given back exactly once, when nothing reads the block any more, whatever happens to the node meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cpd_ray.errors import KVError, PeerGone
from cpd_ray.ids import BlockId, BlockKey, join_keys
from cpd_ray.messages import CommitBlocks, Reservation, ReserveBlocks
from kv.copying import checksums, copy_slots
from kv.patience import Patience
from kv.sides import PoolSide, SlabSide
from kv.waiting import outlast

BATCH_BLOCKS = 256
"""At most so many blocks a reservation: a batch is copied well within its time to live."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Blocks of one chain, in order; `parent` is the key before the first."""

    slab: SlabSide
    parent: BlockKey | None
    keys: tuple[BlockKey, ...]
    blocks: tuple[BlockId, ...]


@dataclass(slots=True)
class WriteCounters:
    """Blocks since the start: written; `held` by the slab already, or somebody else writing them, or no room; `dropped` because too
    many were waiting or the node failed."""

    written: int = 0
    held: int = 0
    dropped: int = 0


class WriteDown:
    """At most `most_waiting` blocks wait. Event-loop thread only."""

    def __init__(self, writer: str, pool: PoolSide, patience: Patience, *, most_waiting: int, checksums: bool) -> None:
        self.counters = WriteCounters()
        self.waiting_blocks = 0
        self._writer = writer
        self._pool = pool
        self._patience = patience
        self._most_waiting = most_waiting
        self._checksums = checksums
        self._runs: deque[_Run] = deque()
        self._task: asyncio.Task[None] | None = None
        self._owed: deque[tuple[SlabSide, CommitBlocks]] = deque()
        self._closed = False
        self._done_blocks = 0
        self._progress = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-write")

    def put(self, slab: SlabSide, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        """Queue a run; takes its own references, or drops what is too much."""
        assert len(keys) == len(blocks), "a key without a block"
        room = 0 if self._closed else self._most_waiting - self.waiting_blocks
        self.counters.dropped += max(0, len(keys) - room)
        keys, blocks = tuple(keys[:room]), tuple(blocks[:room])
        if not keys:
            return
        self._pool.pool.retain(blocks)
        self.waiting_blocks += len(blocks)
        for at in range(0, len(keys), BATCH_BLOCKS):
            above = keys[at - 1] if at else parent
            self._runs.append(_Run(slab, above, keys[at : at + BATCH_BLOCKS], blocks[at : at + BATCH_BLOCKS]))
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="write down")

    def tick(self) -> None:
        """Periodic: try again to acknowledge what the node has not heard of."""
        if self._owed and self._task is None and not self._closed:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="write down")

    async def settled(self) -> None:
        """Return when what waits now has been written, or can't be; what comes later may still wait."""
        until_blocks = self._done_blocks + self.waiting_blocks
        while self._done_blocks < until_blocks:
            await self._progress.wait()

    async def drain(self) -> None:
        """Return when nothing waits."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Drop what waits; return when the batch under way has ended."""
        self._closed = True
        await self.drain()
        await asyncio.to_thread(self._thread.shutdown)

    async def _work(self) -> None:
        try:
            await self._pay()
            while self._runs and not self._closed:
                run = self._next()
                try:
                    await self._write(run)
                except KVError:
                    self.counters.dropped += len(run.keys)
                finally:
                    self._done(run)
        finally:
            for run in self._runs:
                self.counters.dropped += len(run.keys)
                self._done(run)
            self._runs.clear()
            self._task = None

    def _next(self) -> _Run:
        """The first run, with those behind it that continue its chain."""
        run = self._runs.popleft()
        while self._runs and self._continues(run, self._runs[0]):
            more = self._runs.popleft()
            run = _Run(run.slab, run.parent, run.keys + more.keys, run.blocks + more.blocks)
        return run

    @staticmethod
    def _continues(run: _Run, more: _Run) -> bool:
        return more.parent == run.keys[-1] and more.slab is run.slab and len(run.keys) + len(more.keys) <= BATCH_BLOCKS

    def _done(self, run: _Run) -> None:
        self._pool.pool.release(run.blocks)
        self.waiting_blocks -= len(run.blocks)
        self._done_blocks += len(run.blocks)
        self._progress.set()
        self._progress = asyncio.Event()

    async def _write(self, run: _Run) -> None:
        node = run.slab.node
        request = ReserveBlocks(self._writer, join_keys(run.keys), run.parent or b"")
        reservation = await self._patience.ask(node.node, lambda: node.reserve(request))
        if len(reservation.slots) != len(run.keys):
            raise KVError(f"node {node.node} answered for {len(reservation.slots)} blocks, not {len(run.keys)}")
        granted = [i for i, slot in enumerate(reservation.slots) if slot is not None]
        self.counters.held += len(run.keys) - len(granted)
        if granted:
            await self._fill(run, reservation, granted)

    async def _fill(self, run: _Run, reservation: Reservation, granted: Sequence[int]) -> None:
        keys = [run.keys[i] for i in granted]
        blocks = [run.blocks[i] for i in granted]
        slots = [slot for slot in reservation.slots if slot is not None]

        def copy() -> tuple[int, ...]:
            copy_slots(self._pool.memory, blocks, run.slab.memory, slots)
            return checksums(self._pool.memory, blocks) if self._checksums else ()

        written: list[BlockKey] = []
        sums: tuple[int, ...] = ()
        cancelled = False
        if reservation.epoch == run.slab.epoch:
            copying = asyncio.get_running_loop().run_in_executor(self._thread, copy)
            cancelled = await outlast(copying)
            sums, written = copying.result(), keys
        await self._commit(run.slab, CommitBlocks(reservation.reservation_id, reservation.epoch, join_keys(written), sums))
        self.counters.written += len(written)
        self.counters.dropped += len(keys) - len(written)
        if cancelled:
            raise asyncio.CancelledError

    async def _commit(self, slab: SlabSide, commit: CommitBlocks) -> None:
        try:
            await self._patience.ask(slab.node.node, lambda: slab.node.commit(commit), insist=True)
        except PeerGone:
            self._owed.append((slab, commit))
            raise

    async def _pay(self) -> None:
        """Acknowledge what could not be: until we do, the node keeps its slots in quarantine. A late commit counts."""
        for _ in range(len(self._owed)):
            slab, commit = self._owed.popleft()
            with contextlib.suppress(KVError):  # told, or owed again, or not known any more
                await self._commit(slab, commit)

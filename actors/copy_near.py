"""Pulling copies of what this node's workers often read from other nodes into the own slab.

Owns the counts of such reads and the pulls; the rule is `placement.copies`. Invariant: a pulled block is committed only with the source's
bytes, read under a lease; the slots of a pull that may still move stay reserved or quarantined until it has ended.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cpd_ray.errors import KVError
from cpd_ray.ids import BlockKey, NodeId, ReservationId
from cpd_ray.messages import RegionRef
from kv.remote import RemoteLease, RemoteSlabs
from kv.slab import Slab
from kv.transport.base import StillMoving
from placement.copies import CopyRun, RemoteRead, copies_to_make

TRACKED_PER_SLOT = 4
"""Reads from afar are counted for this many keys a slot of the slab, the latest ones."""
PULL_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class CopySettings:
    """A block is copied at its `after_reads`-th read from afar; copies may take `share` of the slab's slots."""

    after_reads: int = 2
    share: float = 0.25
    timeout_s: float = 10.0


class CopyNear:
    """`node` pulls under its own name as writer and holder. One pull at a time, in the background."""

    def __init__(self, node: NodeId, slab: Slab, region: RegionRef, remote: RemoteSlabs, settings: CopySettings) -> None:
        self.copied_blocks = 0
        self._writer = f"node:{node}"
        self._slab = slab
        self._region = region
        self._remote = remote
        self._settings = settings
        self._reads: OrderedDict[BlockKey, int] = OrderedDict()
        self._copies: set[BlockKey] = set()
        self._queue: deque[CopyRun] = deque()
        self._queued: set[BlockKey] = set()
        self._moving: list[tuple[StillMoving, ReservationId]] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    def note(self, source: NodeId, keys: Sequence[BlockKey], parent: BlockKey | None) -> None:
        """A worker has read this run from `source`. Perhaps begins to pull."""
        if self._closed or source not in self._remote.nodes or not keys:
            return
        reads = [RemoteRead(key, above, source, self._count(key)) for above, key in pairwise((parent, *keys)) if key is not None]
        runs = copies_to_make(reads, after_reads=self._settings.after_reads, budget_blocks=self._budget(), here=self._is_here)
        for run in runs:
            self._queue.append(run)
            self._queued.update(run.keys)
        if self._queue and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work(), name="copy near")

    def tick(self) -> None:
        """Give back the slots of late pulls that have ended."""
        still = []
        for moving, reservation_id in self._moving:
            if moving.settled():
                self._slab.abandon(reservation_id, self._slab.epoch)
            else:
                still.append((moving, reservation_id))
        self._moving = still

    @property
    def copying(self) -> int:
        """Blocks that are being pulled or wait for it."""
        return len(self._queued)

    async def drain(self) -> None:
        """Return when no pull is under way or waits."""
        while self._task is not None:
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """Begin nothing more; return when the pull under way has ended."""
        self._closed = True
        await self.drain()

    def _count(self, key: BlockKey) -> int:
        count = self._reads.pop(key, 0) + 1
        self._reads[key] = count
        if len(self._reads) > TRACKED_PER_SLOT * self._slab.limits.slots:
            self._reads.popitem(last=False)
        return count

    def _budget(self) -> int:
        allowed = int(self._settings.share * self._slab.limits.slots)
        if len(self._copies) + len(self._queued) >= allowed:
            self._copies = {key for key in self._copies if self._slab.match([key])}
        return allowed - len(self._copies) - len(self._queued)

    def _is_here(self, key: BlockKey) -> bool:
        return key in self._queued or self._slab.match([key]) == 1

    async def _work(self) -> None:
        try:
            while self._queue and not self._closed:
                run = self._queue.popleft()
                try:
                    for at in range(0, len(run.keys), PULL_BLOCKS):
                        parent = run.keys[at - 1] if at else run.parent
                        if not await self._pull(run.source, parent, run.keys[at : at + PULL_BLOCKS]):
                            break
                finally:
                    self._queued.difference_update(run.keys)
        finally:
            self._task = None

    async def _pull(self, source: NodeId, parent: BlockKey | None, keys: Sequence[BlockKey]) -> bool:
        """Pull a run; False when it did not come, or not all of it."""
        try:
            lease = await self._remote.lease(source, keys)
            if lease is None:
                return False
            try:
                await self._fill(lease, parent, keys[: lease.blocks])
            finally:
                self._remote.release(lease)
        except KVError:
            return False
        return lease.blocks == len(keys)

    async def _fill(self, lease: RemoteLease, parent: BlockKey | None, keys: Sequence[BlockKey]) -> None:
        granted = self._slab.reserve(self._writer, keys, parent)
        places = [(i, slot) for i, slot in enumerate(granted.slots) if slot is not None]
        if not places:
            return
        written: list[BlockKey] = []
        sums: tuple[int, ...] = ()
        try:
            wanted = lease.part([i for i, _ in places])
            await self._remote.move(wanted, self._region, [slot for _, slot in places], timeout_s=self._settings.timeout_s)
            written, sums = [keys[i] for i, _ in places], wanted.grant.checksums
        except StillMoving as moving:
            self._moving.append((moving, granted.reservation_id))
            raise
        finally:
            if not self._moving or self._moving[-1][1] != granted.reservation_id:
                self._slab.commit(granted.reservation_id, self._slab.epoch, written, sums)
        self._copies.update(written)
        self.copied_blocks += len(written)
        for key in written:
            self._reads.pop(key, None)

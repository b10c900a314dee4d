"""What a source of KV (a pool, a slab) says of its changes, so that directories can follow it.

Owns numbering and how far back the log reaches; does not own what is stored, nor how pages travel. An epoch begins empty at
sequence 0; each closed batch has the next number. Invariant: applying a page's batches in order gives exactly `keys()`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import KeysView
from itertools import islice

from cpd_ray.ids import KEY_BYTES, BlockKey, NodeId, SourceId
from cpd_ray.messages import EventsPage, KvEvents

MAX_BATCH_KEYS = 8192
"""An open batch is closed by itself at this size, so that neither it nor a message grows without a reader."""
MIN_LOGGED_KEYS = 16_384
"""A source's log may always reach back this many keys; beyond that, only as far as deltas are shorter than a snapshot."""


def batch_keys(batch: KvEvents) -> int:
    """How many keys a batch carries."""
    return (len(batch.stored) + len(batch.removed)) // KEY_BYTES


class BatchLog:
    """The latest batches of one source in one epoch, contiguous in sequence, bounded in number and in keys."""

    def __init__(self, sequence: int, *, capacity_batches: int) -> None:
        assert capacity_batches > 0, "a log of no batches"
        self.sequence = sequence
        self.keys = 0
        self._capacity_batches = capacity_batches
        self._batches: deque[KvEvents] = deque()

    def append(self, batch: KvEvents, *, limit_keys: int) -> None:
        """Add the next batch, and drop the oldest beyond the capacity or `limit_keys`."""
        assert batch.sequence == self.sequence + 1, f"batch {batch.sequence} after {self.sequence}"
        self._batches.append(batch)
        self.sequence = batch.sequence
        self.keys += batch_keys(batch)
        while len(self._batches) > self._capacity_batches or self.keys > limit_keys:
            self.keys -= batch_keys(self._batches.popleft())

    def after(self, sequence: int) -> tuple[KvEvents, ...] | None:
        """The batches after `sequence`; None when the log does not reach back that far (or that is still to come)."""
        missing = self.sequence - sequence
        if not 0 <= missing <= len(self._batches):
            return None
        return tuple(reversed(list(islice(reversed(self._batches), missing))))

    def check(self) -> None:
        """Assert every invariant."""
        numbers = [b.sequence for b in self._batches]
        assert numbers == list(range(self.sequence - len(numbers) + 1, self.sequence + 1)), "a hole in the log"
        assert self.keys == sum(batch_keys(b) for b in self._batches), "logged keys miscounted"
        assert len(numbers) <= self._capacity_batches, "the log is too long"


class EventLog:
    """One source's changes. Single-threaded, like its pool."""

    def __init__(self, source: SourceId, node: NodeId, epoch: int, *, capacity_batches: int = 4096) -> None:
        self.source = source
        self.node = node
        self.epoch = epoch
        self._held: dict[BlockKey, None] = {}  # a dict, so that snapshots are in one order in every process
        self._open: dict[BlockKey, bool] = {}  # key -> stored (else removed), the later change winning
        self._log = BatchLog(0, capacity_batches=capacity_batches)

    @property
    def sequence(self) -> int:
        """The last closed batch's number."""
        return self._log.sequence

    @property
    def pending(self) -> bool:
        """There are changes in no closed batch yet."""
        return bool(self._open)

    def keys(self) -> KeysView[BlockKey]:
        """What the source holds now."""
        return self._held.keys()

    def stored(self, key: BlockKey) -> None:
        """The source now holds `key`; saying so twice changes nothing."""
        if key not in self._held:
            self._held[key] = None
            self._change(key, True)

    def removed(self, key: BlockKey) -> None:
        """The source no longer holds `key`; saying so twice changes nothing."""
        if key in self._held:
            del self._held[key]
            self._change(key, False)

    def flush(self) -> None:
        """Close the open batch, if anything changed."""
        if not self._open:
            return
        stored = b"".join(key for key, is_stored in self._open.items() if is_stored)
        removed = b"".join(key for key, is_stored in self._open.items() if not is_stored)
        self._open.clear()
        batch = KvEvents(self.source, self.node, self.epoch, self.sequence + 1, stored=stored, removed=removed)
        self._log.append(batch, limit_keys=max(len(self._held), MIN_LOGGED_KEYS))

    def page(self, epoch: int, sequence: int) -> EventsPage:
        """What came after `sequence` of `epoch`; a snapshot when that epoch is not this one or the log doesn't reach back; a
        heartbeat when nothing came."""
        self.flush()
        batches = self._log.after(sequence) if epoch == self.epoch else None
        if batches is None:
            return EventsPage((self.snapshot(),))
        return EventsPage(batches or (self.heartbeat(),))

    def snapshot(self) -> KvEvents:
        """All that is held, as one `cleared` batch that stands for every batch so far."""
        self.flush()
        return KvEvents(self.source, self.node, self.epoch, self.sequence, stored=b"".join(self._held), cleared=True)

    def heartbeat(self) -> KvEvents:
        """A batch of no change at the current number: "I live", and whoever lacks a batch learns of the gap."""
        self.flush()
        return KvEvents(self.source, self.node, self.epoch, self.sequence)

    def check(self) -> None:
        """Assert every invariant."""
        self._log.check()
        assert len(self._open) < MAX_BATCH_KEYS, "the open batch is too large"
        for key, is_stored in self._open.items():
            assert (key in self._held) == is_stored, "an open change that is not true"

    def _change(self, key: BlockKey, is_stored: bool) -> None:
        self._open[key] = is_stored
        if len(self._open) >= MAX_BATCH_KEYS:
            self.flush()

"""Which source (a worker's pool, a node's slab) holds which keys, as far as the sources have told.

Owns each source's epoch, place in its numbering and liveness (the keys are `kv.holders`'); asks nobody for anything. Soft
state: whatever is lost or late here costs a recompute, never a wrong answer. Invariant: what is known of a source is what
its batches 1..sequence of its latest epoch leave, in order, less what was dropped to stay under `max_keys`.

A directory keeps its sources' own numbering, so another one may follow it (`page`, `follow`) as it follows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from cpd_ray.clock import Clock
from cpd_ray.errors import BadMessage
from cpd_ray.ids import KEY_BYTES, BlockKey, NodeId, SourceId
from cpd_ray.messages import EventsAfter, EventsPage, KvEvents
from kv.events import BatchLog
from kv.holders import HolderTable

RELAYED_BATCHES = 128
RELAYED_KEYS = 1024
RELAYED_SHARE = 8
"""What is kept of a source's batches for followers: so many of the latest, of together so many keys, or an eighth of what it
holds if that is more. A follower that lags further gets a snapshot."""
MAX_FLOORS = 4096
"""Sources that are gone are remembered, so that what they said before is not believed again; the oldest of them are forgotten."""
UNKNOWN_EPOCH = -1
"""No source's epoch: who asks with it has nothing yet."""


class Applied(Enum):
    """What became of a batch. GAP: some came before it that are not here; ask the source for what came after the known sequence.
    STALE_EPOCH: its source has restarted since."""

    APPLIED = auto()
    DUPLICATE = auto()
    GAP = auto()
    STALE_EPOCH = auto()


@dataclass(frozen=True, slots=True)
class Match:
    """`blocks`: how many leading blocks each source holds; sources that lack the first are left out."""

    blocks: Mapping[SourceId, int]


@dataclass(frozen=True, slots=True)
class SourceState:
    """What is known of a source; `silent_s` since it was last heard."""

    source: SourceId
    node: NodeId
    epoch: int
    sequence: int
    keys: int
    silent_s: float


@dataclass(slots=True)
class _Source:
    node: NodeId
    epoch: int
    bit: int
    log: BatchLog
    heard_s: float


class Directory:
    """`timeout_s`: a source unheard for that long is forgotten by `expire`. `max_keys` bounds the memory (about 100 bytes a key)."""

    def __init__(self, *, clock: Clock, timeout_s: float = 30.0, max_keys: int = 2_000_000) -> None:
        assert timeout_s > 0, "every source would be silent at once"
        self._clock = clock
        self._timeout_s = timeout_s
        self._table = HolderTable(max_keys)
        self._sources: dict[SourceId, _Source] = {}
        self._by_bit: dict[int, SourceId] = {}
        self._floors: dict[SourceId, int] = {}  # of sources that are gone: the epoch in which only a snapshot brings them back

    def __len__(self) -> int:
        """Keys in memory (some perhaps of sources that are gone, and about to be cleaned out)."""
        return len(self._table)

    @property
    def dropped_keys(self) -> int:
        """How many keys were dropped to stay under `max_keys`; only grows."""
        return self._table.dropped_keys

    def match(self, keys: Sequence[BlockKey]) -> Match:
        """How many leading `keys` each source holds."""
        return Match({self._by_bit[bit]: count for bit, count in self._table.leading(keys).items()})

    # -- what sources say --------------------------------------------------------------------------------------------

    def apply(self, batch: KvEvents) -> Applied:
        """Take one batch in. Raises BadMessage, having changed nothing, for one that no source of ours sends."""
        _check_batch(batch)
        floor = self._floors.get(batch.source)
        known = self._sources.get(batch.source)
        if batch.epoch < (known.epoch if known else UNKNOWN_EPOCH if floor is None else floor):
            return Applied.STALE_EPOCH
        if known is None and batch.epoch == floor and not batch.cleared:
            return Applied.GAP
        if known is None or batch.epoch > known.epoch:
            known = self._begin(batch)
            if batch.sequence == 0:
                return Applied.APPLIED
        known.heard_s = self._clock.now_s()
        if batch.sequence <= known.log.sequence:
            return Applied.DUPLICATE
        if batch.cleared:
            self._reset(batch, known)
        elif batch.sequence > known.log.sequence + 1 or _is_heartbeat(batch):
            return Applied.GAP
        else:
            known.log.append(batch, limit_keys=max(self._table.count(known.bit) // RELAYED_SHARE, RELAYED_KEYS))
            self._table.remove(known.bit, batch.removed)
        self._table.add(known.bit, batch.stored)
        return Applied.APPLIED

    def forget(self, source: SourceId) -> None:
        """The source is gone: it holds nothing. Only a snapshot, or a later epoch, brings it back. No error when it is unknown."""
        known = self._sources.pop(source, None)
        if known is None:
            return
        self._retire(known)
        self._floors.pop(source, None)
        self._floors[source] = known.epoch
        if len(self._floors) > MAX_FLOORS:
            del self._floors[next(iter(self._floors))]

    def expire(self) -> list[SourceId]:
        """Forget the sources that have been silent too long; returns them."""
        now_s = self._clock.now_s()
        silent = [source for source, known in self._sources.items() if now_s - known.heard_s >= self._timeout_s]
        for source in silent:
            self.forget(source)
        return silent

    def sources(self) -> tuple[SourceState, ...]:
        """All that is known of the sources."""
        now_s = self._clock.now_s()
        return tuple(
            SourceState(source, s.node, s.epoch, s.log.sequence, self._table.count(s.bit), now_s - s.heard_s)
            for source, s in self._sources.items()
        )

    # -- one directory following another -----------------------------------------------------------------------------

    def positions(self) -> tuple[EventsAfter, ...]:
        """How far each source is known here: what a follower asks with."""
        return tuple(EventsAfter(source, known.epoch, known.log.sequence) for source, known in self._sources.items())

    def page(self, positions: Iterable[EventsAfter]) -> EventsPage:
        """All that a follower at `positions` lacks, every living source being named at least by a heartbeat."""
        have = {position.source: position for position in positions}
        batches: list[KvEvents] = []
        for source in self._sources:
            batches += self.after(have.get(source, EventsAfter(source, UNKNOWN_EPOCH, 0))).batches
        return EventsPage(tuple(batches))

    def follow(self, page: EventsPage) -> None:
        """Take in what another directory's `page` answered to `positions()`: sources that it does not name are gone."""
        for batch in page.batches:
            self.apply(batch)
        for source in self._sources.keys() - {batch.source for batch in page.batches}:
            self.forget(source)

    def after(self, wanted: EventsAfter) -> EventsPage:
        """What one source said after `wanted`, as it would answer itself; an empty page when it is unknown."""
        known = self._sources.get(wanted.source)
        if known is None:
            return EventsPage(())
        batches = known.log.after(wanted.sequence) if wanted.epoch == known.epoch else None
        if batches is None:
            return EventsPage((self.snapshot(wanted.source),))
        return EventsPage(batches or (KvEvents(wanted.source, known.node, known.epoch, known.log.sequence),))

    def snapshot(self, source: SourceId) -> KvEvents:
        """All that is known of one source, as one `cleared` batch; raises KeyError when it is unknown."""
        known = self._sources[source]
        stored = self._table.keys_of(known.bit)
        return KvEvents(source, known.node, known.epoch, known.log.sequence, stored=stored, cleared=True)

    def check(self) -> None:
        """Assert every invariant."""
        self._table.check()
        assert {known.bit: source for source, known in self._sources.items()} == self._by_bit, "sources and bits disagree"
        assert sorted(self._by_bit) == self._table.bits(), "a live bit that is no source's"
        assert not self._sources.keys() & self._floors.keys(), "a source is known and gone"
        assert len(self._floors) <= MAX_FLOORS, "too many sources remembered"
        for known in self._sources.values():
            known.log.check()

    # -- one source --------------------------------------------------------------------------------------------------

    def _begin(self, batch: KvEvents) -> _Source:
        """A source that is new, or has restarted: what it held before is gone."""
        if old := self._sources.pop(batch.source, None):
            self._retire(old)
        self._floors.pop(batch.source, None)
        bit = self._table.take()
        log = BatchLog(0, capacity_batches=RELAYED_BATCHES)
        known = self._sources[batch.source] = _Source(batch.node, batch.epoch, bit, log, self._clock.now_s())
        self._by_bit[bit] = batch.source
        return known

    def _reset(self, batch: KvEvents, known: _Source) -> None:
        """A snapshot: what was known of the source no longer counts."""
        self._retire(known)
        known.bit = self._table.take()
        self._by_bit[known.bit] = batch.source
        known.log = BatchLog(batch.sequence, capacity_batches=RELAYED_BATCHES)

    def _retire(self, known: _Source) -> None:
        del self._by_bit[known.bit]
        self._table.retire(known.bit)


def _is_heartbeat(batch: KvEvents) -> bool:
    return not (batch.stored or batch.removed or batch.cleared)


def _check_batch(batch: KvEvents) -> None:
    if len(batch.stored) % KEY_BYTES or len(batch.removed) % KEY_BYTES:
        raise BadMessage("an event batch with a part of a key")
    if batch.epoch < 0 or batch.sequence < 0 or not batch.source:
        raise BadMessage("an event batch without a source, epoch or sequence")
    if batch.sequence == 0 and (batch.stored or batch.removed):
        raise BadMessage("an event batch before the first")

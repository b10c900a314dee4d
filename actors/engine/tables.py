"""What sequences hold in the pool: how a block table is begun, grown, committed, and given up.

Owns every pool call that the scheduler makes, so that references balance in one file; orders nothing. Invariant: a sequence's table
references each of its blocks once; the settled ones are the pool's blocks of their keys, maybe shared, the rest are its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from enum import Enum, auto
from typing import Protocol

from actors.engine.interface import FetchPlan, FetchResult
from actors.engine.sequence import Sequence
from cpd_ray.ids import BlockId, BlockKey, RequestId
from cpd_ray.types import Tier
from kv.pool import BlockPool


class CommittedSink(Protocol):
    """Who is told of computed blocks (`KvPort.committed`); called before the engine lets go of them."""

    def __call__(self, parent: BlockKey | None, keys: Seq[BlockKey], blocks: Seq[BlockId]) -> None: ...


class Begun(Enum):
    """How an attempt to begin went. `JOINED`: someone computes the next block; `NO_ROOM`: too few blocks are available."""

    READY = auto()
    FETCHING = auto()
    JOINED = auto()
    NO_ROOM = auto()


class BlockTables:
    """The pool as the scheduler uses it."""

    def __init__(self, pool: BlockPool, block_size: int, sink: CommittedSink) -> None:
        self.pool = pool
        self.block_size = block_size
        self._sink = sink

    # -- before a sequence holds anything ----------------------------------------------------------------------------

    def usable(self, sequence: Sequence) -> int:
        """How many leading blocks could be taken from a cache: never the one with the last known token, which must be computed."""
        return (sequence.known - 1) // self.block_size

    def look(self, sequence: Sequence) -> None:
        """Estimate anew what the pool would spare the sequence, alone (`expected`) and with what is being computed (`joined`)."""
        sequence.name_blocks(self.block_size)
        limit = self.usable(sequence)
        sequence.expected = sequence.joined = self.pool.match(sequence.keys[:limit])
        while sequence.joined < limit and self.pool.computing(sequence.keys[sequence.joined]):
            sequence.joined += 1

    def leader(self, sequence: Sequence) -> RequestId | None:
        """Who computes the next block that a joined sequence waits for; None when it may go on. Follows the commits as they come."""
        keys, pool = sequence.keys, self.pool
        while sequence.expected < sequence.joined and pool.match((keys[sequence.expected],)):
            sequence.expected += 1
        return pool.computing(keys[sequence.expected]) if sequence.expected < sequence.joined else None

    def wants_fetch(self, sequence: Sequence) -> bool:
        """Whether a lower tier may have what the pool has not."""
        return self._wants_tail(sequence) or self.may_fetch(sequence) > sequence.expected

    def may_fetch(self, sequence: Sequence) -> int:
        """Leading blocks that a lower tier may deliver."""
        return self.usable(sequence) if self._wants_tail(sequence) else min(sequence.fetchable, self.usable(sequence))

    def missing(self, sequence: Sequence) -> int:
        """Blocks that a waiting sequence would take from the pool to begin."""
        return self._blocks(sequence.known) - sequence.expected

    def begin(self, sequence: Sequence, spare: int) -> tuple[Begun, int]:
        """Take the committed prefix and fresh blocks for all other known tokens, leaving `spare` ones, and announce what will be
        computed. With NO_ROOM, how many blocks must be available for it; nothing is held then, nor with JOINED."""
        self.look(sequence)
        matched = sequence.expected
        if sequence.joined > matched:
            return Begun.JOINED, 0
        before = self.pool.available()
        held = self.pool.acquire(sequence.keys[:matched])
        missing = self._blocks(sequence.known) - matched
        if self.pool.available() < missing + spare:
            revived = before - self.pool.available()
            self.pool.release(held)
            return Begun.NO_ROOM, missing + spare + revived
        sequence.blocks = held + self.pool.allocate(missing)
        sequence.computed = matched * self.block_size
        sequence.settled = matched
        sequence.cached.lose(sequence.computed)
        sequence.cached.spare(Tier.POOL, sequence.computed)
        self._announce(sequence, range(matched, sequence.known // self.block_size))
        sequence.fetch = self._plan_fetch(sequence)
        return (Begun.FETCHING if sequence.fetch else Begun.READY), 0

    def _plan_fetch(self, sequence: Sequence) -> FetchPlan | None:
        first, stop = sequence.settled, self.may_fetch(sequence)
        tail = sequence.blocks[self.usable(sequence)] if self._wants_tail(sequence) else None
        if stop <= first and tail is None:
            return None
        return FetchPlan(sequence.id, first, tuple(sequence.blocks[first:stop]), tuple(sequence.keys[first:stop]), tail)

    def _wants_tail(self, sequence: Sequence) -> bool:
        """A handed-over tail holds the tokens that were known when the request came, so it is of use until one more is known."""
        return sequence.request.fetch_tail and not sequence.generated and (sequence.known - 1) % self.block_size > 0

    def _announce(self, sequence: Sequence, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.pool.announce(sequence.id, sequence.blocks[block], sequence.keys[block])

    # -- while it holds blocks ---------------------------------------------------------------------------------------

    def grow(self, sequence: Sequence) -> bool:
        """Hold blocks for every known token; False when none is available."""
        missing = self._blocks(sequence.known) - len(sequence.blocks)
        if missing > 0:
            if self.pool.available() < missing:
                return False
            sequence.blocks += self.pool.allocate(missing)
        return True

    def commit(self, sequence: Sequence) -> None:
        """Commit the blocks that have become full, and tell the sink."""
        size, full = self.block_size, sequence.computed // self.block_size
        if sequence.settled >= full:
            return
        run = sequence.settled
        for block in range(sequence.settled, full):
            if not self._commit_one(sequence, block):
                self._tell(sequence, run, block)
                run = block + 1
        sequence.settled = full
        self._tell(sequence, run, full)
        assert sequence.settled * size <= sequence.computed

    def land(self, sequence: Sequence, result: FetchResult) -> bool:
        """Commit what a fetch has brought, count it by tier, and replace the blocks that a transfer may still write to; False when there
        are too few for that, and the sequence, whose quarantined blocks are gone from its table, must give up the rest."""
        plan, sequence.fetch = sequence.fetch, None
        assert plan is not None and len(result.landed) <= len(plan.blocks), f"a fetch that {sequence.id} did not ask for"
        poisoned = frozenset(result.poisoned)
        for block, tier in enumerate(result.landed, start=plan.first):
            if sequence.blocks[block] in poisoned:
                break
            self._commit_one(sequence, block)
            sequence.settled = block + 1
            sequence.computed = sequence.settled * self.block_size
            sequence.cached.spare(Tier(tier), sequence.computed)
        complete = sequence.settled == self.usable(sequence)
        if result.tail and complete and plan.tail_block is not None and plan.tail_block not in poisoned:
            sequence.computed = sequence.known - 1
            # the handover is another worker's pool: the tail came the way its neighbour did
            sequence.cached.spare(Tier(result.landed[-1]) if result.landed else Tier.CLUSTER, sequence.computed)
        return self._replace(sequence, poisoned)

    def _replace(self, sequence: Sequence, poisoned: frozenset[BlockId]) -> bool:
        places = [place for place, block in enumerate(sequence.blocks) if block in poisoned]
        assert len(places) == len(poisoned), f"{sequence.id} is told of poisoned blocks that it does not hold"
        if self.pool.available() < len(places):
            sequence.blocks = [block for block in sequence.blocks if block not in poisoned]
            return False
        for place, block in zip(places, self.pool.allocate(len(places)), strict=True):
            sequence.blocks[place] = block
        self._announce(sequence, (place for place in places if place < len(sequence.keys)))
        return True

    def drop(self, sequence: Sequence) -> None:
        """Give every block up; the committed ones stay in the pool's cache until they are evicted."""
        self.pool.release(self.hand_out(sequence))

    def hand_out(self, sequence: Sequence) -> tuple[BlockId, ...]:
        """The blocks, whose references are the caller's from now on."""
        blocks, sequence.blocks = tuple(sequence.blocks), []
        sequence.fetchable = max(sequence.fetchable, sequence.settled)
        sequence.computed = sequence.settled = 0
        sequence.fetch = None
        return blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _commit_one(self, sequence: Sequence, place: int) -> bool:
        """False when the pool had the key by now: then that block takes the place of the sequence's own, which would be a second copy and
        would leave the first one's chain in parts, of which the pool could evict none."""
        key, mine = sequence.key(place, self.block_size), sequence.blocks[place]
        if self.pool.commit(mine, key, sequence.keys[place - 1] if place else None):
            return True
        sequence.blocks[place] = self.pool.acquire((key,))[0]
        self.pool.release((mine,))
        return False

    def _tell(self, sequence: Sequence, start: int, stop: int) -> None:
        if stop > start:
            self._sink(sequence.keys[start - 1] if start else None, sequence.keys[start:stop], sequence.blocks[start:stop])

"""One worker's paged KV pool: which block is free, being computed, committed under a key, leased to a peer or quarantined.

Owns states, references and keys; `kv.prefix_order` keeps the eviction order, `kv.single_flight` who computes what,
`kv.pool_leases` who reads what. Owns no bytes, and knows no more of a request than its id. Event-loop thread only.
Invariant: a block is handed out anew only when nobody references it and no transfer may still write to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType

from cpd_ray.clock import Clock
from cpd_ray.errors import PoolExhausted
from cpd_ray.ids import BlockId, BlockKey, LeaseId, RequestId
from cpd_ray.messages import PoolCounts
from kv.events import EventLog
from kv.pool_leases import PoolLease, PoolLeases
from kv.prefix_order import PrefixOrder
from kv.single_flight import SingleFlight


class BlockState(IntEnum):
    """COMPUTING: its bytes are no key's (not yet, or never: a private block). COMMITTED: they are, for good. QUARANTINED: a
    transfer may still write there. A lease is a reference, not a state: computing and committed blocks may be leased."""

    FREE = 0
    COMPUTING = 1
    COMMITTED = 2
    QUARANTINED = 3


MOVES: Mapping[BlockState, frozenset[BlockState]] = MappingProxyType(
    {
        BlockState.FREE: frozenset({BlockState.COMPUTING}),
        BlockState.COMPUTING: frozenset({BlockState.COMMITTED, BlockState.QUARANTINED, BlockState.FREE}),
        BlockState.COMMITTED: frozenset({BlockState.FREE}),
        BlockState.QUARANTINED: frozenset({BlockState.FREE}),
    }
)


@dataclass(frozen=True, slots=True)
class Evictable:
    """A committed block that nobody uses. `parent` is the key before its own, None at the root."""

    block: BlockId
    key: BlockKey
    parent: BlockKey | None


@dataclass(frozen=True, slots=True)
class _Quarantine:
    blocks: tuple[BlockId, ...]
    settled: Callable[[], bool]


class BlockPool:
    """Blocks 0 <= id < total_blocks. `evictions` and `leases_lapsed` only grow. Wrong calls (releasing what is not held, moving
    a block against `MOVES`) are bugs of ours and assert."""

    def __init__(self, total_blocks: int, *, clock: Clock, events: EventLog | None = None) -> None:
        if total_blocks <= 0:
            raise ValueError(f"a pool needs at least one block, not {total_blocks}")
        self.total_blocks = total_blocks
        self.evictions = 0
        self.leases_lapsed = 0
        self._clock = clock
        self._events = events
        self._state = [BlockState.FREE] * total_blocks
        self._refs = [0] * total_blocks
        self._key: list[BlockKey | None] = [None] * total_blocks
        self._free = [BlockId(i) for i in reversed(range(total_blocks))]  # a stack that hands neighbours out in ascending order
        self._block_of: dict[BlockKey, BlockId] = {}
        self._order = PrefixOrder()
        self._flight = SingleFlight()
        self._leases = PoolLeases(events.epoch if events else 0)
        self._quarantines: list[_Quarantine] = []

    # -- what is cached ----------------------------------------------------------------------------------------------

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading `keys` are committed here."""
        block_of = self._block_of
        for count, key in enumerate(keys):
            if key not in block_of:
                return count
        return len(keys)

    def computing(self, key: BlockKey) -> RequestId | None:
        """Who announced that a block will hold `key` and has neither committed nor left."""
        return self._flight.owner_of(key)

    def acquire(self, keys: Sequence[BlockKey]) -> list[BlockId]:
        """Reference the committed block of each key; raises KeyError, having taken nothing, when one isn't committed."""
        block_of = self._block_of
        blocks = [block_of[key] for key in keys]
        for block in blocks:
            self._reference(block)
        return blocks

    def key_of(self, block: BlockId) -> BlockKey | None:
        """The key that `block` is committed under."""
        return self._key[block]

    def state_of(self, block: BlockId) -> BlockState:
        """Where in its life `block` is."""
        return self._state[block]

    # -- taking and giving back --------------------------------------------------------------------------------------

    def available(self) -> int:
        """How many blocks `allocate` could give now: the free and the evictable ones."""
        return len(self._free) + len(self._order)

    def allocate(self, count: int) -> list[BlockId]:
        """`count` blocks to compute into, referenced once; evicts as needed. Raises PoolExhausted, having changed nothing."""
        assert count >= 0, "a negative count"
        if count > self.available():
            raise PoolExhausted(f"{count} KV blocks asked for, {self.available()} of {self.total_blocks} available")
        for _ in range(count - len(self._free)):
            self._drop_first()
            self.evictions += 1
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._move(block, BlockState.COMPUTING)
            self._refs[block] = 1
        return blocks

    def retain(self, blocks: Sequence[BlockId]) -> None:
        """One more reference to each."""
        for block in blocks:
            self._reference(block)

    def release(self, blocks: Sequence[BlockId]) -> None:
        """One reference less to each of `blocks`, in chain order. An announcement of theirs is withdrawn: its owner leaves, so
        whoever waits for the key takes over."""
        for block in reversed(blocks):
            self._flight.withdraw(block)
            self._dereference(block)

    def clear(self) -> int:
        """Drop every committed block that is not in use; returns how many."""
        dropped = len(self._order)
        for _ in range(dropped):
            self._drop_first()
        return dropped

    def demote(self, keys: Sequence[BlockKey]) -> int:
        """Let the cached blocks of a chain be evicted before all others, tails first: whoever calls knows that they are not wanted here
        soon. What others use or continue stays in its place. Returns how many blocks that were."""
        return self._order.demote(keys[: self.match(keys)])

    def eviction_candidates(self, count: int) -> list[Evictable]:
        """The next `count` blocks to be evicted, the first to go first."""
        return [Evictable(self._block_of[key], key, self._order.parent_of(key)) for key in self._order.first(count)]

    # -- from computing to committed ---------------------------------------------------------------------------------

    def announce(self, owner: RequestId, block: BlockId, key: BlockKey) -> bool:
        """Say that `block` will hold `key`. False when the key is committed, or another block is announced for it: then `block`
        stays private."""
        self._assert_computing(block, key)
        return key not in self._block_of and self._flight.announce(owner, block, key)

    def commit(self, block: BlockId, key: BlockKey, parent: BlockKey | None) -> bool:
        """`block` holds `key`, which follows `parent` (None at the root). False when another block holds it: then `block` stays
        private. Either way nobody has to wait for the key any longer."""
        self._assert_computing(block, key)
        self._flight.settle(key)
        if key in self._block_of:
            return False
        self._move(block, BlockState.COMMITTED)
        self._key[block] = key
        self._block_of[key] = block
        self._order.add(key, parent)
        if self._events is not None:
            self._events.stored(key)
        return True

    # -- blocks that a peer reads, or that a transfer writes ---------------------------------------------------------

    def lease(self, blocks: Sequence[BlockId], *, holder: str, ttl_s: float, grace_s: float) -> LeaseId:
        """References of their own for `holder`, who may read `blocks` for `ttl_s`; they last `grace_s` longer, unless ended."""
        assert ttl_s > 0 and grace_s >= 0, "a lease of no time"
        self.retain(blocks)
        return self._leases.grant(PoolLease(holder, tuple(blocks), self._clock.now_s() + ttl_s + grace_s))

    def end_lease(self, lease: LeaseId) -> None:
        """Give the lease's references back; raises UnknownLease when it was never granted, has ended or has lapsed."""
        for block in reversed(self._leases.end(lease)):
            self._dereference(block)

    def expire(self) -> list[LeaseId]:
        """End the leases whose time and grace are over; returns them."""
        lapsed = self._leases.over(self._clock.now_s())
        for lease in lapsed:
            self.end_lease(lease)
        self.leases_lapsed += len(lapsed)
        return lapsed

    def quarantine(self, blocks: Sequence[BlockId], settled: Callable[[], bool]) -> None:
        """Take over the caller's reference to computing `blocks`, which a transfer may still write to until `settled()`."""
        for block in blocks:
            self._flight.withdraw(block)
            self._move(block, BlockState.QUARANTINED)
            self._dereference(block)
        if blocks:
            self._quarantines.append(_Quarantine(tuple(blocks), settled))

    def sweep(self) -> int:
        """Free the quarantined blocks whose transfer has settled and that nobody references; returns how many."""
        freed = 0
        kept: list[_Quarantine] = []
        for entry in self._quarantines:
            left = entry.blocks
            if entry.settled():
                left = tuple(block for block in entry.blocks if self._refs[block])
                for block in entry.blocks:
                    if not self._refs[block]:
                        self._free_block(block)
                        freed += 1
            if left:
                kept.append(_Quarantine(left, entry.settled))
        self._quarantines = kept
        return freed

    # -- books -------------------------------------------------------------------------------------------------------

    def counts(self) -> PoolCounts:
        """Blocks by state; `cached` are exactly the evictable ones."""
        free, cached = len(self._free), len(self._order)
        quarantined = sum(len(entry.blocks) for entry in self._quarantines)
        leased = sum(1 for b, n in self._leases.on.items() if self._refs[b] == n and self._state[b] is not BlockState.QUARANTINED)
        active = self.total_blocks - free - cached - leased - quarantined
        return PoolCounts(self.total_blocks, free, cached, active, leased, quarantined)

    def check(self) -> None:
        """Assert every invariant."""
        for part in (self._order, self._flight, self._leases):
            part.check()
        self._check_states()
        self._check_references()
        if self._events is not None:
            self._events.check()
            assert self._events.keys() == self._block_of.keys(), "the directory is told of other keys than are here"

    def _check_states(self) -> None:
        by_state: dict[BlockState, set[BlockId]] = {state: set() for state in BlockState}
        for block, state in enumerate(self._state):
            by_state[state].add(BlockId(block))
        quarantined = [block for entry in self._quarantines for block in entry.blocks]
        assert len(self._free) == len(set(self._free)) and set(self._free) == by_state[BlockState.FREE], "the free list is wrong"
        assert len(quarantined) == len(set(quarantined)), "quarantined twice"
        assert set(quarantined) == by_state[BlockState.QUARANTINED], "the quarantine list is wrong"
        keyed = {BlockId(block): key for block, key in enumerate(self._key) if key is not None}
        assert set(keyed) == by_state[BlockState.COMMITTED], "a key on a block that is not committed, or none on one that is"
        assert {key: block for block, key in keyed.items()} == self._block_of, "keys and blocks disagree"
        assert self._flight.blocks() <= by_state[BlockState.COMPUTING], "an announced block that nobody computes"
        assert not self._flight.keys() & self._block_of.keys(), "announced and committed"
        assert min(self.counts().active, self.counts().leased) >= 0, "the counts don't add up"

    def _check_references(self) -> None:
        for place, (state, refs) in enumerate(zip(self._state, self._refs, strict=True)):
            block = BlockId(place)
            assert refs >= self._leases.on.get(block, 0), f"block {block} is leased more often than referenced"
            assert refs == 0 or state is not BlockState.FREE, f"block {block} is free and referenced"
            assert refs > 0 or state is not BlockState.COMPUTING, f"block {block} is being computed by nobody"
        for key, block in self._block_of.items():
            assert self._order.is_held(key) == (self._refs[block] > 0), f"block {block}: its references and its hold disagree"

    # -- one block ---------------------------------------------------------------------------------------------------

    def _move(self, block: BlockId, to: BlockState) -> None:
        assert to in MOVES[self._state[block]], f"block {block} can't go from {self._state[block].name} to {to.name}"
        self._state[block] = to

    def _assert_computing(self, block: BlockId, key: BlockKey) -> None:
        assert self._state[block] is BlockState.COMPUTING, f"block {block} is {self._state[block].name}, not being computed"
        assert self._flight.may_hold(block, key), f"block {block} is announced under another key"

    def _reference(self, block: BlockId) -> None:
        assert self._state[block] in (BlockState.COMPUTING, BlockState.COMMITTED), f"block {block} can't be referenced"
        self._refs[block] += 1
        if self._refs[block] == 1 and (key := self._key[block]) is not None:
            self._order.hold(key)

    def _dereference(self, block: BlockId) -> None:
        assert self._refs[block] > 0, f"block {block} is released more often than taken"
        self._refs[block] -= 1
        if self._refs[block]:
            return
        if (key := self._key[block]) is not None:
            self._order.let_go(key)
        elif self._state[block] is BlockState.COMPUTING:
            self._flight.withdraw(block)
            self._free_block(block)

    def _drop_first(self) -> None:
        key = self._order.pop()
        block = self._block_of.pop(key)
        self._key[block] = None
        self._free_block(block)
        if self._events is not None:
            self._events.removed(key)

    def _free_block(self, block: BlockId) -> None:
        self._move(block, BlockState.FREE)
        self._free.append(block)

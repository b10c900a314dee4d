"""The bookkeeping of one node's slab: which slot holds which key, who may write or read it, and what goes when room is needed.

Owns slots, reservations, leases and pins; not the bytes, nor any transport. Each slot is free, reserved, committed or quarantined.
Invariant: a slot is given to a new key only when no writer can still write to it and no reader may still read it.

A writer that maps the slab can't be fenced: when its reservation's time is up without a commit, the slots stay quarantined until it
acknowledges (a late commit or abandon) or is known dead. A reader is trusted up to its lease's ttl, by its own clock, and the grace.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from cpd_ray.clock import Clock
from cpd_ray.errors import KVError, SlabFull, UnknownLease, UnknownReservation
from cpd_ray.ids import BlockKey, LeaseId, ReservationId, SlotId
from cpd_ray.messages import SlabCounts
from kv.events import EventLog
from kv.eviction.base import EvictionPolicy
from kv.slab_types import Granted, Leased, OpenLease, OpenReservation, Pin, SlabBlock, SlabLimits


class Slab:
    """Belongs to one thread. Calls are batched: a thousand keys cost about a millisecond."""

    def __init__(self, limits: SlabLimits, policy: EvictionPolicy, *, epoch: int, clock: Clock, events: EventLog) -> None:
        self.limits = limits
        self.epoch = epoch
        self.evictions = 0
        self.leases_lapsed = 0
        self._policy = policy
        self._clock = clock
        self._events = events
        self._free = [SlotId(i) for i in range(limits.slots - 1, -1, -1)]
        self._blocks: dict[BlockKey, SlabBlock] = {}  # reserved and committed
        self._reservations: dict[ReservationId, OpenReservation] = {}
        self._outstanding: dict[str, int] = {}  # slots a writer has reserved or quarantined
        self._leases: dict[LeaseId, OpenLease] = {}
        self._pins: dict[str, Pin] = {}
        self._due: list[tuple[float, ReservationId | LeaseId]] = []
        self._reserved = self._quarantined = self._pinned = self._issued = 0

    # -- writing -----------------------------------------------------------------------------------------------------

    def reserve(self, writer: str, keys: Sequence[BlockKey], parent: BlockKey | None = None) -> Granted:
        """Slots for those of `keys` (in chain order, `parent` before the first) that are not here; the leading ones when not all fit.
        Raises SlabFull when none does."""
        blocks = self._blocks
        wanted = [i for i, key in enumerate(keys) if key not in blocks]
        if len(set(keys)) < len(keys):
            first = {key: i for i, key in reversed(list(enumerate(keys)))}
            wanted = [i for i in wanted if first[keys[i]] == i]
        slots: list[SlotId | None] = [None] * len(keys)
        reservation_id = ReservationId(self._new_id("w"))
        if not wanted:
            return Granted(reservation_id, tuple(slots), self.limits.reservation_ttl_s)
        room = min(len(wanted), self._allowance(writer))
        if room > len(self._free):
            self._evict(room - len(self._free), protect={*keys, parent})
            room = min(room, len(self._free))
        if not room:
            raise SlabFull(f"no slot for any of {len(wanted)} blocks: all are reserved, leased, pinned or quarantined")
        taken = sorted(self._free[-room:])
        del self._free[-room:]
        given: dict[BlockKey, SlabBlock] = {}
        insert = self._policy.insert
        for i, slot in zip(wanted, taken, strict=False):
            key, above = keys[i], keys[i - 1] if i else parent
            given[key] = blocks[key] = SlabBlock(key, above, slot)
            slots[i] = slot
            insert(key, above)
        self._reservations[reservation_id] = OpenReservation(writer, given)
        self._outstanding[writer] = self._outstanding.get(writer, 0) + room
        self._reserved += room
        heapq.heappush(self._due, (self._clock.now_s() + self.limits.reservation_ttl_s, reservation_id))
        return Granted(reservation_id, tuple(slots), self.limits.reservation_ttl_s)

    def commit(self, reservation_id: ReservationId, epoch: int, written: Sequence[BlockKey], checksums: Sequence[int] = ()) -> int:
        """End a reservation: `written` are readable from now on, its other slots free. Late commits count, as their slots were kept;
        keys that somebody else brought meanwhile are dropped. Returns how many were added. Raises UnknownReservation, also when a
        key is not of this reservation (which stays open then)."""
        reservation = self._open_reservation(reservation_id, epoch)
        if not reservation.blocks.keys() >= set(written):
            raise UnknownReservation("a block was committed that this reservation has no slot for")
        if checksums and len(checksums) != len(written):
            raise UnknownReservation(f"{len(checksums)} checksums for {len(written)} blocks")
        self._close(reservation_id, reservation)
        added = 0
        for i, key in enumerate(written):
            block = reservation.blocks.pop(key, None)
            if block is None:
                continue  # named twice
            if reservation.quarantined:
                if key in self._blocks:
                    self._free.append(block.slot)
                    continue
                self._blocks[key] = block
                self._policy.insert(key, block.parent)
            block.committed = True
            block.holds -= 1
            block.checksum = checksums[i] if checksums else None
            self._events.stored(key)
            added += 1
        self._discard(reservation)
        return added

    def abandon(self, reservation_id: ReservationId, epoch: int) -> None:
        """End a reservation without a block. Raises UnknownReservation."""
        self.commit(reservation_id, epoch, ())

    def writer_gone(self, writer: str) -> int:
        """`writer` is confirmed dead: free all that it had reserved, quarantined slots included. Returns how many."""
        ended = [(i, r) for i, r in self._reservations.items() if r.writer == writer]
        freed = sum(len(r.blocks) for _, r in ended)
        for reservation_id, reservation in ended:
            self._close(reservation_id, reservation)
            self._discard(reservation)
        return freed

    # -- reading -----------------------------------------------------------------------------------------------------

    def silent_writers(self) -> set[str]:
        """Writers whose reservations ran out without a word: their slots are quarantined until they are known dead, or speak."""
        return {r.writer for r in self._reservations.values() if r.quarantined}

    def match(self, keys: Sequence[BlockKey]) -> int:
        """How many leading keys are committed."""
        for i, key in enumerate(keys):
            block = self._blocks.get(key)
            if block is None or not block.committed:
                return i
        return len(keys)

    def lease(self, holder: str, keys: Sequence[BlockKey], ttl_s: float | None = None) -> Leased:
        """Keep the leading committed run of `keys` in place for `ttl_s` (the slab's own when None) and the grace."""
        ttl_s = self.limits.lease_ttl_s if ttl_s is None else ttl_s
        found = self._leading_run(keys)
        if not found:
            return Leased(None, (), (), ttl_s)
        for block in found:
            block.holds += 1
        self._policy.hit(keys[: len(found)])
        lease_id = LeaseId(self._new_id("r"))
        self._leases[lease_id] = OpenLease(holder, found)
        heapq.heappush(self._due, (self._clock.now_s() + ttl_s + self.limits.lease_grace_s, lease_id))
        return Leased(lease_id, tuple([b.slot for b in found]), tuple([b.checksum for b in found]), ttl_s)

    def release(self, lease_id: LeaseId, epoch: int) -> None:
        """End a lease. Raises UnknownLease when it has ended, has lapsed, or is of another epoch."""
        lease = self._leases.pop(lease_id, None) if epoch == self.epoch else None
        if lease is None:
            raise UnknownLease(f"no lease {lease_id} of epoch {epoch} here")
        for block in lease.blocks:
            block.holds -= 1

    def holder_gone(self, holder: str) -> int:
        """`holder` is confirmed dead: end its leases. Returns how many."""
        ended = [i for i, lease in self._leases.items() if lease.holder == holder]
        for lease_id in ended:
            self.release(lease_id, self.epoch)
        return len(ended)

    # -- keeping and dropping ----------------------------------------------------------------------------------------

    def pin(self, pin_id: str, keys: Sequence[BlockKey], ttl_s: float) -> int:
        """Keep the leading committed run of `keys` from eviction for `ttl_s`, as far as the budget goes; replaces an earlier pin of that
        name. Returns how many blocks are kept."""
        if not math.isfinite(ttl_s):
            raise KVError("a pin's time to live must be finite")
        self.unpin(pin_id)
        if ttl_s <= 0:
            return 0
        kept = []
        for block in self._leading_run(keys):
            if not block.pins:
                if self._pinned >= self.limits.pin_slots:
                    break
                self._pinned += 1
            block.pins += 1
            block.holds += 1
            kept.append(block)
        if kept:
            self._pins[pin_id] = Pin(kept, self._clock.now_s() + ttl_s)
        return len(kept)

    def unpin(self, pin_id: str) -> None:
        """End a pin; nothing happens when there is none."""
        pin = self._pins.pop(pin_id, None)
        for block in pin.blocks if pin else ():
            block.pins -= 1
            block.holds -= 1
            self._pinned -= not block.pins

    def drop(self, keys: Sequence[BlockKey]) -> int:
        """Forget those of `keys` that are committed and that nobody leases or pins: their bytes were found wrong. Returns how many."""
        dropped = 0
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block.committed and not block.holds:
                del self._blocks[key]
                self._policy.remove(key)
                self._free.append(block.slot)
                self._events.removed(key)
                dropped += 1
        return dropped

    def clear(self) -> int:
        """End all pins and drop every block that is not leased or reserved and has no child that is. Returns how many."""
        for pin_id in list(self._pins):
            self.unpin(pin_id)
        return self._evict(len(self._blocks), protect=set())

    def expire(self) -> tuple[list[LeaseId], list[ReservationId]]:
        """End what is past its time by the clock: leases and pins are over, reservations quarantined. Returns the first and the last."""
        now_s = self._clock.now_s()
        leases: list[LeaseId] = []
        reservations: list[ReservationId] = []
        while self._due and self._due[0][0] <= now_s:
            _, due = heapq.heappop(self._due)
            if due in self._leases:
                self.release(LeaseId(due), self.epoch)
                leases.append(LeaseId(due))
            elif due in self._reservations:
                self._quarantine(self._reservations[ReservationId(due)])
                reservations.append(ReservationId(due))
        for pin_id in [i for i, pin in self._pins.items() if pin.until_s <= now_s]:
            self.unpin(pin_id)
        self.leases_lapsed += len(leases)
        return leases, reservations

    # -- looking -----------------------------------------------------------------------------------------------------

    def counts(self) -> SlabCounts:
        total = self.limits.slots
        return SlabCounts(
            total=total,
            free=len(self._free),
            reserved=self._reserved,
            committed=len(self._blocks) - self._reserved,
            quarantined=self._quarantined,
            pinned=self._pinned,
            leases=len(self._leases),
            bytes_total=total * self.limits.slot_bytes,
        )

    def check(self) -> None:
        """Assert that every slot is in exactly one state, every hold has its holder, and the policy knows the same blocks."""
        owned = [b.slot for b in self._blocks.values()]
        owned += [b.slot for r in self._reservations.values() if r.quarantined for b in r.blocks.values()]
        assert sorted(owned + self._free) == list(range(self.limits.slots)), "a slot is lost or in two states"
        holds: dict[BlockKey, int] = {}
        outstanding: dict[str, int] = {}
        for reservation in self._reservations.values():
            assert reservation.blocks, "an empty reservation is kept"
            outstanding[reservation.writer] = outstanding.get(reservation.writer, 0) + len(reservation.blocks)
            if not reservation.quarantined:
                assert all(self._blocks[k] is b and not b.committed for k, b in reservation.blocks.items())
                holds.update(dict.fromkeys(reservation.blocks, 1))
        assert outstanding == self._outstanding and max(outstanding.values(), default=0) <= self.limits.writer_slots
        held = [b for lease in self._leases.values() for b in lease.blocks] + [b for pin in self._pins.values() for b in pin.blocks]
        for block in held:
            assert self._blocks[block.key] is block and block.committed, "a leased or pinned block is not here"
            holds[block.key] = holds.get(block.key, 0) + 1
        assert all(b.holds == holds.get(k, 0) and b.key == k for k, b in self._blocks.items()), "holds miscounted"
        assert self._pinned == sum(b.pins > 0 for b in self._blocks.values()) <= self.limits.pin_slots
        assert self._reserved == sum(not b.committed for b in self._blocks.values())
        assert self._quarantined == sum(len(r.blocks) for r in self._reservations.values() if r.quarantined)
        due = {i for _, i in self._due}
        assert due >= self._leases.keys() | {i for i, r in self._reservations.items() if not r.quarantined}, (
            "something never lapses"
        )
        self._policy.check(self._blocks.keys())

    # -- within ------------------------------------------------------------------------------------------------------

    def _new_id(self, kind: str) -> str:
        self._issued += 1
        return f"{kind}{self.epoch:x}.{self._issued:x}"

    def _leading_run(self, keys: Sequence[BlockKey]) -> list[SlabBlock]:
        run, blocks = [], self._blocks
        for key in keys:
            block = blocks.get(key)
            if block is None or not block.committed:
                break
            run.append(block)
        return run

    def _allowance(self, writer: str) -> int:
        left = self.limits.writer_slots - self._outstanding.get(writer, 0)
        if left <= 0:
            raise SlabFull(f"writer {writer} has {self.limits.writer_slots} slots reserved or quarantined, as many as it may")
        return left

    def _evict(self, count: int, protect: set[BlockKey | None]) -> int:
        blocks = self._blocks
        victims = self._policy.victims(count, lambda key: blocks[key].holds > 0 or key in protect)
        for key in victims:
            self._free.append(blocks.pop(key).slot)
            self._events.removed(key)
        self.evictions += len(victims)
        return len(victims)

    def _open_reservation(self, reservation_id: ReservationId, epoch: int) -> OpenReservation:
        reservation = self._reservations.get(reservation_id) if epoch == self.epoch else None
        if reservation is None:
            raise UnknownReservation(f"no reservation {reservation_id} of epoch {epoch} here")
        return reservation

    def _close(self, reservation_id: ReservationId, reservation: OpenReservation) -> None:
        del self._reservations[reservation_id]
        count = len(reservation.blocks)
        if reservation.quarantined:
            self._quarantined -= count
        else:
            self._reserved -= count
        left = self._outstanding[reservation.writer] - count
        if left:
            self._outstanding[reservation.writer] = left
        else:
            del self._outstanding[reservation.writer]

    def _discard(self, reservation: OpenReservation) -> None:
        for key, block in reservation.blocks.items():
            if not reservation.quarantined:
                del self._blocks[key]
                self._policy.remove(key)
            self._free.append(block.slot)

    def _quarantine(self, reservation: OpenReservation) -> None:
        reservation.quarantined = True
        self._reserved -= len(reservation.blocks)
        self._quarantined += len(reservation.blocks)
        for key in reservation.blocks:
            del self._blocks[key]
            self._policy.remove(key)

"""The records of a slab's books and what its calls return.

Owns no rule: `kv.slab` keeps them in order. Invariant: a `SlabBlock` keeps its slot for as long as it lives.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.ids import BlockKey, LeaseId, ReservationId, SlotId


@dataclass(frozen=True, slots=True)
class SlabLimits:
    """`writer_slots`: how many slots one writer may have reserved or quarantined at a time; `pin_slots`: the pin budget."""

    slots: int
    slot_bytes: int
    writer_slots: int
    pin_slots: int
    reservation_ttl_s: float = 20.0
    lease_ttl_s: float = 10.0
    lease_grace_s: float = 5.0

    def __post_init__(self) -> None:
        if min(self.slots, self.slot_bytes, self.writer_slots) < 1 or not 0 <= self.pin_slots <= self.slots:
            raise ValueError(f"impossible slab limits: {self}")
        if min(self.reservation_ttl_s, self.lease_ttl_s) <= 0 or self.lease_grace_s < 0:
            raise ValueError("a slab's times must be positive")


@dataclass(frozen=True, slots=True)
class Granted:
    """`slots[i]` is where the i-th key goes; None where it is held, is being written, or finds no room. No slot at all: nothing to end."""

    reservation_id: ReservationId
    slots: tuple[SlotId | None, ...]
    ttl_s: float


@dataclass(frozen=True, slots=True)
class Leased:
    """The leading run that was found. `checksums`: one a slot, or None where its writer gave none."""

    lease_id: LeaseId | None
    slots: tuple[SlotId, ...]
    checksums: tuple[int | None, ...]
    ttl_s: float


class SlabBlock:
    """A key's slot. `holds`: 1 while reserved, plus one a lease and one a pin; only blocks without holds are evicted."""

    __slots__ = ("checksum", "committed", "holds", "key", "parent", "pins", "slot")

    def __init__(self, key: BlockKey, parent: BlockKey | None, slot: SlotId) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.holds = 1
        self.pins = 0
        self.committed = False
        self.checksum: int | None = None


@dataclass(slots=True)
class OpenReservation:
    writer: str
    blocks: dict[BlockKey, SlabBlock]
    quarantined: bool = False


@dataclass(slots=True)
class OpenLease:
    holder: str
    blocks: list[SlabBlock]


@dataclass(slots=True)
class Pin:
    blocks: list[SlabBlock]
    until_s: float

"""What every transport must know before it moves a byte: own regions, peers as they described themselves, and whether a read fits.

Owns the checks; moves nothing. Invariant: a `ReadPlan` names only slots that lie within regions of the generation that was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cpd_ray.errors import LayoutMismatch, PeerGone, StaleRegion, TransferFailed
from cpd_ray.messages import PeerDescriptor, RegionDescriptor, RegionRef
from kv.memory import SlottedMemory
from kv.transport.base import Span

SlotIds = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class OwnRegion:
    ref: RegionRef
    memory: SlottedMemory


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """A checked read. The spans have equal lengths; slots are sorted so that neighbours on both sides stand together."""

    source: RegionDescriptor
    source_slots: SlotIds
    source_span: Span
    into: OwnRegion
    into_slots: SlotIds
    into_span: Span

    @property
    def nbytes(self) -> int:
        return len(self.source_slots) * self.source_span.nbytes


class RegionBook:
    """The regions and peers of one transport. `layout`: the digest of the block layout that both sides must share."""

    def __init__(self, peer: str, transport: str, layout: bytes) -> None:
        self.peer = peer
        self.transport = transport
        self.layout = layout
        self._own: dict[str, OwnRegion] = {}
        self._peers: dict[str, dict[str, RegionDescriptor]] = {}

    def add(self, region: str, memory: SlottedMemory, generation: int) -> OwnRegion | None:
        """Register `memory`; returns the registration that it replaces. Raises ValueError when the generation is the same."""
        if len({extent.device for extent in memory.extents}) > 1:
            raise ValueError(f"region {region} lies on several devices")
        old = self._own.get(region)
        if old is not None and old.ref.generation == generation:
            raise ValueError(f"region {region} is registered under generation {generation} already")
        self._own[region] = OwnRegion(RegionRef(self.peer, region, generation), memory)
        return old

    def own(self, ref: RegionRef) -> OwnRegion:
        """Raises StaleRegion when `ref` is not a region of ours as it is now."""
        found = self._own.get(ref.region)
        if found is None or found.ref != ref:
            raise StaleRegion(f"region {ref.region} (generation {ref.generation}) is not registered here")
        return found

    def drop_own(self) -> list[OwnRegion]:
        """Forget all own regions and return them."""
        dropped = list(self._own.values())
        self._own.clear()
        return dropped

    def describe(self, metadata: bytes) -> PeerDescriptor:
        regions = [
            RegionDescriptor(
                own.ref,
                own.memory.slot_bytes,
                own.memory.extent_slots,
                tuple(extent.address for extent in own.memory.extents),
                own.memory.extents[0].device,
            )
            for own in self._own.values()
        ]
        return PeerDescriptor(self.peer, self.transport, self.layout, metadata, tuple(regions))

    def learn(self, peer: PeerDescriptor) -> None:
        """Replace what was known of a peer. Raises LayoutMismatch when nothing of it could be read rightly."""
        if peer.layout != self.layout:
            raise LayoutMismatch(f"peer {peer.peer} has blocks of another layout")
        if peer.transport != self.transport:
            raise LayoutMismatch(f"peer {peer.peer} speaks {peer.transport}, not {self.transport}")
        for region in peer.regions:
            shape = (region.slot_bytes, *region.extent_slots)
            if min(shape) < 1 or len(region.extent_slots) != len(region.extent_addresses) or region.ref.peer != peer.peer:
                raise LayoutMismatch(f"peer {peer.peer} describes region {region.ref.region} inconsistently")
        self._peers[peer.peer] = {region.ref.region: region for region in peer.regions}

    def knows(self, peer: str) -> bool:
        return peer in self._peers

    def forget(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def plan(
        self,
        source: RegionRef,
        source_slots: Sequence[int],
        into: RegionRef,
        into_slots: Sequence[int],
        source_span: Span | None,
        into_span: Span | None,
    ) -> ReadPlan:
        """Check a read. Raises PeerGone for a peer that isn't connected, StaleRegion, and TransferFailed when slots or spans don't fit."""
        regions = self._peers.get(source.peer)
        if regions is None:
            raise PeerGone(f"{source.peer} is not connected")
        described = regions.get(source.region)
        if described is None or described.ref != source:
            raise StaleRegion(f"region {source.region} (generation {source.generation}) is not what {source.peer} described")
        target = self.own(into)
        from_span = source_span or Span(0, described.slot_bytes)
        to_span = into_span or Span(0, target.memory.slot_bytes)
        if from_span.nbytes != to_span.nbytes:
            raise TransferFailed(f"{from_span.nbytes} bytes of each slot do not fit {to_span.nbytes}")
        if len(source_slots) != len(into_slots):
            raise TransferFailed(f"{len(source_slots)} slots to read, {len(into_slots)} to write")
        from_ids = _checked(source_slots, sum(described.extent_slots), from_span, described.slot_bytes)
        to_ids = _checked(into_slots, target.memory.slots, to_span, target.memory.slot_bytes)
        if len(np.unique(to_ids)) != len(to_ids):
            raise TransferFailed("a slot would be written twice")
        order = np.argsort(from_ids, kind="stable")
        return ReadPlan(described, from_ids[order], from_span, target, to_ids[order], to_span)


def _checked(slots: Sequence[int], total: int, span: Span, slot_bytes: int) -> SlotIds:
    ids = np.asarray(slots, dtype=np.int64)
    if ids.size and (ids.min() < 0 or ids.max() >= total):
        raise TransferFailed(f"a slot lies outside 0..{total - 1}")
    if span.offset < 0 or span.nbytes < 1 or span.offset + span.nbytes > slot_bytes:
        raise TransferFailed(f"{span} does not lie within a slot of {slot_bytes} bytes")
    return ids

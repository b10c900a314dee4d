"""What moves block bytes between processes, as its callers see it: five verbs.

Owns no policy: leases, retries and quarantine are the caller's. Invariant: when `read` returns, all destination slots hold the
source's bytes as they were at some moment during the call; when it raises TransferTimedOut, the transfer is not over, and
`settled()` of the raised error tells when it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cpd_ray.errors import TransferTimedOut
from cpd_ray.messages import PeerDescriptor, RegionRef
from kv.memory import SlottedMemory


@dataclass(frozen=True, slots=True)
class Span:
    """A part of each slot, for readers that need only some heads: `[offset, offset + nbytes)`."""

    offset: int
    nbytes: int


class StillMoving(TransferTimedOut):
    """A transfer that has not ended by its deadline."""

    def settled(self) -> bool:
        """True once nothing writes to the destination any more."""
        raise NotImplementedError  # pragma: no cover - each transport raises its own subclass


class Transport(Protocol):
    """One per process. `name` is the transport's kind ("nixl", "inprocess")."""

    name: str

    def register(self, region: str, memory: SlottedMemory, generation: int) -> RegionRef:
        """Make `memory` known under `region`, so that peers may read it and reads may land in it. Registering the same name anew
        replaces it; `generation` must differ then."""
        ...

    def describe(self) -> PeerDescriptor:
        """What a peer must `connect` with before it reads from here."""
        ...

    def connect(self, peer: PeerDescriptor) -> None:
        """Learn (or relearn) a peer and warm the path up; raises LayoutMismatch when its layout is not ours."""
        ...

    async def read(
        self,
        source: RegionRef,
        source_slots: Sequence[int],
        into: RegionRef,
        into_slots: Sequence[int],
        *,
        timeout_s: float,
        source_span: Span | None = None,
        into_span: Span | None = None,
    ) -> None:
        """Copy slot by slot. Raises StaleRegion (generation is not the connected one's), PeerGone, TransferFailed, StillMoving."""
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer; reads under way fail. No error when it is unknown."""
        ...

    def close(self) -> None:
        """Deregister everything; nothing moves afterwards."""
        ...

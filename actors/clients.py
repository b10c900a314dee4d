"""How the router reaches workers, whatever lies between: a direct object, a socket or a Ray handle.

Owns the interfaces only. Invariant: every call raises WorkerGone when the worker is dead or unreachable, and else only errors of the
request itself; cancelling a call or closing a stream cancels the work at the other end.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from cpd_ray.ids import LeaseId
from cpd_ray.messages import (
    DecodeChunk,
    DecodeRequest,
    EventsAfter,
    EventsPage,
    PeerDescriptor,
    PrefillRequest,
    PrefillResult,
    WorkerReport,
)


class WorkerClient(Protocol):
    """What a worker of any role answers."""

    async def report(self) -> WorkerReport: ...

    async def events(self, after: EventsAfter) -> EventsPage: ...

    async def describe(self) -> PeerDescriptor: ...

    async def connect(self, peer: PeerDescriptor) -> None: ...

    async def clear_pool(self) -> int: ...


class PrefillClient(WorkerClient, Protocol):
    async def prefill(self, request: PrefillRequest) -> PrefillResult: ...

    async def end_handover(self, lease: LeaseId) -> None: ...


class DecodeClient(WorkerClient, Protocol):
    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]: ...

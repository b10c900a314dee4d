"""Workers as their clients see them, in the same process: what a socket serves, and what an in-process cluster calls directly.

Owns nothing but the async face. Invariant: the same calls and errors as over any wire.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

from actors.decode import DecodeWorker
from actors.prefill import PrefillWorker
from actors.worker import Worker
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


class _Local:
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def report(self) -> WorkerReport:
        return self._worker.report()

    async def events(self, after: EventsAfter) -> EventsPage:
        return self._worker.events(after)

    async def describe(self) -> PeerDescriptor:
        return self._worker.describe()

    async def connect(self, peer: PeerDescriptor) -> None:
        await self._worker.connect(peer)

    async def clear_pool(self) -> int:
        return self._worker.clear_pool()


class LocalPrefill(_Local):
    """`actors.clients.PrefillClient` over the worker itself."""

    def __init__(self, prefill: PrefillWorker) -> None:
        super().__init__(prefill.worker)
        self._prefill = prefill

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        return await self._prefill.prefill(request)

    async def end_handover(self, lease: LeaseId) -> None:
        self._prefill.end_handover(lease)


class LocalDecode(_Local):
    """`actors.clients.DecodeClient` over the worker itself."""

    def __init__(self, decode: DecodeWorker) -> None:
        super().__init__(decode.worker)
        self._decode = decode

    def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        return self._decode.decode(request)

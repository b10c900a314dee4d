"""A worker's faces, measured and logged: what the client within answers passes through unchanged.

Owns no request. Invariant: each request that reaches the worker is counted once, by how it ended here, and logged in one line with the id
that the router gave it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from typing import Any

from actors.clients import DecodeClient, PrefillClient, WorkerClient
from actors.observability.logs import about, each_about, fields
from actors.observability.metrics import Meter
from actors.observability.seen import cached_fields, rounded
from cpd_ray import tokens as token_buffers
from cpd_ray.clock import Clock
from cpd_ray.errors import CacheMissed, CPDError, WorkerDraining
from cpd_ray.ids import LeaseId, RequestId
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
from cpd_ray.types import CachedTokens, FinishReason

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Stay:
    """One request's time at the worker. `ended`: as the label `outcome`."""

    began_s: float
    prompt_tokens: int
    ended: str = "failed"
    error: str | None = None
    tokens: int = 0
    cached: CachedTokens | None = None
    phases_s: dict[str, float] | None = None
    finish_reason: FinishReason | None = None


class _Observed:
    def __init__(self, client: WorkerClient, meter: Meter, clock: Clock) -> None:
        self._client = client
        self._meter = meter
        self._clock = clock

    @contextlib.contextmanager
    def _stay(self, kind: str, request: PrefillRequest | DecodeRequest) -> Iterator[_Stay]:
        stay = _Stay(self._clock.now_s(), request.prompt_tokens)
        try:
            yield stay
            stay.ended = "ok"
        except (GeneratorExit, asyncio.CancelledError):
            # a reader that has its last chunk need not come back for the end
            stay.ended = "ok" if stay.finish_reason is not None else "aborted"
            raise
        except CacheMissed:
            stay.ended = "bounced"
            raise
        except WorkerDraining:
            stay.ended = "draining"
            raise
        except CPDError as error:
            stay.error = type(error).__name__
            raise
        finally:
            self._count(stay)
            self._log(kind, request.request_id, stay)

    def _count(self, stay: _Stay) -> None:
        self._meter.counter("cpd_worker_requests", outcome=stay.ended).add()
        for phase, seconds in (stay.phases_s or {}).items():
            self._meter.histogram("cpd_phase_seconds", phase=phase).observe(seconds)

    def _log(self, kind: str, name: RequestId, stay: _Stay) -> None:
        request_id, attempt = split_name(name)
        line: dict[str, Any] = {
            "event": kind,
            "attempt": attempt,
            "outcome": stay.ended,
            "seconds": round(self._clock.now_s() - stay.began_s, 5),
            "prompt_tokens": stay.prompt_tokens,
            "tokens": stay.tokens,
        }
        if stay.error is not None:
            line["error"] = stay.error
        if stay.cached is not None:
            line["cached_tokens"] = cached_fields(stay.cached)
        if stay.phases_s:
            line["phases_s"] = rounded(stay.phases_s)
        with about(request_id):
            log.info(kind, extra=fields(**line))

    # -- what is only passed on --------------------------------------------------------------------------------------

    async def report(self) -> WorkerReport:
        return await self._client.report()

    async def events(self, after: EventsAfter) -> EventsPage:
        return await self._client.events(after)

    async def describe(self) -> PeerDescriptor:
        return await self._client.describe()

    async def connect(self, peer: PeerDescriptor) -> None:
        await self._client.connect(peer)

    async def clear_pool(self) -> int:
        return await self._client.clear_pool()


class ObservedPrefill(_Observed):
    """`actors.clients.PrefillClient` over another."""

    def __init__(self, client: PrefillClient, meter: Meter, clock: Clock) -> None:
        super().__init__(client, meter, clock)
        self._prefill = client

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        with self._stay("prefill", request) as stay, about(split_name(request.request_id)[0]):
            result = await self._prefill.prefill(request)
            stay.tokens = result.token is not None
            stay.cached, stay.phases_s, stay.finish_reason = result.cached, result.phases_s, result.finish_reason
            self._meter.counter("prefix_cache_queries").add(token_buffers.count(request.tokens))
            self._meter.counter("prefix_cache_hits").add(result.cached.total)
            return result

    async def end_handover(self, lease: LeaseId) -> None:
        await self._prefill.end_handover(lease)


class ObservedDecode(_Observed):
    """`actors.clients.DecodeClient` over another."""

    def __init__(self, client: DecodeClient, meter: Meter, clock: Clock) -> None:
        super().__init__(client, meter, clock)
        self._decode = client

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        with self._stay("decode", request) as stay:
            stream = each_about(split_name(request.request_id)[0], self._decode.decode(request))
            async with contextlib.aclosing(stream) as chunks:
                async for chunk in chunks:
                    stay.tokens += len(chunk.tokens)
                    stay.finish_reason = chunk.finish_reason
                    if chunk.cached is not None:
                        stay.cached, stay.phases_s = chunk.cached, dict(chunk.phases_s)
                    yield chunk


def split_name(name: RequestId) -> tuple[str, str]:
    """The client's request and which attempt at it, from the id that a router gives to workers (`request/attempt`)."""
    request_id, _, attempt = name.rpartition("/")
    return (request_id, attempt) if request_id else (name, "")

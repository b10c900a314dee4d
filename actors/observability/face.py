"""A face that measures and logs what the face within it answers.

Owns no answer: chunks, errors and cancellation pass through unchanged. Invariant: each request that ends, however, is counted once and
logged in one line.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping

from actors.http.face import Face, ModelCard, Status, Warmed
from actors.observability.logs import about, each_about, fields
from actors.observability.metrics import Meter
from actors.observability.seen import Seen
from actors.text.codec import TextCodec
from cpd_ray.clock import Clock
from cpd_ray.errors import CPDError
from cpd_ray.ids import WorkerId
from cpd_ray.types import FinishReason, GenerateRequest, RequestTrace, Role, Tier, TokenChunk, Usage
from placement.routing.candidates import OWN_POOL
from placement.routing.types import Decision, Route

log = logging.getLogger(__name__)


class ObservedFace:
    """`roles`: the role of each worker that is there now."""

    def __init__(self, face: Face, meter: Meter, clock: Clock, roles: Callable[[], Mapping[WorkerId, Role]]) -> None:
        self._face = face
        self._meter = meter
        self._clock = clock
        self._roles = roles
        self._between_tokens = meter.histogram("inter_token_latency_seconds")
        self._generated = meter.counter("generation_tokens")

    # -- what is measured --------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """As the face within. A reader that closes the answer early while it is not being cancelled has had enough: a stop string."""
        now_s = self._clock.now_s()
        seen = Seen(request, now_s, now_s)
        with self._ending(seen):
            async with contextlib.aclosing(each_about(request.request_id, self._face.generate(request))) as chunks:
                async for chunk in chunks:
                    self._took(seen, chunk)
                    yield chunk

    @contextlib.contextmanager
    def _ending(self, seen: Seen) -> Iterator[None]:
        try:
            yield
        except (GeneratorExit, asyncio.CancelledError) as leaving:
            if not isinstance(seen.ended, FinishReason):  # else its reader has the last chunk
                enough = isinstance(leaving, GeneratorExit) and seen.usage is not None and not _being_cancelled()
                seen.ended = FinishReason.STOP if enough else FinishReason.ABORT
            raise
        except CPDError as error:
            seen.ended = error.status
            raise
        finally:
            self._ended(seen)

    def _took(self, seen: Seen, chunk: TokenChunk) -> None:
        if count := len(chunk.tokens):
            now_s = self._clock.now_s()
            if seen.ttft_s is None:
                seen.ttft_s = now_s - seen.arrived_s
                self._meter.histogram("time_to_first_token_seconds").observe(seen.ttft_s)
            else:
                self._between_tokens.observe((now_s - seen.last_s) / count, count)
            seen.last_s = now_s
            seen.tokens += count
            self._generated.add(count)
        if chunk.usage is not None:
            seen.usage = chunk.usage
        if chunk.trace is not None:
            seen.trace = chunk.trace
        if chunk.finish_reason is not None:
            seen.ended = chunk.finish_reason

    def _ended(self, seen: Seen) -> None:
        meter, e2e_s = self._meter, self._clock.now_s() - seen.arrived_s
        meter.histogram("e2e_request_latency_seconds").observe(e2e_s)
        if isinstance(seen.ended, FinishReason):
            meter.counter("request_success", finished_reason=seen.ended).add()
        else:
            meter.counter("request_errors", status=str(seen.ended)).add()
        if seen.usage is not None:
            self._count_prompt(seen.usage)
        if seen.trace is not None:
            self._count_trace(seen.trace)
        with about(seen.request.request_id):
            log.info("request", extra=fields(**seen.line(e2e_s)))

    def _count_prompt(self, usage: Usage) -> None:
        cached = usage.cached
        self._meter.counter("prompt_tokens").add(usage.prompt_tokens)
        by_source = {"pool": cached.pool, "node": cached.node, "cluster": cached.cluster}
        for source, tokens in {**by_source, "computed": usage.prompt_tokens - cached.total}.items():
            self._meter.counter("prompt_tokens_by_source", source=source).add(tokens)

    def _count_trace(self, trace: RequestTrace) -> None:
        meter, phases = self._meter, trace.phases_s
        admission_s = phases.get("admission", 0.0)
        meter.histogram("request_queue_time_seconds").observe(admission_s + phases.get("queue", 0.0))
        meter.counter("cpd_retries").add(trace.attempts - 1)
        roles = self._roles()
        pool = roles.get(trace.workers[0]) if trace.workers else None
        own = OWN_POOL[Route(trace.route)]
        reason = "own_pool" if pool is own else "crossed" if own in roles.values() else "own_pool_empty"
        meter.counter("cpd_decisions", route=trace.route, pool=pool or "gone", reason=reason if pool else "gone").add()
        actual_s = trace.actual_ttft_s - admission_s  # the prediction was made on admission
        if trace.attempts == 1 and trace.predicted_ttft_s > 0 and actual_s > 0:
            meter.histogram("cpd_ttft_prediction_ratio", route=trace.route).observe(trace.predicted_ttft_s / actual_s)
            error_s = abs(trace.predicted_ttft_s - actual_s)
            meter.histogram("cpd_ttft_prediction_error_seconds", route=trace.route).observe(error_s)

    # -- what is only passed on --------------------------------------------------------------------------------------

    @property
    def codec(self) -> TextCodec:
        return self._face.codec

    def models(self) -> tuple[ModelCard, ...]:
        return self._face.models()

    def healthy(self) -> bool:
        return self._face.healthy()

    async def plan(self, request: GenerateRequest) -> Decision:
        return await self._face.plan(request)

    async def status(self) -> Status:
        return await self._face.status()

    async def reset(self, tiers: frozenset[Tier]) -> Mapping[Tier, int]:
        dropped = await self._face.reset(tiers)
        log.info("cache reset", extra=fields(event="reset", dropped_blocks={str(tier): n for tier, n in dropped.items()}))
        return dropped

    async def warm(self, request: GenerateRequest, ttl_s: float) -> Warmed:
        with about(request.request_id):
            warmed = await self._face.warm(request, ttl_s)
            told = {"prompt_tokens": warmed.tokens, "cached_tokens": warmed.cached_tokens, "pinned_blocks": warmed.pinned_blocks}
            log.info("warmed", extra=fields(event="warm", worker=warmed.worker, ttl_s=ttl_s, **told))
            return warmed


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

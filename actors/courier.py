"""Carrying one request to its workers and their answers back: the router's effects.

Owns the calls and the lessons from their failures. Decides nothing. Invariant: a worker found dead is told to membership and not asked
again by this request; each handover received is ended exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import cast

from actors.clients import PrefillClient
from actors.fleet import Fleet
from actors.flight import Flight
from actors.membership import Membership
from cpd_ray.clock import Clock
from cpd_ray.errors import CPDError, WorkerDraining, WorkerGone
from cpd_ray.ids import WorkerId
from cpd_ray.messages import DecodeChunk, DecodeRequest, Handover, NodeRun, PrefillRequest, PrefillResult
from placement.routing.types import Candidate

log = logging.getLogger(__name__)


class Courier:
    """One a router. `handover_ttl_s`: how long a prefilled request's KV is to wait for its decode worker."""

    def __init__(self, fleet: Fleet, membership: Membership, clock: Clock) -> None:
        self._fleet = fleet
        self._membership = membership
        self._clock = clock
        self.handover_ttl_s = 30.0
        self._telling: set[asyncio.Task[None]] = set()
        self._waiting: dict[WorkerId, set[asyncio.Timeout]] = {}

    async def prefill(
        self, flight: Flight, chosen: Candidate, sources: tuple[NodeRun, ...], *, commit_only: bool = False
    ) -> PrefillResult:
        """Have `chosen` prefill what is known of the answer. Raises WorkerGone, CacheMissed, and the request's own errors."""
        request, worker = flight.request, chosen.worker
        new, seconds = chosen.new_tokens, chosen.fetch_s + chosen.prefill_s
        with self._blames(flight, worker):
            client = self._fleet.prefill_client(worker)
            with self._fleet.dispatch(worker, flight.name, new_tokens=new, seconds=seconds) as origin:
                prefill = client.prefill(
                    PrefillRequest(
                        request_id=flight.name,
                        root=flight.root,
                        tokens=flight.tokens,
                        prompt_tokens=request.prompt_tokens,
                        sampling=flight.sampling,
                        sources=sources,
                        believed_cached_tokens=chosen.cached_tokens,
                        may_bounce=flight.actual_cached is None,
                        commit_only=commit_only,
                        priority=request.priority,
                        handover_ttl_s=self.handover_ttl_s,
                        origin=origin,
                    )
                )
                async with self._unless_lost(worker):
                    result = await prefill
        flight.prefilled(result, self._clock.now_s())
        return result

    async def decode(
        self, flight: Flight, worker: WorkerId, handover: Handover, sources: tuple[NodeRun, ...]
    ) -> AsyncGenerator[DecodeChunk, None]:
        """`worker`'s chunks; ends the handover once it isn't needed. Raises WorkerGone when the stream ends before the answer."""
        started_s = self._clock.now_s()
        request = flight.request
        ended = False
        flight.workers.append(worker)
        try:
            with self._blames(flight, worker):
                client = self._fleet.decode_client(worker)
                with self._fleet.dispatch(worker, flight.name, new_tokens=0, seconds=0.0) as origin:
                    stream = client.decode(
                        DecodeRequest(
                            request_id=flight.name,
                            root=flight.root,
                            tokens=flight.tokens,
                            prompt_tokens=request.prompt_tokens,
                            sampling=flight.sampling,
                            handover=handover,
                            sources=sources,
                            priority=request.priority,
                            origin=origin,
                        )
                    )
                    async with contextlib.aclosing(stream):
                        while (chunk := await self._next(worker, stream)) is not None:
                            if not ended:
                                ended = True
                                self.end(handover)
                                flight.spend({"handover": self._clock.now_s() - started_s})
                            if chunk.finish_reason is not None:  # spent before the last chunk takes the trace along
                                flight.spend({"decode": self._clock.now_s() - started_s})
                                yield chunk
                                return
                            yield chunk
                raise WorkerGone(f"decode worker {worker} ended its stream before the answer")
        finally:
            if not ended:
                self.end(handover)

    def give_up(self, worker: WorkerId) -> None:
        """Whoever waits for `worker` gets WorkerGone."""
        for scope in self._waiting.get(worker, ()):
            scope.reschedule(asyncio.get_running_loop().time())

    async def _next(self, worker: WorkerId, stream: AsyncGenerator[DecodeChunk, None]) -> DecodeChunk | None:
        async with self._unless_lost(worker):
            return await anext(stream, None)

    @contextlib.asynccontextmanager
    async def _unless_lost(self, worker: WorkerId) -> AsyncIterator[None]:
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._waiting.setdefault(worker, set()).add(scope)
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise
            raise WorkerGone(f"worker {worker} has not been heard of for too long") from error
        finally:
            waiting = self._waiting[worker]
            waiting.discard(scope)
            if not waiting:
                del self._waiting[worker]

    def end(self, handover: Handover) -> None:
        """Tell the prefill worker, without waiting for it, that its blocks are free. If it can't be told, the lease lapses there."""
        task = asyncio.get_running_loop().create_task(self._tell(handover), name=f"end-{handover.lease_id}")
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def close(self) -> None:
        """Wait for what is still being told."""
        await asyncio.gather(*self._telling, return_exceptions=True)

    async def _tell(self, handover: Handover) -> None:
        # whoever is there hears it, also one that the fleet has given up
        client = self._membership.roster.workers().get(handover.worker)
        try:
            if client is None:
                raise WorkerGone("it has left")
            await cast(PrefillClient, client).end_handover(handover.lease_id)
        except CPDError as error:
            log.info("handover %s of %s ends by its deadline: %s", handover.lease_id, handover.worker, error)

    @contextlib.contextmanager
    def _blames(self, flight: Flight, worker: WorkerId) -> Iterator[None]:
        try:
            yield
        except WorkerGone as gone:
            flight.excluded.add(worker)
            if not isinstance(gone, WorkerDraining):
                self._membership.worker_died(worker)
            raise

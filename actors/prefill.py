"""A prefill or pre-prefill worker: computes a prompt's KV, samples the first token, keeps the KV leased for decode.

The two roles run this same code on different traffic. Invariant: a result with a handover has a lease behind it, and no other
path leaves blocks referenced.
"""

from __future__ import annotations

import contextlib

from actors.engine.interface import EngineOutput, EngineRequest
from actors.worker import Sources, Worker
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import CacheMissed
from cpd_ray.ids import BlockId, BlockKey, LeaseId
from cpd_ray.messages import Handover, PrefillRequest, PrefillResult
from cpd_ray.types import CachedTokens, FinishReason

HANDOVER_GRACE_S = 2.0


class PrefillWorker:
    """`bounce_tokens`: how far below the router's belief the cache may be before the request is handed back."""

    def __init__(self, worker: Worker, *, bounce_tokens: int) -> None:
        self.worker = worker
        self.bounce_tokens = bounce_tokens

    async def prefill(self, request: PrefillRequest) -> PrefillResult:
        """Run one prompt. Raises CacheMissed (nothing computed), WorkerDraining, and the request's own errors."""
        worker = self.worker
        with worker.accept(request.request_id, request.origin):
            worker.check_tokens(request.tokens)
            keys = worker.keys(request.root, request.tokens)
            if request.may_bounce:
                await self._bounce(request, keys)
            last = EngineOutput(request.request_id)
            first: EngineOutput | None = None
            stream = worker.run(self._engine_request(request, keys), Sources(runs=request.sources))
            async with contextlib.aclosing(stream):
                async for output in stream:
                    first = first or output
                    last = output
            if request.commit_only:
                await worker.tiers.written_down()  # what was asked for is that it can be found
            return self._result(request, first or last, last)

    def end_handover(self, lease: LeaseId) -> None:
        """The blocks were read, or will not be. Raises UnknownLease when it has ended already."""
        self.worker.engine.pool.end_lease(lease)

    def _engine_request(self, request: PrefillRequest, keys: tuple[BlockKey, ...]) -> EngineRequest:
        return EngineRequest(
            request_id=request.request_id,
            tokens=request.tokens,
            prompt_tokens=request.prompt_tokens,
            root=request.root,
            keys=keys,
            sampling=request.sampling,
            max_new_tokens=1,
            may_fetch_blocks=len(keys),
            hold=not request.commit_only,
            sample=not request.commit_only,
            priority=request.priority,
        )

    async def _bounce(self, request: PrefillRequest, keys: tuple[BlockKey, ...]) -> None:
        size = self.worker.engine.block_size
        found = self.worker.engine.pool.match(keys) * size
        if found + self.bounce_tokens >= request.believed_cached_tokens:
            return
        found = max(found, await self.worker.tiers.probe(keys, request.sources) * size)
        if found + self.bounce_tokens < request.believed_cached_tokens:
            raise CacheMissed(
                f"{found} tokens are cached for this prompt, {request.believed_cached_tokens} were expected", cached_tokens=found
            )

    def _result(self, request: PrefillRequest, first: EngineOutput, last: EngineOutput) -> PrefillResult:
        generated = token_buffers.count(request.tokens) - request.prompt_tokens
        finish = last.finish_reason
        more = finish is FinishReason.LENGTH and generated + 1 < request.sampling.max_tokens and not request.commit_only
        handover = self._hand_over(request, last.held_blocks) if more and last.held_blocks else None
        if handover is None:
            self.worker.engine.pool.release(last.held_blocks)
        return PrefillResult(
            request_id=request.request_id,
            token=first.tokens[0] if first.tokens else None,
            logprobs=first.logprobs[0] if first.logprobs else None,
            finish_reason=None if more or request.commit_only else finish,
            cached=first.cached or CachedTokens(),
            phases_s=first.phases_s or {},
            handover=handover,
            committed_blocks=token_buffers.count(request.tokens) // self.worker.engine.block_size,
        )

    def _hand_over(self, request: PrefillRequest, blocks: tuple[BlockId, ...]) -> Handover:
        pool, tiers, who = self.worker.engine.pool, self.worker.tiers, self.worker.identity
        try:
            lease = pool.lease(blocks, holder=request.request_id, ttl_s=request.handover_ttl_s, grace_s=HANDOVER_GRACE_S)
        finally:
            pool.release(blocks)
        return Handover(
            worker=who.worker,
            node=who.node,
            lease_id=lease,
            region=tiers.pool_region,
            blocks=tuple(blocks),
            tokens=token_buffers.count(request.tokens),
            ttl_s=request.handover_ttl_s,
            peer=self.worker.descriptor,
        )

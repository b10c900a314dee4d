"""A decode worker: takes over a prefilled request, reads only the KV that it lacks, streams tokens.

Invariant: the answer's tokens do not depend on where the KV came from: handover, own pool, a slab or recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from actors.engine.interface import EngineRequest
from actors.worker import Sources, Worker
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import InvalidRequest
from cpd_ray.messages import DecodeChunk, DecodeRequest


class DecodeWorker:
    """The decode role over a `Worker`."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker

    async def decode(self, request: DecodeRequest) -> AsyncGenerator[DecodeChunk, None]:
        """Chunks until the answer ends; the last has `finish_reason`. Closing the generator aborts the request."""
        worker = self.worker
        with worker.accept(request.request_id, request.origin):
            worker.check_tokens(request.tokens)
            known = token_buffers.count(request.tokens)
            generated = known - request.prompt_tokens
            remaining = request.sampling.max_tokens - generated
            if remaining < 1:
                raise InvalidRequest("the answer has reached max_tokens already", param="max_tokens")
            keys = worker.keys(request.root, request.tokens)
            engine_request = EngineRequest(
                request_id=request.request_id,
                tokens=request.tokens,
                prompt_tokens=request.prompt_tokens,
                root=request.root,
                keys=keys,
                sampling=request.sampling,
                max_new_tokens=remaining,
                may_fetch_blocks=len(keys),
                fetch_tail=request.handover is not None and request.handover.tokens == known - 1,
                priority=request.priority,
            )
            stream = worker.run(engine_request, Sources(runs=request.sources, handover=request.handover))
            index = generated
            async with contextlib.aclosing(stream):
                async for output in stream:
                    yield DecodeChunk(
                        request_id=request.request_id,
                        index=index,
                        tokens=output.tokens,
                        logprobs=output.logprobs,
                        finish_reason=output.finish_reason,
                        cached=output.cached,
                        phases_s=output.phases_s or {},
                    )
                    index += len(output.tokens)

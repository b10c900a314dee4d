"""One request's outputs on their way to whoever asked: an asynchronous iterator whose closing is the abort.

Owns the outputs not yet taken; what became ready meanwhile is delivered together. Invariant: however the consumer leaves (close,
cancellation, oblivion), `left` is called once unless the last output was put, and held blocks that nobody took are given back.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from actors.engine.interface import EngineOutput
from cpd_ray.ids import BlockId


class Mailbox:
    """The engine's end. `left`: the consumer has gone before the last output. `give_back`: takes held blocks that nobody will take."""

    def __init__(self, left: Callable[[Mailbox], None], give_back: Callable[[tuple[BlockId, ...]], None]) -> None:
        self._left = left
        self._give_back = give_back
        self._ready: list[EngineOutput] = []
        self._waiter: asyncio.Future[None] | None = None
        self._complete = False
        self.closed = False

    def put(self, output: EngineOutput) -> None:
        """One more output; nothing comes after one with a finish reason or an error."""
        assert not self._complete, f"an output of {output.request_id} after its last"
        self._complete = output.finish_reason is not None or output.error is not None
        if self.closed:
            self._give_back(output.held_blocks)
            return
        self._ready.append(output)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> EngineOutput | None:
        """All that is ready, as one output, when something is; None after the last."""
        while not self._ready:
            if self._complete or self.closed:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        output, self._ready = _merge(self._ready), []
        return output

    def close(self) -> None:
        """Nobody takes anything any more."""
        if self.closed:
            return
        self.closed = True
        for output in self._ready:
            self._give_back(output.held_blocks)
        self._ready = []
        if not self._complete:
            self._left(self)


class OutputStream(AsyncIterator[EngineOutput]):
    """The consumer's end."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        # a consumer that breaks out of its loop and forgets the iterator
        weakref.finalize(self, _forgotten, mailbox, asyncio.get_running_loop()).atexit = False

    async def __anext__(self) -> EngineOutput:
        try:
            output = await self._mailbox.take()
        except asyncio.CancelledError:
            self._mailbox.close()
            raise
        if output is None:
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """Abort the request, unless it has ended."""
        self._mailbox.close()


def _forgotten(mailbox: Mailbox, loop: asyncio.AbstractEventLoop) -> None:
    """Runs on whichever thread collects the garbage."""
    if not (mailbox.closed or loop.is_closed()):
        loop.call_soon_threadsafe(mailbox.close)


def _merge(outputs: list[EngineOutput]) -> EngineOutput:
    """Outputs of one request, in order, as one."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[-1],
        tokens=tuple(token for output in outputs for token in output.tokens),
        logprobs=tuple(logprob for output in outputs for logprob in output.logprobs),
        cached=next((output.cached for output in outputs if output.cached is not None), None),
        phases_s=next((output.phases_s for output in outputs if output.phases_s is not None), None),
    )

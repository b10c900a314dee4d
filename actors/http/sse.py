"""Answering over HTTP while watching the client: streams of server-sent events, and work that ends when the client leaves.

Owns the transport side of an answer. Knows no shape. Invariant: when the client has gone, or the time is up, the work is cancelled and
its clean-up awaited; a failure before the first event is an HTTP error, a later one is an error event, and then the stream ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.http.errors import ErrorAnswer, describe
from cpd_ray.errors import Aborted, CPDError, DeadlineExceeded

log = logging.getLogger(__name__)
T = TypeVar("T")

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event; JSON has no line breaks, so it is one line."""
    return b"data: " + msgspec.json.encode(data) + b"\n\n"


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T], *, timeout_s: float) -> T:
    """The work's result. Raises Aborted when the client leaves first, DeadlineExceeded when time is up; the work has ended by then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        if watch.done():
            raise Aborted("the client closed the connection")
        raise DeadlineExceeded("the answer was not complete in time")
    finally:
        for started in (task, watch):
            started.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Streams `events` (framed already). Waits for the first one before it says 200."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes, None], *, timeout_s: float, request_id: str) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._timeout_s = timeout_s
        self._request_id = request_id
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._stream(send), timeout_s=self._timeout_s)
        except Aborted:
            log.info("request %s: the client left", self._request_id)
        except CPDError as error:
            await self._fail(describe(error), scope, receive, send)
        except Exception as error:
            log.exception("request %s failed", self._request_id)
            await self._fail(describe(error), scope, receive, send)

    async def _stream(self, send: Send) -> None:
        async with contextlib.aclosing(self._events) as events:
            async for data in events:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _fail(self, answer: ErrorAnswer, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._started:
            await answer.response()(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": event(answer.body), "more_body": False})


async def merged(streams: list[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, with the stream's number. The first failure ends all of them."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as only:
            async for item in only:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | _End] = asyncio.Queue(maxsize=len(streams))
    feeds = [asyncio.ensure_future(_feed(queue, number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(feeds)
        while running:
            got = await queue.get()
            if not isinstance(got, _End):
                yield got
            elif got.error is not None:
                raise got.error
            else:
                running -= 1
    finally:
        for feed in feeds:
            feed.cancel()
        await asyncio.gather(*feeds, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _End:
    """A stream is over; `error`: what it raised."""

    error: Exception | None = None


async def _feed(queue: asyncio.Queue[tuple[int, T] | _End], number: int, stream: AsyncGenerator[T, None]) -> None:
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await queue.put((number, item))
    except Exception as error:  # handed to whoever reads the queue
        await queue.put(_End(error))
    else:
        await queue.put(_End())

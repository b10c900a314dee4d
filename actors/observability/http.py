"""Responses of an ASGI application that are errors, counted by status: also those that never reached the router.

Owns nothing of the response. Invariant: each response is counted at most once.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.observability.metrics import Meter

FIRST_ERROR = 400


class CountErrors:
    """Pure ASGI, around the whole application."""

    def __init__(self, app: ASGIApp, meter: Meter) -> None:
        self._app = app
        self._meter = meter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= FIRST_ERROR:
                self._meter.counter("http_errors", status=str(message["status"])).add()
            await send(message)

        await self._app(scope, receive, counted)

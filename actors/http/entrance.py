"""What every request passes first: its id, the size of its headers, its key. Pure ASGI, around the whole application.

Owns default-deny: with keys set, only `/health` is open. Knows no route besides. Invariant: every response carries an `X-Request-Id`
of harmless characters, and what escapes the application is logged under it and reaches the client as a bare 500.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from actors.http.errors import describe
from actors.http.identity import Caller, KeyRing
from actors.http.limits import HttpLimits
from cpd_ray.errors import CPDError, RequestTooLarge

log = logging.getLogger(__name__)

MAX_ID_CHARS = 128
_HARMFUL = re.compile(r"[^A-Za-z0-9._:-]")


def harmless(request_id: str) -> str:
    """The client's id with everything replaced that could mean something in a log, a header or a path."""
    return _HARMFUL.sub("_", request_id[:MAX_ID_CHARS])


class Entrance:
    """Puts `request_id` (to be shown), `client_id` (harmless, empty when the client gave none) and `caller` into the request's state."""

    def __init__(self, app: ASGIApp, keys: KeyRing | None, limits: HttpLimits, new_id: Callable[[], str]) -> None:
        self._app = app
        self._keys = keys
        self._limits = limits
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        client_id = harmless(headers.get("x-request-id", ""))
        request_id = client_id or self._new_id()
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            caller = self._admit(scope, headers)
            scope.setdefault("state", {}).update(request_id=request_id, client_id=client_id, caller=caller)
            await self._app(scope, receive, send_with_id)
        except CPDError as error:
            await describe(error).response()(scope, receive, send_with_id)
        except Exception as error:
            log.exception("request %s failed", request_id)
            if not started:
                await describe(error).response()(scope, receive, send_with_id)

    def _admit(self, scope: Scope, headers: Headers) -> Caller:
        size = sum(len(name) + len(value) for name, value in headers.raw) + len(scope.get("query_string", b"")) + len(scope["path"])
        if size > self._limits.header_bytes:
            raise RequestTooLarge(f"headers may have at most {self._limits.header_bytes} bytes", code="headers_too_large")
        if self._keys is None or (scope["path"] == "/health" and scope["method"] in ("GET", "HEAD")):
            return Caller()
        return self._keys.authenticate(headers.get("authorization"))

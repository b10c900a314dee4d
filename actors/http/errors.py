"""The one place where an error becomes what a client sees.

Owns the mapping from any exception to status, headers and OpenAI-shaped body. Invariant: text reaches a client only from a `CPDError`,
whose message is fit for it; any other exception is a bare 500.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import msgspec
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from cpd_ray.errors import CPDError, InvalidRequest, Overloaded, RequestTooLarge, Unauthorized


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    status: int
    body: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        return Response(msgspec.json.encode(self.body), self.status, dict(self.headers), "application/json")


def describe(error: BaseException) -> ErrorAnswer:
    """What a client is told of this error."""
    if isinstance(error, CPDError):
        return ErrorAnswer(error.status, _body(error.message, error.kind, error.param, error.code), _headers(error))
    if isinstance(error, HTTPException):
        status = HTTPStatus(error.status_code)
        kind = "invalid_request_error" if status < 500 else "internal_error"
        code = status.phrase.lower().replace(" ", "_")
        return ErrorAnswer(status, _body(f"{status.phrase}", kind, None, code), error.headers or {})
    return ErrorAnswer(500, _body("the server failed to answer this request", "internal_error", None, None))


def from_validation(error: ValidationError) -> InvalidRequest:
    """A body that does not fit its schema, as an error that names the first wrong field. The value itself is not repeated."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = ".".join(str(part) for part in first["loc"])
    reason = first["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {reason}" if param else reason, param=param or None, code="invalid_value")


def _body(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _headers(error: CPDError) -> dict[str, str]:
    if isinstance(error, Overloaded):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    if isinstance(error, Unauthorized):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, RequestTooLarge):
        return {"Connection": "close"}  # the rest of it will not be read
    return {"Retry-After": "1"} if error.status == 503 else {}

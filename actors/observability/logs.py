"""Logs as JSON lines, each about a request with that request's id.

Owns the format, and which request the running code works for. Invariant: a line is one line whatever is in it, and holds no prompt text
(whoever logs names the fields).
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any, TextIO, TypeVar

T = TypeVar("T")
OURS = ("actors", "placement", "kv", "cpd_ray", "serve_app")
"""The packages whose loggers are ours."""
FIELDS = "cpd_fields"
MAX_ID_CHARS = 256
_HARMFUL = re.compile(r"[^A-Za-z0-9._:/-]")
_request: ContextVar[str] = ContextVar("cpd_request_id", default="")


def clean(request_id: str) -> str:
    """The id with everything replaced that could mean something to whoever reads logs: ids come from clients."""
    return _HARMFUL.sub("_", request_id[:MAX_ID_CHARS])


@contextlib.contextmanager
def about(request_id: str) -> Iterator[None]:
    """Lines logged within are about this request."""
    token = _request.set(clean(request_id))
    try:
        yield
    finally:
        _request.reset(token)


async def each_about(request_id: str, stream: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The stream's items; what is logged while it makes one is about this request, what its reader logs in between is not."""
    named = clean(request_id)
    try:
        while True:
            token = _request.set(named)
            try:
                item = await anext(stream)
            except StopAsyncIteration:
                return
            finally:
                _request.reset(token)
            yield item
    finally:
        await stream.aclose()


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=` of a logging call: fields of the line beside its message."""
    return {FIELDS: values}


class JsonFormatter(logging.Formatter):
    """`constants`: fields of every line, for instance who writes."""

    def __init__(self, constants: Mapping[str, str]) -> None:
        super().__init__()
        self._constants = dict(constants)

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            **self._constants,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if request_id := _request.get():
            line["request_id"] = request_id
        line.update(getattr(record, FIELDS, {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _Ours(logging.StreamHandler[TextIO]):
    """The one handler that `configure` puts in place."""


def configure(constants: Mapping[str, str], *, stream: TextIO | None = None, level: int = logging.INFO) -> None:
    """Our loggers write JSON lines to `stream` (standard error when None) from now on; calling it again replaces what it did before.

    The process's own standard error, that is: a Serve replica's `sys.stderr` leads to Serve's log, which prefixes lines and holds them back.
    """
    handler = _Ours(stream or sys.__stderr__ or sys.stderr)
    handler.setFormatter(JsonFormatter(constants))
    for name in OURS:
        logger = logging.getLogger(name)
        for earlier in [h for h in logger.handlers if isinstance(h, _Ours)]:
            logger.removeHandler(earlier)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False

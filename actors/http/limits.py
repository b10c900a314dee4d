"""How much of anything a request may bring, checked before any of it is tokenised.

Owns the numbers and the refusals. Invariant: work done for a request is bounded by these before the model's own limits apply.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from cpd_ray.errors import Aborted, InvalidRequest, RequestTooLarge


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """`choices`: prompts times n. `request_timeout_s`: from the first byte of work to the last byte of the answer."""

    body_bytes: int = 8 * 2**20
    body_timeout_s: float = 60.0
    header_bytes: int = 16 * 2**10
    prompts: int = 32
    n: int = 16
    choices: int = 64
    messages: int = 8192
    tools: int = 128
    stops: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 64
    metadata_pairs: int = 16
    metadata_chars: int = 512
    salt_chars: int = 256
    request_timeout_s: float = 600.0
    tokenize_timeout_s: float = 30.0
    max_warm_ttl_s: float = 86_400.0


def at_most(count: int, limit: int, param: str, what: str) -> None:
    """Raises InvalidRequest, naming the field, when there are more than `limit` of them."""
    if count > limit:
        raise InvalidRequest(f"{param} takes at most {limit} {what}", param=param, code="too_many")


def check_stops(stops: tuple[str, ...], limits: HttpLimits) -> None:
    at_most(len(stops), limits.stops, "stop", "strings")
    for stop in stops:
        at_most(len(stop), limits.stop_chars, "stop", "characters a string")


def check_metadata(metadata: Mapping[str, str] | None, limits: HttpLimits) -> None:
    at_most(len(metadata or {}), limits.metadata_pairs, "metadata", "pairs")
    for key, value in (metadata or {}).items():
        at_most(max(len(key), len(value)), limits.metadata_chars, "metadata", "characters a key or value")


async def read_body(request: Request, limits: HttpLimits) -> bytes:
    """The whole body. Raises RequestTooLarge as soon as it is known to be longer than allowed, InvalidRequest when it isn't JSON or does not
    arrive in time, Aborted when the client leaves meanwhile."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # also what keeps other sites' pages from posting here: a browser asks permission first for this type
        raise InvalidRequest("Content-Type must be application/json", code="unsupported_media_type")
    too_large = RequestTooLarge(f"the body may have at most {limits.body_bytes} bytes", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > limits.body_bytes:
        raise too_large
    parts: list[bytes] = []
    received = 0
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for part in request.stream():
                received += len(part)
                if received > limits.body_bytes:
                    raise too_large
                parts.append(part)
    except TimeoutError as error:
        raise InvalidRequest("the body did not arrive in time", code="body_timeout") from error
    except ClientDisconnect as error:
        raise Aborted("the client closed the connection") from error
    return b"".join(parts)

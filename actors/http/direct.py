"""The same requests without HTTP: bodies as mappings, answers as mappings, for handle calls from other Ray apps.

Owns that doorway. Bodies, limits and answers are those of the HTTP routes. Invariant: a body gets here what it gets over HTTP, errors as
CPDErrors.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec

from actors.http import schemas
from actors.http.admin import only_prompt, plan_json, status_json, warm_json
from actors.http.entrance import harmless
from actors.http.identity import Caller
from actors.http.jobs import Asked, Job
from actors.http.respond import StreamStyle
from actors.http.routes import Service
from actors.http.shapes import ChatShape, CompletionShape, Shape
from cpd_ray.errors import InvalidRequest
from cpd_ray.types import Tier

Body = Mapping[str, Any]


class HandleFace:
    """Callers are apps of the same cluster: trusted to name their tenant (`user` of the body is no tenant)."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def generate(self, body: Body, tenant: str = "", request_id: str = "") -> dict[str, Any]:
        """The whole response object, `cpd` trace included. Raises CPDErrors."""
        job, shape = await self._job(body, tenant, request_id)
        whole = await self._service.responder.whole(job, shape, created=int(self._service.wall_s()), trace=True)
        return _plain(whole)

    async def stream(self, body: Body, tenant: str = "", request_id: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """The response as chunk objects; the last has `usage` and the `cpd` trace. Closing it aborts the request."""
        job, shape = await self._job(body, tenant, request_id)
        style = StreamStyle(usage_at_end=True, trace=True)
        chunks = self._service.responder.chunks(job, shape, created=int(self._service.wall_s()), style=style)
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                yield _plain(chunk)

    async def plan(self, body: Body, tenant: str = "") -> dict[str, Any]:
        """What would be decided for this body now."""
        job, _ = await self._job(body, tenant, "")
        choice = only_prompt(job)
        return _plain(plan_json(choice, await self._service.face.plan(choice.request)))

    async def warm(self, body: Body, tenant: str = "") -> dict[str, Any]:
        """Compute, commit and pin a context (`prompt` or `messages`, and `ttl_s`)."""
        parsed = _parse(body, schemas.WarmCompletionBody, schemas.WarmChatBody)
        return _plain(await warm_json(self._service, parsed, self._asked(tenant, "")))

    async def status(self) -> dict[str, Any]:
        """As `GET /v1/cpd/status`."""
        return _plain(status_json(await self._service.face.status()))

    async def reset(self, tiers: list[str] | None = None) -> dict[str, int]:
        """As `POST /v1/cpd/cache/reset`; None is all tiers."""
        body = _parse({"tiers": tiers}, schemas.ResetBody)
        assert isinstance(body, schemas.ResetBody)
        dropped = await self._service.face.reset(frozenset(Tier) if body.tiers is None else body.tiers)
        return {str(tier): count for tier, count in dropped.items()}

    async def _job(self, body: Body, tenant: str, request_id: str) -> tuple[Job, Shape]:
        parsed = _parse(body, schemas.CompletionBody, schemas.ChatBody)
        asked = self._asked(tenant, request_id)
        codec = self._service.face.codec
        if isinstance(parsed, schemas.ChatBody):
            job = await self._service.jobs.chat(parsed, asked)
            return job, ChatShape(codec, job.style.logprobs)
        assert isinstance(parsed, schemas.CompletionBody)
        job = await self._service.jobs.completion(parsed, asked)
        return job, CompletionShape(codec, job.style.logprobs)

    def _asked(self, tenant: str, request_id: str) -> Asked:
        fresh = self._service.new_id()
        return Asked(f"call-{harmless(request_id)}-{fresh[:8]}" if request_id else f"call-{fresh}", Caller(tenant))


def _parse(body: Body, kind: type[schemas.B], chat_kind: type[schemas.B] | None = None) -> schemas.B:
    try:
        data = json.dumps(dict(body), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequest("the body must be plain JSON data", code="invalid_json") from error
    return schemas.parse_body(data, kind, chat_kind)


def _plain(content: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(content, str_keys=True)
    return plain

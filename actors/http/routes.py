"""The routes that clients of OpenAI and vLLM know.

Owns the way from a route to the parts that do the work. Invariant: a route reads its body within the limits, and its work ends when its client
leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from actors.http import schemas
from actors.http.face import Face
from actors.http.jobs import Asked, Job, JobMaker, chat_messages
from actors.http.limits import HttpLimits, read_body
from actors.http.openapi import takes
from actors.http.respond import Responder, StreamStyle
from actors.http.shapes import ChatShape, CompletionShape, Shape
from actors.http.sse import EventStream, while_connected
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import InvalidRequest, Unavailable


@dataclass(frozen=True, slots=True)
class Service:
    """What routes work with."""

    face: Face
    jobs: JobMaker
    responder: Responder
    limits: HttpLimits
    wall_s: Callable[[], float]
    new_id: Callable[[], str]

    def asked(self, request: Request, prefix: str) -> Asked:
        """The request's unique id, which contains its `X-Request-Id`, and who sent it."""
        client_id: str = request.state.client_id
        if client_id:
            return Asked(f"{prefix}-{client_id}-{self.new_id()[:8]}", request.state.caller)
        return Asked(f"{prefix}-{request.state.request_id}", request.state.caller)

    async def body(self, request: Request, kind: type[schemas.B], chat_kind: type[schemas.B] | None = None) -> schemas.B:
        return schemas.parse_body(await read_body(request, self.limits), kind, chat_kind)

    async def run(self, request: Request, work: Coroutine[Any, Any, Any]) -> Response:
        """The work's result as JSON; the work is cancelled when the client leaves."""
        return to_json(await while_connected(request.receive, work, timeout_s=self.limits.request_timeout_s))

    async def prompted(
        self, request: Request, prefix: str, *kinds: type[schemas.GenerationBody]
    ) -> tuple[schemas.GenerationBody, Job]:
        """A completion's or a chat's body, whichever it is, and its job."""
        body = await self.body(request, *kinds)
        asked = self.asked(request, prefix)
        if isinstance(body, schemas.ChatBody):
            return body, await self.jobs.chat(body, asked)
        assert isinstance(body, schemas.CompletionBody)
        return body, await self.jobs.completion(body, asked)

    async def answer(self, request: Request, body: schemas.GenerationBody, job: Job, shape: Shape) -> Response:
        created = int(self.wall_s())
        trace = request.headers.get("x-cpd-trace") == "1"
        if not body.stream:
            return await self.run(request, self.responder.whole(job, shape, created=created, trace=trace))
        options = body.stream_options or schemas.StreamOptions()
        style = StreamStyle(
            usage_at_end=bool(options.include_usage),
            usage_always=bool(options.include_usage and options.continuous_usage_stats),
            trace=trace,
        )
        events = self.responder.events(job, shape, created=created, style=style)
        return EventStream(events, timeout_s=self.limits.request_timeout_s, request_id=job.id)


def to_json(content: Any) -> Response:
    """A JSON response of plain data and our dataclasses."""
    return Response(msgspec.json.encode(content), media_type="application/json")


def openai_routes(service: Service) -> APIRouter:
    """Completions, chat, models, tokenising, health."""
    routes = APIRouter()
    started = int(service.wall_s())

    @routes.post("/v1/completions", openapi_extra=takes(schemas.CompletionBody))
    async def completions(request: Request) -> Response:
        body, job = await service.prompted(request, CompletionShape.prefix, schemas.CompletionBody)
        return await service.answer(request, body, job, CompletionShape(service.face.codec, job.style.logprobs))

    @routes.post("/v1/chat/completions", openapi_extra=takes(schemas.ChatBody))
    async def chat_completions(request: Request) -> Response:
        body, job = await service.prompted(request, ChatShape.prefix, schemas.ChatBody)
        return await service.answer(request, body, job, ChatShape(service.face.codec, job.style.logprobs))

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        return to_json({"object": "list", "data": [_card(service, card.id, started) for card in service.face.models()]})

    @routes.get("/v1/models/{name:path}")
    async def model(request: Request, name: str) -> Response:
        return to_json(_card(service, name, started))

    @routes.post("/tokenize", openapi_extra=takes(schemas.TokenizeBody))
    async def tokenize(request: Request) -> Response:
        body = await service.body(request, schemas.TokenizeBody)
        scope = service.jobs.count_request(request.state.caller)
        return await service.run(request, _tokenize(service, body, scope or ""))

    @routes.post("/detokenize", openapi_extra=takes(schemas.DetokenizeBody))
    async def detokenize(request: Request) -> Response:
        body = await service.body(request, schemas.DetokenizeBody)
        service.jobs.card(body.model)
        service.jobs.count_request(request.state.caller)

        async def decode() -> dict[str, str]:
            return {"prompt": await service.face.codec.decode(body.tokens)}

        return await service.run(request, decode())

    @routes.get("/health")
    async def health(request: Request) -> Response:
        if not service.face.healthy():
            raise Unavailable("no request would be answered now")
        return to_json({"status": "ok"})

    return routes


def _card(service: Service, name: str, created: int) -> dict[str, Any]:
    card = service.jobs.card(name)
    base = service.face.models()[0].id
    return {
        "id": card.id,
        "object": "model",
        "created": created,
        "owned_by": "cpd-ray",
        "root": base,
        "parent": base if card.adapter is not None else None,
        "max_model_len": card.max_model_len,
    }


async def _tokenize(service: Service, body: schemas.TokenizeBody, scope: str) -> dict[str, Any]:
    card, codec = service.jobs.card(body.model), service.face.codec
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages must be given", param="prompt")
    timeout_s = service.limits.tokenize_timeout_s
    if body.messages is not None:
        chat = chat_messages(body, service.limits, add_generation_prompt=True)
        special = bool(body.add_special_tokens)
        buffer = await codec.encode(await codec.render(chat), add_special_tokens=special, scope=scope, timeout_s=timeout_s)
    else:
        special = body.add_special_tokens is not False
        buffer = await codec.encode(body.prompt or "", add_special_tokens=special, scope=scope, timeout_s=timeout_s)
    ids = token_buffers.unpack(buffer).tolist()
    names = [codec.token_name(i) for i in ids] if body.return_token_strs else None
    return {"count": len(ids), "max_model_len": card.max_model_len, "tokens": ids, "token_strs": names}

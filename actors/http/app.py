"""The HTTP application: `build_app(face, ...)` gives an ASGI app that speaks OpenAI's API, vLLM's extras and `/v1/cpd/...`.

Owns how the parts are put together. Holds no logic. Invariant: every error, from wherever, leaves through `errors.describe`.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from actors.http.admin import admin_routes
from actors.http.entrance import Entrance
from actors.http.errors import describe
from actors.http.face import Face
from actors.http.identity import KeyRing
from actors.http.jobs import JobMaker
from actors.http.limits import HttpLimits
from actors.http.openapi import with_body_schemas
from actors.http.rates import TenantRates
from actors.http.respond import Responder
from actors.http.routes import Service, openai_routes
from cpd_ray.clock import Clock, SystemClock
from cpd_ray.errors import CPDError


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """`keys` None: no identity, everyone is one tenant. `salt_secret`: mixed into derived cache salts; the same in every router."""

    limits: HttpLimits = field(default_factory=HttpLimits)
    keys: KeyRing | None = None
    salt_secret: bytes = b""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    cors_origins: tuple[str, ...] = ()


def make_service(
    face: Face,
    settings: HttpSettings,
    *,
    clock: Clock | None = None,
    wall_s: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> Service:
    """What routes and handle calls alike work with. `wall_s`: seconds since 1970, for `created`. `rng`: where request ids come from."""
    clock = clock or SystemClock()
    source = rng or random.SystemRandom()
    rates = TenantRates(settings.requests_per_minute, settings.tokens_per_minute, clock)
    maker = JobMaker(face, settings.limits, rates, settings.salt_secret, clock)

    def new_id() -> str:
        return f"{source.getrandbits(96):024x}"

    return Service(face, maker, Responder(face, rates), settings.limits, wall_s, new_id)


def build_app(
    face: Face,
    settings: HttpSettings | None = None,
    *,
    clock: Clock | None = None,
    wall_s: Callable[[], float] = time.time,
    rng: random.Random | None = None,
) -> ASGIApp:
    """The whole face; see `make_service`."""
    settings = settings or HttpSettings()
    return app_of(make_service(face, settings, clock=clock, wall_s=wall_s, rng=rng), settings)


def app_of(service: Service, settings: HttpSettings) -> ASGIApp:
    """The routes over a service that others may use too."""
    app = FastAPI(title="CPD on Ray", version="1", docs_url=None, redoc_url=None)
    app.include_router(openai_routes(service))
    app.include_router(admin_routes(service))
    app.add_exception_handler(HTTPException, _answer)
    app.add_exception_handler(CPDError, _answer)
    app.add_exception_handler(Exception, _answer)
    with_body_schemas(app)
    guarded: ASGIApp = Entrance(app, settings.keys, settings.limits, service.new_id)
    if settings.cors_origins:
        guarded = CORSMiddleware(guarded, allow_origins=settings.cors_origins, allow_methods=["GET", "POST"], allow_headers=["*"])
    return guarded


async def _answer(request: Request, error: Exception) -> Response:
    return describe(error).response()

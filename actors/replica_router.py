"""The router's replica: HTTP ingress and handle face over one `Router`.

Owns nothing but the shell. Invariant: HTTP requests and handle calls go through the same jobs, limits and router.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors import build
from actors.fleet import Fleet
from actors.http.app import HttpSettings, app_of, make_service
from actors.http.direct import HandleFace
from actors.http.identity import KeyRing
from actors.http.limits import HttpLimits
from actors.membership import Membership, Roster
from actors.names import Names
from actors.observability.http import CountErrors
from actors.observability.observer import EXPORT_S, Observer
from actors.observability.samples import router_samples
from actors.observability.table import Side
from actors.ray_handles import own_replica_id
from actors.replicas import Periodic, roster_of
from actors.router import Router, Surroundings
from actors.router_face import RouterFace
from actors.text.codec import TextCodec
from cpd_ray.clock import SystemClock
from cpd_ray.config import CPDConfig, HttpConfig, load, load_runtime
from cpd_ray.errors import ConfigError
from kv.directory import Directory

log = logging.getLogger(__name__)


class DirectoryFeed:
    """The router's copy of the directory follows the directory's replica. When that can't be reached the copy stays as it was: stale
    entries cost a recompute."""

    def __init__(self, directory: Directory, handle: DeploymentHandle[Any], *, timeout_s: float = 2.0) -> None:
        self._directory = directory
        self._handle = handle.options(_by_reference=False)
        self._timeout_s = timeout_s

    async def refresh(self, roster: Roster, *, at_once: bool = False) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                if at_once:
                    await self._handle.refresh.remote()
                self._directory.follow(await self._handle.page.remote(list(self._directory.positions())))
        except Exception as error:
            log.warning("the directory does not answer: %s", type(error).__name__)


class RouterReplica:
    """`serve.ingress()` is applied in `serve_app`."""

    async def __init__(self, config: dict[str, Any], *graph: object) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = load(config)
        names = Names(self._config.name)
        facts = await asyncio.to_thread(build.facts_of, self._config)
        model = build.served_model(self._config, facts)
        codec = await asyncio.to_thread(TextCodec.load, build.model_folder(self._config))
        clock = SystemClock()
        labels = {"app": self._config.name, "model": model.name, "role": "router"}
        self._observer = Observer.of_replica(Side.ROUTER, clock, **labels, actor=own_replica_id())
        fleet = Fleet(own_replica_id(), clock, bytes_per_token=model.kv_bytes_per_token)
        directory = Directory(clock=clock)
        feed = DirectoryFeed(directory, serve.get_deployment_handle(names.directory, names.kv_app))
        membership = Membership(roster_of(self._config), fleet, feed)
        around = Surroundings(membership, fleet, directory, clock)
        self.router = Router(model, around, self._config.runtime, routers=self._config.routers)
        settings = http_settings(self._config)
        self._observed = self._observer.face(RouterFace(self.router, fleet, directory, codec), fleet)
        service = make_service(self._observed, settings, clock=clock)
        self.face = HandleFace(service)
        self._app = CountErrors(app_of(service, settings), self._observer.meter)
        await membership.start()
        self._exporting = Periodic("metrics", self._export, EXPORT_S)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return self._app

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """New runtime knobs from the next decision on."""
        self.router.reconfigure(load_runtime(user_config))

    async def generate(self, body: dict[str, Any], tenant: str = "", request_id: str = "") -> dict[str, Any]:
        """An OpenAI-shaped request body (`prompt` or `messages`); the whole response object."""
        return await self.face.generate(body, tenant, request_id)

    async def stream(self, body: dict[str, Any], tenant: str = "", request_id: str = "") -> AsyncGenerator[dict[str, Any], None]:
        """The same, as chunk objects; closing it aborts the request."""
        async with contextlib.aclosing(self.face.stream(body, tenant, request_id)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def plan(self, body: dict[str, Any], tenant: str = "") -> dict[str, Any]:
        """As `POST /v1/cpd/plan`."""
        return await self.face.plan(body, tenant)

    async def warm(self, body: dict[str, Any], tenant: str = "") -> dict[str, Any]:
        """As `POST /v1/cpd/warm`."""
        return await self.face.warm(body, tenant)

    async def status(self) -> dict[str, Any]:
        """As `GET /v1/cpd/status`."""
        return await self.face.status()

    async def reset(self, tiers: list[str] | None = None) -> dict[str, int]:
        """As `POST /v1/cpd/cache/reset`."""
        return await self.face.reset(tiers)

    async def __del__(self) -> None:
        if hasattr(self, "_exporting"):
            await self._exporting.stop()
        if hasattr(self, "router"):
            await self.router.close()

    async def _export(self) -> None:
        self._observer.export(router_samples(await self._observed.status()))


def http_settings(config: CPDConfig) -> HttpSettings:
    """Limits and identity for the HTTP face. Raises ConfigError for a key file that can't be read."""
    http: HttpConfig = config.http
    keys = None
    if http.api_keys_file is not None:
        try:
            keys = KeyRing.parse(Path(http.api_keys_file).read_text())
        except OSError as error:
            raise ConfigError(f"http.api_keys_file: can't be read ({error.strerror})") from error
    return HttpSettings(
        limits=HttpLimits(
            body_bytes=http.max_body_bytes,
            prompts=http.max_prompts,
            n=http.max_n,
            stops=http.max_stop,
            request_timeout_s=http.request_timeout_s,
        ),
        keys=keys,
        salt_secret=os.environ.get("CPD_SALT_SECRET", "").encode(),
        requests_per_minute=http.requests_per_minute,
        tokens_per_minute=http.tokens_per_minute,
    )

"""The Serve deployments' classes: thin shells that build the plain classes inside a replica and forward calls to them.

Owns what is Ray's about an actor: which node it is on, how it finds the others, its periodic tick, its health. Decorators are applied in
`serve_app`. Invariant: a replica's constructor returns only when a request sent to it would be answered.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from typing import Any, TypeVar

import ray
from ray import serve

from actors.names import Names
from actors.ray_handles import ServeRoster
from cpd_ray.config import CPDConfig
from cpd_ray.ids import NodeId
from cpd_ray.types import Role
from kv.node import KvNode

log = logging.getLogger(__name__)
C = TypeVar("C", bound=type)


def facing(protocol: type) -> Callable[[C], C]:
    """Class decorator: the protocol's methods, each forwarding to `self.face`; Serve calls methods of the class by name."""

    def add(cls: C) -> C:
        for name, function in inspect.getmembers(protocol, inspect.isfunction):
            if not name.startswith("_") and name not in cls.__dict__:
                setattr(cls, name, _forward(name, streams=not inspect.iscoroutinefunction(function)))
        return cls

    return add


def _forward(name: str, *, streams: bool) -> Callable[..., Any]:
    async def call(self: Any, *arguments: Any) -> Any:
        return await getattr(self.face, name)(*arguments)

    async def stream(self: Any, *arguments: Any) -> AsyncGenerator[Any, None]:
        items = getattr(self.face, name)(*arguments)
        try:
            async for item in items:
                yield item
        finally:
            await items.aclose()

    chosen: Callable[..., Any] = stream if streams else call
    chosen.__name__ = name
    return chosen


def this_node() -> NodeId:
    """Ray's id of the node that this process runs on."""
    return NodeId(ray.get_runtime_context().get_node_id())


def new_epoch() -> int:
    """Larger than that of any earlier life of this replica: nanoseconds since 1970, used as a number only."""
    return time.time_ns()


def roster_of(config: CPDConfig, *, workers: bool = True) -> ServeRoster:
    """Everyone of this system, as far as they are there; a role that has no deployment has no workers."""
    names = Names(config.name)
    roles = list(Role) if workers else []
    handles = {role: serve.get_deployment_handle(names.worker(role), names.app) for role in roles}
    return ServeRoster(handles, serve.get_deployment_handle(names.kv_cache, names.kv_app))


class LiveNodes(Mapping[NodeId, KvNode]):
    """The roster's nodes at the moment of asking."""

    def __init__(self, roster: ServeRoster) -> None:
        self._roster = roster

    def __getitem__(self, node: NodeId) -> KvNode:
        return self._roster.nodes()[node]

    def __iter__(self) -> Iterator[NodeId]:
        return iter(self._roster.nodes())

    def __len__(self) -> int:
        return len(self._roster.nodes())


class Periodic:
    """Runs `work` every `interval_s` until stopped; a failure is logged, and the next turn tries again."""

    def __init__(self, name: str, work: Callable[[], Awaitable[None]], interval_s: float) -> None:
        self._name = name
        self._work = work
        self._interval_s = interval_s
        self._task = asyncio.get_running_loop().create_task(self._run(), name=name)

    @property
    def alive(self) -> bool:
        return not self._task.done()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._work()
            except Exception:
                log.exception("%s failed", self._name)
            await asyncio.sleep(self._interval_s)

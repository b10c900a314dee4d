"""Replicas of the worker roles: a worker, the mapping of its node's slab, and their upkeep.

Owns nothing but the shell. Invariant: the slab that is mapped is the one whose books are kept by the node's present KV-cache replica;
between two such replicas nothing is mapped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from ray import serve

from actors import build
from actors.clients import DecodeClient, PrefillClient
from actors.decode import DecodeWorker
from actors.local.clients import LocalDecode, LocalPrefill
from actors.names import Names
from actors.observability.observer import EXPORT_S, Observer
from actors.observability.table import Side
from actors.prefill import PrefillWorker
from actors.ray_handles import own_worker_id
from actors.ray_kv import shared_slab, slab_replica
from actors.ray_store import attach
from actors.replicas import LiveNodes, Periodic, facing, new_epoch, roster_of, this_node
from actors.worker import Identity
from cpd_ray.clock import SystemClock
from cpd_ray.config import RuntimeConfig, load, load_runtime
from cpd_ray.errors import CPDError
from cpd_ray.types import Role
from kv.sides import SlabSide

log = logging.getLogger(__name__)
TICK_S = 0.1
MAP_S = 1.0
FIRST_MAP_S = 60.0
"""How long a starting worker waits for its node's KV cache before it serves without one (and maps it when it comes)."""


class WorkerReplica:
    """What both kinds share. `role` is the deployment's."""

    role: Role

    async def __init__(self, config: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = load(config)
        self._roster = roster_of(self._config, workers=False)
        names = Names(self._config.name)
        self._kv = serve.get_deployment_handle(names.kv_cache, names.kv_app)
        self._node = this_node()
        self._mapped: str | None = None
        nodes = LiveNodes(self._roster)
        identity = Identity(own_worker_id(), self.role, self._node, new_epoch(), self._config.model.name)
        side, clock = build.NodeSide(None, nodes), SystemClock()
        labels = {"app": self._config.name, "model": self._config.model.name, "role": self.role}
        self._observer = Observer.of_replica(Side.WORKER, clock, **labels, actor=identity.worker)
        self._built = await asyncio.to_thread(build.make_worker, self._config, identity, side, clock, self._observer.transport)
        self.worker = self._built.worker
        self.face = self._face()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_MAP_S):
                while self._mapped is None:
                    await self._map()
                    await asyncio.sleep(TICK_S)
        await self.worker.start()
        self._ticking = Periodic("tick", self._tick, TICK_S)
        self._mapping = Periodic("map", self._map, MAP_S)
        self._exporting = Periodic("metrics", self._export, EXPORT_S)

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """New runtime knobs; what runs goes on."""
        runtime = load_runtime(user_config)
        self._apply(runtime)

    async def check_health(self) -> None:
        if not (self.worker.healthy and self._ticking.alive and self._mapping.alive):
            raise RuntimeError("the worker's engine or upkeep has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_exporting"):
            await self.worker.drain()
            await self._ticking.stop()
            await self._mapping.stop()
            await self._exporting.stop()
            await self.worker.stop()

    def _face(self) -> Any:
        if isinstance(self._built, DecodeWorker):
            return self._observer.decode(LocalDecode(self._built))
        return self._observer.prefill(LocalPrefill(self._built))

    def _apply(self, runtime: RuntimeConfig) -> None:
        self.worker.engine.reconfigure(runtime.engine)
        if isinstance(self._built, PrefillWorker):
            self._built.bounce_tokens = runtime.routing.bounce_tokens

    async def _tick(self) -> None:
        self.worker.tick()

    async def _export(self) -> None:
        self._observer.export_worker(self.worker)

    async def _map(self) -> None:
        """Follow the node's KV-cache replica: unmap when it is gone, map the slab of a new one."""
        replica_id = slab_replica(self._kv, self._node)
        if replica_id == self._mapped:
            return
        if self._mapped is not None:
            self._mapped = None
            self.worker.tiers.remap(None)
        node = self._roster.nodes().get(self._node)
        if replica_id is None or node is None:
            return
        try:
            slab, epoch = await shared_slab(self._kv, replica_id)
            memory = await asyncio.to_thread(attach, slab)
        except CPDError as error:
            log.warning("the node's slab can't be mapped: %s", error)
            return
        self.worker.tiers.remap(SlabSide(node, memory, epoch))
        self._mapped = replica_id
        for other in self._roster.nodes().values():
            try:
                await self.worker.connect(await other.describe())
            except CPDError as error:
                log.info("a node's cache can't be reached yet: %s", error)


@facing(PrefillClient)
class PrePrefillReplica(WorkerReplica):
    role = Role.PRE_PREFILL


@facing(PrefillClient)
class PrefillReplica(WorkerReplica):
    role = Role.PREFILL


@facing(DecodeClient)
class DecodeReplica(WorkerReplica):
    role = Role.DECODE

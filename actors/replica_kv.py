"""Replicas of the application `cpd-kv`: a KV cache on each node, and the directory that follows all of them and all workers.

Owns nothing but the shells. Invariant: a node's slab lies in that node's object store, and lives exactly as long as its replica.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray

from actors import build
from actors.membership import SourceFeed
from actors.names import Names
from actors.observability.observer import EXPORT_S, Observer
from actors.observability.samples import node_samples
from actors.observability.table import Side
from actors.ray_kv import replica_is_dead
from actors.ray_store import StoreSlab, create_after_predecessor
from actors.replicas import Periodic, facing, new_epoch, roster_of, this_node
from cpd_ray.clock import SystemClock
from cpd_ray.config import load, slab_bytes
from cpd_ray.errors import ConfigError, CPDError, PeerGone
from cpd_ray.ids import NodeId
from cpd_ray.messages import EventsAfter, EventsPage
from cpd_ray.types import Role
from kv.directory import Directory
from kv.node import KvNode

log = logging.getLogger(__name__)
TICK_S = 0.1
PEERS_S = 1.0
FOLLOW_S = 0.1


@facing(KvNode)
class KvCacheReplica:
    """One a node. `face` is the node's cache."""

    async def __init__(self, config: dict[str, Any], *graph: object) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = load(config)
        facts = await asyncio.to_thread(build.facts_of, self._config)
        layout = build.layout_of(self._config, facts)
        node, epoch = this_node(), new_epoch()
        slots = slab_bytes(self._config, object_store_bytes(node)) // layout.block_bytes
        if slots < 2:
            raise ConfigError(f"slab.gib: the slab would hold {slots} blocks of {layout.block_bytes} bytes; make it larger")
        extent_slots = max(1, self._config.slab.extent_mib * 2**20 // layout.block_bytes)
        slab, memory = await create_after_predecessor(layout.block_bytes, slots, extent_slots)
        self._slab = (slab, epoch)
        digest = build.layout_digest(self._config, facts)
        clock, peer = SystemClock(), f"{self._config.name}-slab-{node[:12]}"
        labels = {"app": self._config.name, "model": self._config.model.name, "role": "kv_cache"}
        self._observer = Observer.of_replica(Side.NODE, clock, **labels, actor=peer)
        made = await asyncio.to_thread(build.make_transport, self._config, peer, digest)
        transport = self._observer.transport(made)
        self.face = await asyncio.to_thread(build.make_node, self._config, node, memory, transport, epoch=epoch, clock=clock)
        self.node = node
        self._transport = transport
        self._roster = roster_of(self._config)
        self._met: dict[NodeId, KvNode] = {}
        self._ticking = Periodic("tick", self._tick, TICK_S)
        self._meeting = Periodic("peers", self._meet_peers, PEERS_S)
        self._exporting = Periodic("metrics", self._export, EXPORT_S)

    async def shared_slab(self) -> tuple[StoreSlab, int]:
        """The slab's extents and its epoch, for workers of this node to map. By reference only."""
        return self._slab

    async def check_health(self) -> None:
        if not (self._ticking.alive and self._meeting.alive):
            raise RuntimeError("the KV cache's periodic work has ended")

    async def __del__(self) -> None:
        if hasattr(self, "_exporting"):
            await self._ticking.stop()
            await self._meeting.stop()
            await self._exporting.stop()
            await self.face.close()
            await asyncio.to_thread(self._transport.close)

    async def _tick(self) -> None:
        self.face.tick()

    async def _export(self) -> None:
        self._observer.export(node_samples(await self.face.report()))

    async def _meet_peers(self) -> None:
        """Learn who came, forget who left, free what dead writers had reserved."""
        nodes = {node: client for node, client in self._roster.nodes().items() if node != self.node}
        for node in self._met.keys() - nodes.keys():
            del self._met[node]
            self.face.forget_node(node)
        for node, client in nodes.items():
            if self._met.get(node) is client:
                continue
            try:
                peer = await client.describe()
                await asyncio.to_thread(self.face.connect_node, peer, client)
                self._met[node] = client
            except (PeerGone, TimeoutError) as error:
                log.info("the cache of node %s is not there yet: %s", node, error)
        await self._bury_writers()

    async def _bury_writers(self) -> None:
        """A silent writer's slots stay quarantined until its process is known dead."""
        names = Names(self._config.name)
        for writer in self.face.slab.silent_writers():
            if await asyncio.to_thread(replica_is_dead, names.app, [names.worker(role) for role in Role], writer):
                await self.face.writer_gone(writer)


def object_store_bytes(node: NodeId) -> int:
    """Capacity of a node's object store. Raises ConfigError when Ray does not know the node."""
    for known in ray.nodes():
        if known["NodeID"] == node:
            return int(known["Resources"].get("object_store_memory", 0))
    raise ConfigError(f"Ray knows no node {node}")


class DirectoryReplica:
    """Follows every pool and slab; routers follow it. `graph`: what Serve deploys with it."""

    async def __init__(self, config: dict[str, Any], *graph: object) -> None:  # type: ignore[misc]  # Serve awaits it
        self._config = load(config)
        self._directory = Directory(clock=SystemClock())
        self._feed = SourceFeed(self._directory)
        self._roster = roster_of(self._config)
        self._following = Periodic("follow", self._follow, FOLLOW_S)

    async def page(self, positions: list[EventsAfter]) -> EventsPage:
        """All that a follower at `positions` lacks."""
        try:
            return self._directory.page(positions)
        except CPDError:
            raise
        except Exception as error:
            raise CPDError("the directory failed to answer") from error

    async def refresh(self) -> None:
        """Follow everyone now."""
        await self._feed.refresh(self._roster)

    async def check_health(self) -> None:
        if not self._following.alive:
            raise RuntimeError("the directory has stopped following")

    async def __del__(self) -> None:
        if hasattr(self, "_following"):
            await self._following.stop()

    async def _follow(self) -> None:
        await self._feed.refresh(self._roster)

"""A process of a local cluster: one node's KV cache, or one worker. Reads its spec from the first line of stdin, says `ready` on stdout.

Invariant: it ends when its stdin closes, so it never outlives whoever started it, however that one died.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from typing import Any

import msgspec

from actors import build
from actors.clients import DecodeClient, PrefillClient
from actors.decode import DecodeWorker
from actors.kv_cache import KvCacheNode
from actors.local.clients import LocalDecode, LocalPrefill
from actors.local.spec import NodeSpec, Peers, ProcessSpec, SlabHost, WorkerSpec
from actors.local.wire import Connection, serve
from actors.worker import Identity, Worker
from cpd_ray.clock import SystemClock
from cpd_ray.config import load
from cpd_ray.errors import PeerGone
from cpd_ray.ids import NodeId
from kv.node import KvNode
from kv.shared import SharedSlab, attach, create
from kv.sides import SlabSide

log = logging.getLogger(__name__)
TICK_S = 0.1
READY = os.dup(1)
"""Our own way to whoever started us; what libraries print on stdout goes to stderr."""
os.dup2(2, 1)


class _SlabHost:
    def __init__(self, slab: SharedSlab) -> None:
        self._slab = slab

    async def shared_slab(self) -> SharedSlab:
        return self._slab


def connect_all(sockets: Peers) -> dict[NodeId, Connection]:
    return {node: Connection(socket, PeerGone) for node, socket in sockets.items()}


async def run_node(spec: NodeSpec) -> None:
    """Serve one node's slab until stdin closes."""
    config = load(spec.config)
    facts = build.facts_of(config)
    layout = build.layout_of(config, facts)
    slab, memory = create(
        layout.block_bytes, spec.slab_slots, spec.epoch, max(1, config.slab.extent_mib * 2**20 // layout.block_bytes)
    )
    transport = build.make_transport(config, f"slab-{spec.node}", build.layout_digest(config, facts))
    cache = build.make_node(config, spec.node, memory, transport, epoch=spec.epoch, clock=SystemClock())
    server = await serve(spec.socket, {KvNode: cache, SlabHost: _SlabHost(slab)})
    peers = {node: connection.client(KvNode, node=node) for node, connection in connect_all(spec.peers).items()}
    ticking = asyncio.create_task(_tick_node(cache, peers))
    await _until_stdin_closes()
    ticking.cancel()
    await server.stop(0)
    await cache.close()
    await asyncio.to_thread(transport.close)


async def _tick_node(cache: KvCacheNode, peers: dict[NodeId, KvNode]) -> None:
    waiting = dict(peers)
    while True:
        for node, client in list(waiting.items()):
            try:
                await asyncio.to_thread(cache.connect_node, await client.describe(), client)
                del waiting[node]
            except PeerGone:
                log.debug("node %s is not up yet", node)
        cache.tick()
        await asyncio.sleep(TICK_S)


async def run_worker(spec: WorkerSpec) -> None:
    """Serve one worker until stdin closes."""
    config = load(spec.config)
    connections = connect_all(spec.nodes)
    nodes = {node: connection.client(KvNode, node=node) for node, connection in connections.items()}
    slab = await connections[spec.node].client(SlabHost).shared_slab()
    own = SlabSide(nodes[spec.node], attach(slab), slab.epoch)
    identity = Identity(spec.worker, spec.role, spec.node, spec.epoch, config.model.name)
    worker = build.make_worker(config, identity, build.NodeSide(own, nodes), SystemClock())
    await worker.worker.start()
    service: dict[type, Any] = (
        {DecodeClient: LocalDecode(worker)} if isinstance(worker, DecodeWorker) else {PrefillClient: LocalPrefill(worker)}
    )
    server = await serve(spec.socket, service)
    ticking = asyncio.create_task(_tick_worker(worker.worker))
    await _until_stdin_closes()
    ticking.cancel()
    await server.stop(0)
    await worker.worker.stop()


async def _tick_worker(worker: Worker) -> None:
    while True:
        worker.tick()
        await asyncio.sleep(TICK_S)


async def _until_stdin_closes() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    os.write(READY, b"ready\n")
    while await reader.read(4096):
        pass


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {os.getpid()} %(name)s %(levelname)s %(message)s")
    # unbuffered, so that what follows the first line is still there for the reader that waits for the end
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    spec = msgspec.json.decode(bytes(line), type=ProcessSpec)
    if spec.node is not None:
        asyncio.run(run_node(spec.node))
    elif spec.worker is not None:
        asyncio.run(run_worker(spec.worker))


if __name__ == "__main__":
    main()

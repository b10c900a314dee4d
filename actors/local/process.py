"""A process of a local cluster: one node's KV cache, or one worker. Reads its spec from the first line of stdin, says `ready` on stdout.

Invariant: it ends when its stdin closes, so it never outlives whoever started it, however that one died; if it can't end in good order
within END_S, it says where it hangs and ends all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import sys
from collections.abc import Coroutine
from typing import Any, NoReturn

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
from cpd_ray.errors import KVError, PeerGone
from cpd_ray.ids import NodeId
from kv.node import KvNode
from kv.shared import SharedSlab, attach, create
from kv.sides import SlabSide

log = logging.getLogger(__name__)
TICK_S = 0.1
END_S = 15.0
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
    await _until_stdin_closes(_tick_node(cache), _meet(cache, peers))
    await server.stop(0)
    await cache.close()
    await asyncio.to_thread(transport.close)


async def _tick_node(cache: KvCacheNode) -> None:
    while True:
        cache.tick()
        await asyncio.sleep(TICK_S)


async def _meet(cache: KvCacheNode, peers: dict[NodeId, KvNode]) -> None:
    """Connect to the other nodes as they come up."""
    waiting = dict(peers)
    while waiting:
        for node, client in list(waiting.items()):
            try:
                await asyncio.to_thread(cache.connect_node, await client.describe(), client)
                del waiting[node]
            except KVError as error:
                log.debug("node %s is not up yet: %s", node, error)
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
    await _until_stdin_closes(_tick_worker(worker.worker))
    await server.stop(0)
    await worker.worker.stop()


async def _tick_worker(worker: Worker) -> None:
    while True:
        worker.tick()
        await asyncio.sleep(TICK_S)


async def _until_stdin_closes(*beside: Coroutine[Any, Any, None]) -> None:
    """Say `ready` and do what is to be done `beside`, until stdin closes; an error of those is raised here."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    os.write(READY, b"ready\n")
    async with contextlib.AsyncExitStack() as stack:
        tasks = [asyncio.create_task(coroutine) for coroutine in beside]
        for task in tasks:
            stack.callback(task.cancel)
        end = asyncio.create_task(_end_of(reader))
        stack.callback(end.cancel)
        while not end.done():
            await asyncio.wait({end, *tasks}, return_when=asyncio.FIRST_COMPLETED)
            for task in [task for task in tasks if task.done()]:
                task.result()
                tasks.remove(task)
    faulthandler.dump_traceback_later(END_S, exit=True)


async def _end_of(reader: asyncio.StreamReader) -> None:
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
    _leave()


def _leave() -> NoReturn:
    """All is closed. The interpreter would take a second of CPU to take torch's modules apart, which is many when all processes end at
    once on a busy machine."""
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()

"""A CPD cluster of plain processes on this machine, without Ray: KV caches and workers as children, the router here.

Owns the children and their sockets. Invariant: leaving the context ends every child and removes every socket, on every path; children
also end by themselves when this process dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

import msgspec

from actors import build
from actors.clients import DecodeClient, PrefillClient
from actors.fleet import Client, Fleet
from actors.local.spec import NodeSpec, ProcessSpec, WorkerSpec
from actors.local.wire import Connection
from actors.membership import Membership, SourceFeed
from actors.router import Router, Surroundings
from cpd_ray.clock import SystemClock
from cpd_ray.config import CPDConfig
from cpd_ray.errors import ModelUnavailable, PeerGone, WorkerGone
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import Role
from kv.directory import Directory
from kv.node import KvNode

log = logging.getLogger(__name__)
ROOT = str(Path(__file__).resolve().parents[2])
QUIET = {"NIXL_LOG_LEVEL": "WARN", "GRPC_VERBOSITY": "ERROR", "TRANSFORMERS_VERBOSITY": "error"}
START_S = 180.0
STOP_S = 20.0
DEFAULT_SLAB_MIB = 512


@dataclass(frozen=True, slots=True)
class NodePlan:
    """A node of the local cluster and the roles of its workers."""

    name: str
    roles: tuple[Role, ...]


TWO_NODES = (NodePlan("n0", (Role.PRE_PREFILL,)), NodePlan("n1", (Role.PREFILL, Role.DECODE)))
"""Cold prompts on one node, warm ones and decode on the other: so that all three tiers are real."""


@dataclass(slots=True)
class _Child:
    """`serving`: it has said that it is ready; before that it has nothing to put in order."""

    process: asyncio.subprocess.Process
    spec: ProcessSpec
    serving: bool = False


class LocalCluster:
    """`async with LocalCluster(config) as cluster: async for chunk in cluster.router.generate(...)`."""

    def __init__(self, config: CPDConfig, nodes: Sequence[NodePlan] = TWO_NODES, *, slab_mib: int | None = None) -> None:
        self.config = config
        self._plans = tuple(nodes)
        self._slab_bytes = (slab_mib or int((config.slab.gib or 0) * 1024) or DEFAULT_SLAB_MIB) * 2**20
        self._folder = Path(tempfile.mkdtemp(prefix="cpd-"))
        self._children: dict[str, _Child] = {}
        self._connections: dict[str, Connection] = {}
        self._nodes: dict[NodeId, KvNode] = {}
        self._workers: dict[WorkerId, Client] = {}
        self._epoch = 1
        self.clock = SystemClock()
        self.directory = Directory(clock=self.clock)
        self.router: Router

    # -- what membership asks ----------------------------------------------------------------------------------------

    def workers(self) -> Mapping[WorkerId, Client]:
        return self._workers

    def nodes(self) -> Mapping[NodeId, KvNode]:
        return self._nodes

    # -- life --------------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> LocalCluster:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            await self.router.close()
        finally:
            await self._stop()

    async def _start(self) -> None:
        facts = build.facts_of(self.config)  # prepares the model once, before the children all want it
        layout = build.layout_of(self.config, facts)
        config = self.config.model_dump(mode="json")
        sockets = {NodeId(p.name): str(self._folder / f"{p.name}.kv") for p in self._plans}
        specs: list[ProcessSpec] = []
        for plan in self._plans:
            node = NodeId(plan.name)
            peers = {n: s for n, s in sockets.items() if n != node}
            slots = self._slab_bytes // layout.block_bytes
            specs.append(ProcessSpec(node=NodeSpec(node, sockets[node], config, slots, self._epoch, peers)))
        await self._spawn_all(specs)
        workers = []
        for plan in self._plans:
            for index, role in enumerate(plan.roles):
                name = WorkerId(f"{plan.name}-{role.replace('_', '-')}-{index}")
                socket = str(self._folder / f"{name}.sock")
                workers.append(ProcessSpec(worker=WorkerSpec(name, role, NodeId(plan.name), socket, config, self._epoch, sockets)))
        await self._spawn_all(workers)
        await self._introduce(list(self._workers))
        fleet = Fleet("router", self.clock, bytes_per_token=layout.bytes_per_token)
        membership = Membership(self, fleet, SourceFeed(self.directory))
        around = Surroundings(membership, fleet, self.directory, self.clock)
        self.router = Router(build.served_model(self.config, facts), around, self.config.runtime, seeds=random.Random(0))
        await membership.start()

    async def _introduce(self, workers: Sequence[WorkerId]) -> None:
        """They meet whom they may read from, before the first request does."""
        clients = (*self._nodes.values(), *self._workers.values())
        described = await asyncio.gather(*(client.describe() for client in clients), return_exceptions=True)
        peers = [peer for peer in described if not isinstance(peer, (WorkerGone, PeerGone))]
        for worker in workers:
            for peer in peers:
                if isinstance(peer, BaseException):
                    raise peer
                if peer.peer != worker:
                    await self._workers[worker].connect(peer)

    async def _spawn_all(self, specs: Sequence[ProcessSpec]) -> None:
        """Raises the first one's error once all have started or failed, so that none is on its way when the cluster is taken down."""
        for outcome in await asyncio.gather(*(self._spawn(s) for s in specs), return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def _spawn(self, spec: ProcessSpec) -> None:
        part = spec.node or spec.worker
        assert part is not None, "an empty spec"
        name = str(spec.worker.worker if spec.worker else part.node)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "actors.local.process", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": ROOT, **QUIET},
        )  # fmt: skip
        child = self._children[name] = _Child(process, spec)
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(spec) + b"\n")
        async with asyncio.timeout(START_S):
            if await process.stdout.readline() != b"ready\n":
                raise ModelUnavailable(f"{name} ended while starting; its error is above")
        child.serving = True
        connection = Connection(part.socket, WorkerGone if spec.worker else PeerGone)
        self._connections[name] = connection
        if spec.worker is None:
            self._nodes[part.node] = connection.client(KvNode, node=part.node)
        else:
            protocol: type[Client] = DecodeClient if spec.worker.role is Role.DECODE else PrefillClient
            self._workers[spec.worker.worker] = connection.client(protocol)

    async def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal to a worker's or node's process (for tests of what then happens)."""
        child = self._children[name]
        child.process.send_signal(how)
        if how is signal.SIGKILL:
            await child.process.wait()
            if child.spec.worker is not None:
                for node in self._nodes.values():
                    with contextlib.suppress(PeerGone):
                        await node.writer_gone(name)

    async def revive(self, name: str) -> None:
        """Start a killed worker anew under its old name. (A node doesn't come back: its workers map the memory of its first life.)"""
        old = self._children.pop(name).spec.worker
        assert old is not None, "only workers come back"
        del self._workers[old.worker]
        await self._connections.pop(name).close()
        await asyncio.to_thread(Path(old.socket).unlink, missing_ok=True)
        self._epoch += 1
        await self._spawn(ProcessSpec(worker=replace(old, epoch=self._epoch)))
        await self._introduce([old.worker])
        await self.router.membership.refresh()

    async def _stop(self) -> None:
        for connection in self._connections.values():
            await connection.close()
        await asyncio.gather(*(self._end(child) for child in self._children.values()))
        self._children.clear()
        self._workers.clear()
        self._nodes.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _end(self, child: _Child) -> None:
        process = child.process
        if process.stdin is not None:
            process.stdin.close()
        try:
            async with asyncio.timeout(STOP_S if child.serving else 0):
                await process.wait()
        except TimeoutError:
            if child.serving:
                log.warning("process %d does not end; killing it", process.pid)
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

"""What a process of a local cluster is told when it starts, and the service by which it is known ready.

Invariant: a spec is all that a process needs; it inherits nothing but its standard streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import Role
from kv.shared import SharedSlab


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A KV-cache process: `config` as YAML-able mapping; `peers`: sockets of the other nodes' caches."""

    node: NodeId
    socket: str
    config: dict[str, Any]
    slab_slots: int
    epoch: int
    peers: dict[NodeId, str]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker process: `nodes`: sockets of all caches, its own node's among them."""

    worker: WorkerId
    role: Role
    node: NodeId
    socket: str
    config: dict[str, Any]
    epoch: int
    nodes: dict[NodeId, str]


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One of the two."""

    node: NodeSpec | None = None
    worker: WorkerSpec | None = None


class SlabHost(Protocol):
    """How workers of a node find the bytes of its slab."""

    async def shared_slab(self) -> SharedSlab: ...


class Starter(Protocol):
    """`meet`: called once all processes are up, so that they learn each other before the first request."""

    async def meet(self) -> None: ...

    async def drain(self) -> None: ...

"""What a process of a local cluster is told when it starts.

Invariant: a spec is all that a process needs; it inherits nothing but its standard streams.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import Role
from kv.shared import SharedSlab

Peers: TypeAlias = dict[NodeId, str]
"""Sockets of KV caches by node."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A KV-cache process: `config` as a YAML-able mapping; `peers`: the other nodes' caches."""

    node: NodeId
    socket: str
    config: dict[str, Any]
    slab_slots: int
    epoch: int
    peers: Peers


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker process: `nodes`: all caches, its own node's among them."""

    worker: WorkerId
    role: Role
    node: NodeId
    socket: str
    config: dict[str, Any]
    epoch: int
    nodes: Peers


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One of the two."""

    node: NodeSpec | None = None
    worker: WorkerSpec | None = None


class SlabHost(Protocol):
    """How workers of a node find the bytes of its slab."""

    async def shared_slab(self) -> SharedSlab: ...

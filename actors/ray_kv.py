"""What workers and KV caches need to know of each other as Ray actors: whose slab is on this node, and which writer's process has ended.

Owns these two questions. Invariant: "dead" is said only of a process whose actor Ray has given up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import ray
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.constants import SERVE_NAMESPACE
from ray.serve.handle import DeploymentHandle

from actors.ray_handles import ReplicaCaller, replicas
from actors.ray_store import StoreSlab
from cpd_ray.errors import PeerGone
from cpd_ray.ids import NodeId


class SlabHost(Protocol):
    """What a KV-cache replica tells the workers of its node."""

    async def shared_slab(self) -> tuple[StoreSlab, int]: ...


def slab_replica(handle: DeploymentHandle[Any], node: NodeId) -> str | None:
    """The id of the KV-cache replica on `node`, None when there is none."""
    return next((str(r.replica_id.unique_id) for r in replicas(handle) if r.node_id == node), None)


async def shared_slab(handle: DeploymentHandle[Any], replica_id: str) -> tuple[StoreSlab, int]:
    """The extents of the slab that this replica keeps the books of, and their epoch. Raises PeerGone."""
    # by reference, so that Ray knows who holds the extents
    host: SlabHost = ReplicaCaller(handle, replica_id, PeerGone, by_reference=True).client(SlabHost)
    return await host.shared_slab()


def replica_is_dead(app: str, deployments: Sequence[str], worker: str) -> bool:
    """Whether the process of the worker of that name has ended, for certain. Blocks shortly."""
    for deployment in deployments:
        replica_id = worker.removeprefix(f"{deployment}-")
        if replica_id != worker:
            name = ReplicaID(replica_id, DeploymentID(deployment, app)).to_full_id_str()
            try:
                ray.get_actor(name, namespace=SERVE_NAMESPACE)
            except ValueError:
                return True
            return False
    return False

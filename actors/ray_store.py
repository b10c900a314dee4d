"""A slab's memory as objects in the Ray object store: put once by the node's KV-cache actor, mapped writable by the workers of that node.

Owns the trip from slots to objects and back. Does not know what the slots hold. Invariant: every extent handed out lies in the node's shared
memory, was never copied to another node, and stays pinned for as long as any of its `SlottedMemory` lives.

Ray holds objects to be immutable; here they are not, so whoever reads a slab reads it on its own node or over a transport, never as an object.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import ray

from cpd_ray.errors import NotSharedMemory, PeerGone
from cpd_ray.ids import NodeId
from kv.memory import Bytes, Extent, SlottedMemory

log = logging.getLogger(__name__)
SHARED_MEMORY = "/dev/shm/"
GET_TIMEOUT_S = 30.0
PREDECESSOR_S = 10.0
"""How long those who map the slab of an owner that died may take to let go of it, before its successor gives up."""
TRY_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class StoreSlab:
    """A slab's extents, in order, cut into slots of `slot_bytes`: travels as an argument or result of a Ray call, by reference only, so
    that Ray knows who holds the objects. `node`: the one node where it may be attached."""

    node: NodeId
    slot_bytes: int
    extents: tuple[ray.ObjectRef, ...]


def create(slot_bytes: int, slots: int, extent_slots: int) -> tuple[StoreSlab, SlottedMemory]:
    """A new slab of `slots`, at most `extent_slots` an extent, every page touched; and its mapping here. A GiB takes up to a second, so call it
    off the event loop. Raises NotSharedMemory when the store can't hold it in memory; what had been made is dropped then."""
    refs: list[ray.ObjectRef] = []
    for first in range(0, slots, extent_slots):
        refs.append(ray.put(np.zeros(min(extent_slots, slots - first) * slot_bytes, dtype=np.uint8)))
        _mapped(refs[-1])
    slab = StoreSlab(_own_node(), slot_bytes, tuple(refs))
    return slab, attach(slab)


async def create_after_predecessor(
    slot_bytes: int, slots: int, extent_slots: int, *, within_s: float = PREDECESSOR_S
) -> tuple[StoreSlab, SlottedMemory]:
    """As `create`, off the event loop; a full store gets time to become free, since workers may still map the slab of an owner that died."""
    until_s = asyncio.get_running_loop().time() + within_s
    while True:
        try:
            return await asyncio.to_thread(create, slot_bytes, slots, extent_slots)
        except NotSharedMemory as error:
            if asyncio.get_running_loop().time() >= until_s:
                raise
            log.info("no room for the slab yet: %s", error)
            await asyncio.sleep(TRY_AGAIN_S)


def attach(slab: StoreSlab) -> SlottedMemory:
    """Map a slab of this node, writable; blocks shortly. Raises PeerGone when its owner is dead (unless another process still maps it: then the
    old memory, which the owner's successor knows nothing of), NotSharedMemory on another node, where Ray would make a copy that goes stale."""
    if slab.node != (here := _own_node()):
        raise NotSharedMemory(f"the slab of node {slab.node} can't be mapped on node {here}: read it over a transport")
    return SlottedMemory([_mapped(ref) for ref in slab.extents], slab.slot_bytes)


def _own_node() -> NodeId:
    return NodeId(ray.get_runtime_context().get_node_id())


def _mapped(ref: ray.ObjectRef) -> Extent:
    try:
        view: Bytes = ray.get(ref, timeout=GET_TIMEOUT_S)
    except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
        raise PeerGone("the owner of the slab is gone") from error
    address = int(view.ctypes.data)
    if not lies_in_shared_memory(address, view.nbytes):
        raise NotSharedMemory(
            f"the object store keeps {view.nbytes} bytes of the slab on disk: it is full, or the machine's shared memory is too small; make "
            "slab.gib smaller, start Ray with a larger --object-store-memory, or give the container more shared memory"
        )
    writable = np.ctypeslib.as_array((ctypes.c_uint8 * view.nbytes).from_address(address))
    return Extent(address, view.nbytes, (ref, view, writable))


def lies_in_shared_memory(address: int, nbytes: int, maps: Path = Path("/proc/self/maps")) -> bool:
    """Whether this process maps all of `[address, address + nbytes)` from files in shared memory."""
    reached = address
    for line in maps.read_text().splitlines():
        fields = line.split(maxsplit=5)
        start, end = (int(part, 16) for part in fields[0].split("-"))
        if start <= reached < end:
            if len(fields) < 6 or not fields[5].startswith(SHARED_MEMORY):
                return False
            reached = end
            if reached >= address + nbytes:
                return True
    return False

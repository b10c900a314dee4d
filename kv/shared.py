"""Memory that several processes of a node map: the bytes under a slab.

Owns anonymous shared files (`memfd`): they have no name, so nothing is left behind however their users die. Invariant: a handle maps to
the same bytes in every process for as long as its creator lives.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np

from cpd_ray.errors import PeerGone
from kv.memory import SlottedMemory

PAGE_BYTES = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class SharedExtent:
    """One piece, as its creator knows it: process, descriptor, length."""

    pid: int
    descriptor: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class SharedSlab:
    """A slab's extents, in order, cut into slots of `slot_bytes`; `epoch` of the books that are kept of them."""

    slot_bytes: int
    epoch: int
    extents: tuple[SharedExtent, ...]


def create(slot_bytes: int, slots: int, epoch: int, extent_slots: int) -> tuple[SharedSlab, SlottedMemory]:
    """A new slab of `slots`, at most `extent_slots` an extent, every page touched; and its mapping here."""
    extents, buffers = [], []
    for first in range(0, slots, extent_slots):
        nbytes = min(extent_slots, slots - first) * slot_bytes
        descriptor = os.memfd_create("cpd-slab", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
        buffer = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED)
        np.frombuffer(buffer, dtype=np.uint8)[::PAGE_BYTES] = 0
        extents.append(SharedExtent(os.getpid(), descriptor, nbytes))
        buffers.append(buffer)
    return SharedSlab(slot_bytes, epoch, tuple(extents)), SlottedMemory.over(buffers, slot_bytes)


def attach(slab: SharedSlab) -> SlottedMemory:
    """Map a slab that another process of this node created; raises PeerGone when that process is dead."""
    buffers = []
    for extent in slab.extents:
        try:
            descriptor = os.open(f"/proc/{extent.pid}/fd/{extent.descriptor}", os.O_RDWR)
        except OSError as error:
            raise PeerGone("the process that owns the slab is gone") from error
        try:
            buffers.append(mmap.mmap(descriptor, extent.nbytes, mmap.MAP_SHARED))
        finally:
            os.close(descriptor)
    return SlottedMemory.over(buffers, slab.slot_bytes)


def close(slab: SharedSlab) -> None:
    """The creator lets go: nobody can attach any more; mappings stay until their holders drop them."""
    for extent in slab.extents:
        os.close(extent.descriptor)

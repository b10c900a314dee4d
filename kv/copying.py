"""Copies of whole slots between two memories that this process maps, at the speed of the memory.

Owns no slot: the caller holds leases or references on both sides. CPU only. Blocking, without the GIL while bytes move: call it in an
executor. Invariant: when `copy_slots` returns or raises, nothing writes to the destination any more.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kv.memory import SlottedMemory

Slots = Sequence[int] | npt.NDArray[np.int64]


def merged_runs(
    source: npt.NDArray[np.int64], into: npt.NDArray[np.int64], nbytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """(source address, destination address, length) of the fewest copies that move `nbytes` from each of `source` to the same place
    of `into`: neighbours on both sides are one."""
    if not source.size:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    breaks = np.flatnonzero((np.diff(source) != nbytes) | (np.diff(into) != nbytes)) + 1
    starts = np.concatenate(([0], breaks))
    counts = np.diff(np.concatenate((starts, [source.size])))
    return source[starts], into[starts], counts * nbytes


def copy_slots(source: SlottedMemory, source_slots: Slots, into: SlottedMemory, into_slots: Slots) -> int:
    """Copy slot by slot and return the bytes moved.

    Raises ValueError when the slots differ in number or size, or a memory lies on a device; IndexError for a slot outside.
    """
    if source.slot_bytes != into.slot_bytes or len(source_slots) != len(into_slots):
        raise ValueError("both sides of a copy need equally many slots of the same size")
    if any(extent.device is not None for extent in (*source.extents, *into.extents)):
        raise ValueError("memory on a device is not copied by the CPU")
    runs = merged_runs(source.addresses(source_slots), into.addresses(into_slots), source.slot_bytes)
    move = ctypes.memmove  # releases the GIL
    for start, to, nbytes in zip(*(part.tolist() for part in runs), strict=True):
        move(to, start, nbytes)
    return len(source_slots) * source.slot_bytes


def checksums(memory: SlottedMemory, slots: Slots) -> tuple[int, ...]:
    """A CRC-32 of each slot's bytes."""
    views = ((ctypes.c_char * memory.slot_bytes).from_address(address) for address in memory.addresses(slots).tolist())
    return tuple(zlib.crc32(view) for view in views)

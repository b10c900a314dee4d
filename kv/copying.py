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
from kv.transport.base import Span

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
    if source.slot_bytes != into.slot_bytes:
        raise ValueError(f"slots of {source.slot_bytes} and {into.slot_bytes} bytes")
    whole = Span(0, source.slot_bytes)
    return copy_spans(source, source_slots, whole, into, into_slots, whole)


def copy_spans(
    source: SlottedMemory, source_slots: Slots, source_span: Span, into: SlottedMemory, into_slots: Slots, into_span: Span
) -> int:
    """The same for a part of each slot. The spans must be equally long and lie within the slots."""
    if len(source_slots) != len(into_slots) or source_span.nbytes != into_span.nbytes:
        raise ValueError("both sides of a copy need equally many slots and spans of the same size")
    for memory, span in ((source, source_span), (into, into_span)):
        if not 0 <= span.offset <= span.offset + span.nbytes <= memory.slot_bytes:
            raise ValueError(f"{span} does not lie within a slot of {memory.slot_bytes} bytes")
        if any(extent.device is not None for extent in memory.extents):
            raise ValueError("memory on a device is not copied by the CPU")
    start, to = source.addresses(source_slots) + source_span.offset, into.addresses(into_slots) + into_span.offset
    move = ctypes.memmove  # releases the GIL
    for a, b, nbytes in zip(*(part.tolist() for part in merged_runs(start, to, source_span.nbytes)), strict=True):
        move(b, a, nbytes)
    return len(source_slots) * source_span.nbytes


def checksums(memory: SlottedMemory, slots: Slots) -> tuple[int, ...]:
    """A CRC-32 of each slot's bytes."""
    views = ((ctypes.c_char * memory.slot_bytes).from_address(address) for address in memory.addresses(slots).tolist())
    return tuple(zlib.crc32(view) for view in views)

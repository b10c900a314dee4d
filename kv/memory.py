"""Memory cut into equal slots: the one shape that pools, slabs and transports agree on.

Owns the arithmetic from slot to address. Does not own the bytes: whoever made the buffers keeps them alive.
Invariant: a slot lies whole within one extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Extent:
    """One contiguous piece of memory: `address`, length, and the object that keeps it alive. `device`: None in DRAM, else the GPU."""

    address: int
    nbytes: int
    keep: Any
    device: int | None = None


class SlottedMemory:
    """Extents of `slot_bytes` slots, numbered through. Raises ValueError for an extent that is no whole number of slots."""

    def __init__(self, extents: Sequence[Extent], slot_bytes: int) -> None:
        if slot_bytes <= 0 or not extents:
            raise ValueError("slotted memory needs a positive slot size and at least one extent")
        for extent in extents:
            if extent.nbytes % slot_bytes or not extent.nbytes:
                raise ValueError(f"an extent of {extent.nbytes} bytes is no whole number of {slot_bytes}-byte slots")
        self.extents = tuple(extents)
        self.slot_bytes = slot_bytes
        self.extent_slots = tuple(e.nbytes // slot_bytes for e in extents)
        self._first = np.concatenate(([0], np.cumsum(self.extent_slots)))
        self._base = np.array([e.address for e in extents], dtype=np.int64)

    @classmethod
    def over(cls, buffers: Sequence[Any], slot_bytes: int) -> SlottedMemory:
        """Over writable or read-only CPU buffers (numpy arrays, shared memory, memory-mapped objects)."""
        extents = []
        for buffer in buffers:
            view = np.frombuffer(buffer, dtype=np.uint8)
            extents.append(Extent(view.ctypes.data, view.nbytes, (buffer, view)))
        return cls(extents, slot_bytes)

    @property
    def slots(self) -> int:
        return int(self._first[-1])

    @property
    def nbytes(self) -> int:
        return self.slots * self.slot_bytes

    def locate(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """(extent index, byte offset in it) of each slot; raises IndexError for a slot outside."""
        ids = np.asarray(slots, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= self.slots):
            raise IndexError(f"slot outside 0..{self.slots - 1}")
        extent = np.searchsorted(self._first, ids, side="right") - 1
        return extent, (ids - self._first[extent]) * self.slot_bytes

    def addresses(self, slots: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The address of each slot's first byte."""
        extent, offset = self.locate(slots)
        return self._base[extent] + offset

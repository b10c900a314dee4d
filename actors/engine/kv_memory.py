"""A worker's own KV: one tensor `[blocks, kv_heads, layers, 2, block_size, head_dim]`, and its face towards slabs and transports.

Owns the bytes; who may use which block is `kv.pool`'s. Invariant: one block is one contiguous region of `shape.block_bytes` bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cpd_ray.errors import ConfigError
from kv.memory import Extent, SlottedMemory

DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class KvShape:
    """One block's shape. Head-major, so that a rank's share of the heads is one piece of it."""

    kv_heads: int
    layers: int
    block_size: int
    head_dim: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.layers * 2 * self.block_size * self.head_dim * self.dtype.itemsize


class KvMemory:
    """The pool's bytes, every page touched. `tensor` is what attention reads and writes."""

    def __init__(self, shape: KvShape, blocks: int, *, device: str = "cpu") -> None:
        if blocks < 1:
            raise ConfigError(f"a pool needs at least one block, not {blocks}")
        self.shape = shape
        self.blocks = blocks
        dimensions = (blocks, shape.kv_heads, shape.layers, 2, shape.block_size, shape.head_dim)
        try:
            # zeros() would map pages lazily on CPU; filling touches them now, not in the first requests
            self.tensor = torch.empty(dimensions, dtype=shape.dtype, device=device).fill_(0)
        except (RuntimeError, MemoryError) as error:
            size = f"{blocks * shape.block_bytes / 2**30:.1f} GiB"
            raise ConfigError(f"cache.pool_tokens: a pool of {size} doesn't fit into memory; make it smaller") from error

    @property
    def nbytes(self) -> int:
        return self.blocks * self.shape.block_bytes

    def slotted(self) -> SlottedMemory:
        """The pool as slots, one a block, for copies and transports; it keeps the tensor alive."""
        device = self.tensor.device
        index = None if device.type == "cpu" else (device.index or 0)
        return SlottedMemory([Extent(self.tensor.data_ptr(), self.nbytes, self.tensor, index)], self.shape.block_bytes)

    def keys(self, layer: int) -> Any:
        """View `[blocks, kv_heads, block_size, head_dim]` of a layer's keys."""
        return self.tensor[:, :, layer, 0]

    def values(self, layer: int) -> Any:
        """View `[blocks, kv_heads, block_size, head_dim]` of a layer's values."""
        return self.tensor[:, :, layer, 1]

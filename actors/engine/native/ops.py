"""The native kernels as functions over tensors.

Owns the C interface (mirrored in `kernels.cpp`) and the checks that its raw pointers need. Invariant: no pointer goes down whose tensor
isn't a contiguous (or row-strided) CPU tensor of the kernels' dtype.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from actors.engine.batch import Chunk, StepBatch
from actors.engine.kv_memory import KvMemory
from actors.engine.native.build import NativeUnavailable, load_library

MAX_HEAD_DIM = 512
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}
_ARGUMENTS: dict[str, list[Any]] = {
    "add_rms_norm": [c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_float],
    "gated_silu": [c_void_p, c_void_p, c_void_p, c_int64, c_int64],
    "rotate": [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int64],
    "write_kv": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_void_p, c_int64],
    "decode": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_void_p],
    "chunk": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_float, c_void_p],
}


class PoolView(ctypes.Structure):
    """Mirrors `PoolView` in kernels.cpp."""

    _fields_ = [(name, c_int64) for name in ("pool", "kv_heads", "layers", "block_size", "head_dim", "group")]


class NativeOps:
    """The kernels for one dtype. Not for two threads at once. Raises NativeUnavailable for a dtype they don't know."""

    def __init__(self, dtype: torch.dtype, cache_dir: Path) -> None:
        if dtype not in _SUFFIX:
            raise NativeUnavailable(f"the native kernels take float32 and bfloat16, not {dtype}")
        self.dtype = dtype
        self._library = load_library(cache_dir)
        for name, arguments in _ARGUMENTS.items():
            function = getattr(self._library, f"cpd_{name}_{_SUFFIX[dtype]}")
            function.argtypes, function.restype = arguments, None
            setattr(self, f"_{name}", function)
        self._library.cpd_set_threads.argtypes = [c_int32]

    _add_rms_norm: Any
    _gated_silu: Any
    _rotate: Any
    _write_kv: Any
    _decode: Any
    _chunk: Any

    def use_threads(self, count: int) -> None:
        """How many threads each kernel takes from now on."""
        self._library.cpd_set_threads(count)

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x += delta` in place (where given), then the RMS norm of `x` times `weight`. `[rows, dim]`, contiguous."""
        out = torch.empty_like(x)
        added = delta.data_ptr() if delta is not None else None
        self._add_rms_norm(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), x.shape[0], x.shape[1], eps)
        return out

    def gated_silu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`, both `[rows, width]`, contiguous."""
        out = torch.empty_like(gate)
        self._gated_silu(gate.data_ptr(), up.data_ptr(), out.data_ptr(), gate.shape[0], gate.shape[1])
        return out

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Rotary positions in place on `[rows, heads, head_dim]` (rows may be strided); `cosine`, `sine` `[rows, rotary dims]`."""
        rows, count, dim = heads.shape
        self._rotate(heads.data_ptr(), cosine.data_ptr(), sine.data_ptr(), rows, heads.stride(0), count, dim, cosine.shape[1])


class PagedKernels:
    """The attention kernels over one pool."""

    def __init__(self, ops: NativeOps, memory: KvMemory, query_heads: int) -> None:
        shape = memory.shape
        if shape.head_dim > MAX_HEAD_DIM or shape.head_dim % 2:
            raise NativeUnavailable(f"the native kernels take an even head_dim up to {MAX_HEAD_DIM}, not {shape.head_dim}")
        self._ops = ops
        self._memory = memory
        group = query_heads // shape.kv_heads
        self._view = PoolView(memory.tensor.data_ptr(), shape.kv_heads, shape.layers, shape.block_size, shape.head_dim, group)
        self._view_at = ctypes.addressof(self._view)

    def use_threads(self, count: int) -> None:
        """How many threads each kernel takes from now on."""
        self._ops.use_threads(count)

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor, batch: StepBatch) -> None:
        """Store `[rows, kv_heads, head_dim]`, each row's heads side by side, where the rows' tokens live."""
        self._ops._write_kv(
            self._view_at, layer, key.data_ptr(), key.stride(0), value.data_ptr(), value.stride(0),
            batch.slot_blocks.data_ptr(), batch.slot_offsets.data_ptr(), key.shape[0],
        )  # fmt: skip

    def decode(
        self, layer: int, query: torch.Tensor, batch: StepBatch, out: torch.Tensor, *, scale: float, window: int | None
    ) -> None:
        """Attend for the batch's first `decodes` rows."""
        self._ops._decode(
            self._view_at, layer, query.data_ptr(), query.stride(0), batch.tables.data_ptr(), batch.tables.stride(0),
            batch.lengths.data_ptr(), batch.decodes, window or 0, scale, out.data_ptr(),
        )  # fmt: skip

    def chunk(self, layer: int, query: torch.Tensor, chunk: Chunk, out: torch.Tensor, *, scale: float, window: int | None) -> None:
        """Attend for a chunk's rows of `query`, into the same rows of `out`."""
        self._ops._chunk(
            self._view_at, layer, query[chunk.first].data_ptr(), query.stride(0), chunk.blocks.data_ptr(),
            chunk.start, chunk.count, window or 0, scale, out[chunk.first].data_ptr(),
        )  # fmt: skip

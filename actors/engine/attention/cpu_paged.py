"""The CPU backend: compiled kernels that read keys and values where they lie in the pool, without gathering them.

Owns the choice of kernel per row. Invariant: see `actors.engine.attention.base`.
"""

from __future__ import annotations

import torch

from actors.engine.batch import StepBatch
from actors.engine.native.ops import PagedKernels


class CpuPagedBackend:
    """float32 and bfloat16 on CPU."""

    name = "cpu_paged"

    def __init__(self, kernels: PagedKernels) -> None:
        self._kernels = kernels
        self._batch: StepBatch | None = None

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        self._kernels.use_threads(torch.get_num_threads())

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "attend before prepare"
        key, value, query = _row_strided(key), _row_strided(value), _row_strided(query)
        self._kernels.write(layer, key, value, batch)
        out = torch.empty(query.shape, dtype=query.dtype)
        if batch.decodes:
            self._kernels.decode(layer, query, batch, out, scale=scale, window=window)
        for chunk in batch.chunks:
            self._kernels.chunk(layer, query, chunk, out, scale=scale, window=window)
        return out


def _row_strided(x: torch.Tensor) -> torch.Tensor:
    """As it is when each row's heads lie side by side, else a copy for which they do."""
    if x.stride(2) == 1 and (x.stride(1) == x.shape[2] or x.shape[1] == 1):
        return x
    return x.clone(memory_format=torch.contiguous_format)

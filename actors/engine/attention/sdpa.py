"""The reference backend: torch's scaled_dot_product_attention for chunks, one gather and two matrix products for decodes.

Runs on any device and is the oracle of the others. Invariant: see `actors.engine.attention.base`.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from actors.engine.attention.base import write_kv
from actors.engine.batch import Chunk, StepBatch
from actors.engine.kv_memory import KvMemory


class SdpaBackend:
    """Works for every dtype, device, head count and window."""

    name = "sdpa"

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self._batch: StepBatch | None = None
        self._unseen: dict[int | None, torch.Tensor] = {}

    def prepare(self, batch: StepBatch) -> None:
        self._batch = batch
        self._unseen = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        batch = self._batch
        assert batch is not None, "attend before prepare"
        write_kv(self._memory, batch, layer, key, value)
        result = torch.empty_like(query)
        if batch.decodes:
            result[: batch.decodes] = self._decode(batch, layer, query[: batch.decodes], scale, window)
        for chunk in batch.chunks:
            rows = slice(chunk.first, chunk.first + chunk.count)
            result[rows] = self._chunk(chunk, layer, query[rows], scale, window)
        return result

    def _decode(self, batch: StepBatch, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        unseen = self._unseen_slots(batch, window)
        keys = self._memory.keys(layer)[batch.tables].transpose(1, 2).flatten(2, 3)
        # weights of unseen slots are zero, but zero times a stale NaN is NaN
        values = self._memory.values(layer)[batch.tables].transpose(1, 2).flatten(2, 3).masked_fill(unseen[:, None, :, None], 0)
        grouped = query.unflatten(1, (keys.shape[1], -1))
        scores = torch.matmul(grouped, keys.transpose(2, 3)).float().mul_(scale)
        weights = scores.masked_fill_(unseen[:, None, None, :], float("-inf")).softmax(-1).to(query.dtype)
        return torch.matmul(weights, values).flatten(1, 2)

    def _unseen_slots(self, batch: StepBatch, window: int | None) -> torch.Tensor:
        """`[decodes, slots]`: True where a gathered slot is outside the row's context or window."""
        if window not in self._unseen:
            slots = torch.arange(batch.tables.shape[1] * self._memory.shape.block_size, device=batch.lengths.device)
            unseen = slots >= batch.lengths[:, None]
            if window is not None:
                unseen |= slots < batch.lengths[:, None] - window
            self._unseen[window] = unseen
        return self._unseen[window]

    def _chunk(self, chunk: Chunk, layer: int, query: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        keys = self._context(self._memory.keys(layer), chunk)
        values = self._context(self._memory.values(layer), chunk)
        mask = None if chunk.start == 0 and window is None else _causal_mask(chunk, window, query.device)
        attended = functional.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
        )
        return attended[0].transpose(0, 1)

    @staticmethod
    def _context(paged: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        """`[1, kv_heads, context, head_dim]`: the chunk's context, itself included, in order."""
        return paged.transpose(0, 1)[:, chunk.blocks].flatten(1, 2)[None, :, : chunk.end]


def _causal_mask(chunk: Chunk, window: int | None, device: torch.device) -> torch.Tensor:
    """`[count, context]`: True where the row sees the slot."""
    rows = torch.arange(chunk.start, chunk.end, device=device)[:, None]
    slots = torch.arange(chunk.end, device=device)[None]
    seen = slots <= rows
    return seen if window is None else seen & (slots > rows - window)

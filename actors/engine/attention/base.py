"""What computes attention over the paged pool, as the model sees it: two verbs.

Invariant: a row's result depends on its own sequence's context alone; bytes of blocks or slots outside that context are never
used, whatever they hold (another request's NaN must not spread).
"""

from __future__ import annotations

from typing import Protocol

import torch

from actors.engine.batch import StepBatch
from actors.engine.kv_memory import KvMemory


class AttentionBackend(Protocol):
    """One per runner, over one pool."""

    name: str

    def prepare(self, batch: StepBatch) -> None:
        """Called once a step, before any layer: what depends on the batch only is worked out here."""
        ...

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        """Write the rows' `key` and `value` `[rows, kv_heads, head_dim]` into the pool, then attend: `query` and result are
        `[rows, query_heads, head_dim]`. `window`: how many tokens back a row sees, itself included; None is all."""
        ...


def write_kv(memory: KvMemory, batch: StepBatch, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
    """Store the rows' keys and values where their tokens live."""
    memory.keys(layer).transpose(1, 2)[batch.slot_blocks, batch.slot_offsets] = key
    memory.values(layer).transpose(1, 2)[batch.slot_blocks, batch.slot_offsets] = value

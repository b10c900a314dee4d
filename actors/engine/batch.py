"""A plan as tensors: which token goes where, whose context each attends to, which rows are sampled.

Owns the translation only. Invariant: rows follow the plan's order; the first `decodes` rows are one token of one sequence each,
every later sequence is a `Chunk` of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from actors.engine.kv_memory import KvMemory
from actors.engine.plan import SequenceStep, StepPlan


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows `[first, first + count)` are tokens `[start, start + count)` of one sequence; `blocks` hold its context `[0, start + count)`."""

    first: int
    count: int
    start: int
    blocks: torch.Tensor

    @property
    def end(self) -> int:
        """Tokens of context of the chunk's last row."""
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class StepBatch:
    """`tokens`, `positions`, `slot_blocks`, `slot_offsets`: one a row, int64. `tables` `[decodes, longest]` (padded with the row's own
    first block) and `lengths` `[decodes]` (context, new token included) are int32. `sample_rows`: rows whose logits are wanted."""

    tokens: torch.Tensor
    positions: torch.Tensor
    slot_blocks: torch.Tensor
    slot_offsets: torch.Tensor
    decodes: int
    tables: torch.Tensor
    lengths: torch.Tensor
    chunks: tuple[Chunk, ...]
    sample_rows: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])


def build_batch(plan: StepPlan, memory: KvMemory, *, vocab_size: int) -> StepBatch:
    """Lay a plan out for `memory`'s pool. An id outside the vocabulary is laid out as the last one: whoever samples reports it. A table
    that is too short or names a block outside the pool is our own bug, and would write into other requests' KV: it stops here."""
    sequences, device, block_size = plan.sequences, memory.tensor.device, memory.shape.block_size
    counts = np.fromiter((len(s.tokens) for s in sequences), np.int64, len(sequences))
    firsts = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate([np.frombuffer(s.tokens, np.uint32) for s in sequences]).astype(np.int64)
    positions = np.concatenate([np.arange(s.start, s.start + len(s.tokens), dtype=np.int64) for s in sequences])
    tables = [_table(s, block_size, memory.blocks) for s in sequences]
    slots = np.concatenate([table[positions[a:b] // block_size] for table, a, b in zip(tables, firsts, firsts[1:], strict=False)])
    decodes = next((i for i, n in enumerate(counts) if n != 1), len(counts))
    padded, lengths = _decode_tables(sequences[:decodes], tables)
    chunks = tuple(
        Chunk(int(firsts[i]), int(counts[i]), sequences[i].start, _on(tables[i], device)) for i in range(decodes, len(sequences))
    )
    return StepBatch(
        tokens=_on(np.minimum(tokens, vocab_size - 1), device),
        positions=_on(positions, device),
        slot_blocks=_on(slots, device),
        slot_offsets=_on(positions % block_size, device),
        decodes=decodes,
        tables=_on(padded, device),
        lengths=_on(lengths, device),
        chunks=chunks,
        sample_rows=_on(np.array([last - 1 for last, s in zip(firsts[1:], sequences, strict=True) if s.sample], np.int64), device),
    )


def _on(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def _table(step: SequenceStep, block_size: int, pool_blocks: int) -> np.ndarray:
    """The blocks of the step's context, and no more."""
    used = -(-(step.start + len(step.tokens)) // block_size)
    assert len(step.tokens), f"{step.request_id}: nothing to compute"
    assert used <= len(step.block_table), f"{step.request_id}: {len(step.block_table)} blocks, {used} needed"
    table = np.fromiter(step.block_table, np.int64, used)
    assert 0 <= table.min() and table.max() < pool_blocks, f"{step.request_id}: a block outside the pool"  # noqa: SIM300
    return table


def _decode_tables(sequences: Sequence[SequenceStep], tables: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    longest = max((len(table) for table, _ in zip(tables, sequences, strict=False)), default=0)
    padded = np.empty((len(sequences), longest), dtype=np.int32)
    for row, table in zip(padded, tables, strict=False):
        row[: len(table)] = table
        row[len(table) :] = table[0]
    return padded, np.array([s.start + 1 for s in sequences], dtype=np.int32)

"""A plan as tensors: which token goes where, whose context each attends to, which rows are sampled.

Owns the translation only. Invariant: rows follow the plan's order; the first `decodes` rows are one token of one sequence each,
every later sequence is a `Chunk` of consecutive rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

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
    longest: int
    chunks: tuple[Chunk, ...]
    sample_rows: torch.Tensor

    @property
    def rows(self) -> int:
        return int(self.tokens.shape[0])


def build_batch(plan: StepPlan, block_size: int, device: str = "cpu") -> StepBatch:
    """Lay a plan out. The plan must be valid: tokens in the vocabulary, tables long enough (the runner checks)."""
    sequences = plan.sequences
    counts = np.fromiter((len(s.tokens) for s in sequences), np.int64, len(sequences))
    firsts = np.concatenate(([0], np.cumsum(counts)))
    tokens = np.concatenate([np.frombuffer(s.tokens, np.uint32) for s in sequences]).astype(np.int64)
    positions = np.concatenate([np.arange(s.start, s.start + len(s.tokens), dtype=np.int64) for s in sequences])
    tables = [np.fromiter(s.block_table, np.int64, len(s.block_table)) for s in sequences]
    slots = np.concatenate(
        [table[positions[a:b] // block_size] for table, a, b in zip(tables, firsts[:-1], firsts[1:], strict=True)]
    )
    decodes = _leading_decodes(sequences)
    padded, lengths = _decode_tables(sequences[:decodes], tables, block_size)
    chunks = tuple(
        Chunk(int(firsts[i]), int(counts[i]), s.start, _on(tables[i][: -(-(s.start + counts[i]) // block_size)], device))
        for i, s in enumerate(sequences)
        if i >= decodes
    )
    sampled = np.array([firsts[i + 1] - 1 for i, s in enumerate(sequences) if s.sample], dtype=np.int64)
    return StepBatch(
        tokens=_on(tokens, device),
        positions=_on(positions, device),
        slot_blocks=_on(slots, device),
        slot_offsets=_on(positions % block_size, device),
        decodes=decodes,
        tables=_on(padded, device),
        lengths=_on(lengths, device),
        longest=int(lengths.max()) if decodes else 0,
        chunks=chunks,
        sample_rows=_on(sampled, device),
    )


def _on(array: np.ndarray, device: str) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device == "cpu" else tensor.to(device, non_blocking=True)


def _leading_decodes(sequences: Sequence[SequenceStep]) -> int:
    for i, s in enumerate(sequences):
        if len(s.tokens) != 1:
            return i
    return len(sequences)


def _decode_tables(
    sequences: Sequence[SequenceStep], tables: Sequence[np.ndarray], block_size: int
) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([s.start + 1 for s in sequences], dtype=np.int32)
    used = -(-lengths // block_size)
    padded = np.zeros((len(sequences), int(used.max()) if len(sequences) else 0), dtype=np.int32)
    for row, table, blocks in zip(padded, tables, used, strict=False):
        row[:] = table[0]
        row[:blocks] = table[:blocks]
    return padded, lengths

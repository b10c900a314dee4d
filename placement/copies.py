"""Which blocks that are read from afar deserve a copy on the near node. Pure.

Owns the rule: read often enough, and within what copies may take of the slab. Invariant: what it returns is never more than the budget, and
never a block that is here already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cpd_ray.ids import BlockKey, NodeId


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """A block that a worker of this node has just read from `source`, its `reads`-th time from afar. `parent`: the key before it."""

    key: BlockKey
    parent: BlockKey | None
    source: NodeId
    reads: int


@dataclass(frozen=True, slots=True)
class CopyRun:
    """A run in chain order to pull from `source`; `parent` is the key before the first."""

    source: NodeId
    parent: BlockKey | None
    keys: tuple[BlockKey, ...]


def copies_to_make(
    reads: Sequence[RemoteRead], *, after_reads: int, budget_blocks: int, here: Callable[[BlockKey], bool]
) -> tuple[CopyRun, ...]:
    """The runs to pull after one report of `reads` (in chain order). Heads first when the budget does not reach: a tail without its head
    serves nobody."""
    runs: list[CopyRun] = []
    left = budget_blocks
    for read in reads:
        if left <= 0:
            break
        if read.reads < after_reads or here(read.key):
            continue
        left -= 1
        last = runs[-1] if runs else None
        if last is not None and last.source == read.source and last.keys[-1] == read.parent:
            runs[-1] = CopyRun(last.source, last.parent, (*last.keys, read.key))
        else:
            runs.append(CopyRun(read.source, read.parent, (read.key,)))
    return tuple(runs)

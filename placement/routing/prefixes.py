"""How much of one prompt another one has in common, by their block keys.

Owns the comparison only. Invariant: keys are chained, so equal keys at one place mean equal keys before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cpd_ray.ids import BlockKey, WorkerId


def common_blocks(one: Sequence[BlockKey], other: Sequence[BlockKey]) -> int:
    """How many leading keys are equal; a dozen comparisons however long the prompts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def by_flight(keys: Sequence[BlockKey], sent: Iterable[tuple[WorkerId, Sequence[BlockKey]]]) -> Mapping[WorkerId, int]:
    """For each worker, the most leading blocks that a prompt sent there has in common with `keys`; workers with none are left out."""
    found: dict[WorkerId, int] = {}
    for worker, theirs in sent:
        blocks = common_blocks(keys, theirs)
        if blocks > found.get(worker, 0):
            found[worker] = blocks
    return found

"""Who may read which of a pool's blocks, and until when.

Owns the books of leases; the references that keep the blocks are the pool's. Invariant: a block counts once for each lease on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cpd_ray.errors import UnknownLease
from cpd_ray.ids import BlockId, LeaseId


@dataclass(frozen=True, slots=True)
class PoolLease:
    """`ends_s`: when its time and grace are over, by the pool's clock."""

    holder: str
    blocks: tuple[BlockId, ...]
    ends_s: float


class PoolLeases:
    """Lease ids of different `epoch`s differ, so that a restarted pool does not know its predecessor's."""

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._granted = 0
        self._leases: dict[LeaseId, PoolLease] = {}
        self._on: dict[BlockId, int] = {}

    @property
    def on(self) -> Mapping[BlockId, int]:
        """How many leases there are on each leased block."""
        return self._on

    def grant(self, lease: PoolLease) -> LeaseId:
        """Enter a lease."""
        self._granted += 1
        name = LeaseId(f"{self._epoch}-{self._granted}")
        self._leases[name] = lease
        for block in lease.blocks:
            self._on[block] = self._on.get(block, 0) + 1
        return name

    def end(self, name: LeaseId) -> Sequence[BlockId]:
        """Strike a lease out; returns its blocks. Raises UnknownLease when it was never granted or has ended."""
        lease = self._leases.pop(name, None)
        if lease is None:
            raise UnknownLease(f"no lease {name} here")
        for block in lease.blocks:
            left = self._on.pop(block) - 1
            if left:
                self._on[block] = left
        return lease.blocks

    def over(self, now_s: float) -> list[LeaseId]:
        """The leases whose time and grace have passed."""
        return [name for name, lease in self._leases.items() if now_s >= lease.ends_s]

    def check(self) -> None:
        """Assert the invariant."""
        on: dict[BlockId, int] = {}
        for lease in self._leases.values():
            for block in lease.blocks:
                on[block] = on.get(block, 0) + 1
        assert on == self._on, "leases on blocks are miscounted"

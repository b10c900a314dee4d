"""Which block leaves the slab when room is needed; policies by name. Owns no slot. Invariant: each name makes a fresh policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kv.eviction.base import EvictionPolicy
from kv.eviction.queued import S3Fifo, TwoQ
from kv.eviction.scored import AgedLeastFrequentlyUsed, LeastRecentlyUsed, ReuseHorizon

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        LeastRecentlyUsed.name: lambda slots: LeastRecentlyUsed(),
        AgedLeastFrequentlyUsed.name: AgedLeastFrequentlyUsed,
        ReuseHorizon.name: ReuseHorizon,
        TwoQ.name: TwoQ,
        S3Fifo.name: S3Fifo,
    }
)
DEFAULT_POLICY = ReuseHorizon.name


def new_policy(name: str, slots: int) -> EvictionPolicy:
    """The policy of that name for a slab of `slots`; raises KeyError for a name that is none of `POLICIES`."""
    return POLICIES[name](slots)

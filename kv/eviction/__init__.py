"""Which block leaves the slab when room is needed; policies by name. Owns no slot. Invariant: each name makes a fresh policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from kv.eviction.base import EvictionPolicy
from kv.eviction.scored import AgedLeastFrequentlyUsed, LeastRecentlyUsed

POLICIES: Mapping[str, Callable[[int], EvictionPolicy]] = MappingProxyType(
    {
        "lru": lambda slots: LeastRecentlyUsed(),
        "lfu": lambda slots: AgedLeastFrequentlyUsed(),
    }
)
DEFAULT_POLICY = "lfu"


def new_policy(name: str, slots: int) -> EvictionPolicy:
    """The policy of that name for a slab of `slots`; raises KeyError for a name that is none of `POLICIES`."""
    return POLICIES[name](slots)

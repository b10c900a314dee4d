"""Policies by the names that the configuration uses.

Invariant: every name in `POLICIES` builds from the same settings.
"""

from __future__ import annotations

from collections.abc import Callable

from cpd_ray.errors import ConfigError
from placement.cost_model import CostModel
from placement.routing.baselines import AffinityPolicy, AffinitySharedPolicy, RoundRobinPolicy, SharedCachePolicy
from placement.routing.candidates import ColdRule
from placement.routing.cost import CostPolicy
from placement.routing.threshold import ThresholdPolicy
from placement.routing.types import PrefillPolicy

POLICIES: dict[str, Callable[[CostModel, ColdRule, float], PrefillPolicy]] = {
    "cost": lambda model, rule, spill_after_s: CostPolicy(model, rule, spill_after_s),
    "threshold": lambda model, rule, _: ThresholdPolicy(model, rule),
    "round_robin": lambda model, rule, _: RoundRobinPolicy(model, rule),
    "affinity": lambda model, rule, _: AffinityPolicy(model, rule),
    "shared": lambda model, rule, _: SharedCachePolicy(model, rule),
    "affinity_shared": lambda model, rule, _: AffinitySharedPolicy(model, rule),
}


def make_policy(
    name: str = "cost",
    *,
    cold_ratio: float = 0.1,
    cold_min_tokens: int = 2500,
    spill_after_s: float = 0.8,
    chunk_tokens: int = 2048,
    shortest_remaining: bool = True,
    aging: float = 0.1,
) -> PrefillPolicy:
    """The policy called `name`; raises ConfigError naming the key that can't be. The defaults are the configuration's."""
    if name not in POLICIES:
        raise ConfigError(f"routing.policy: {name!r} is none of {', '.join(sorted(POLICIES))}", param="routing.policy")
    if not 0 <= cold_ratio <= 1:
        raise ConfigError(f"routing.cold_ratio: {cold_ratio} is not from 0 to 1", param="routing.cold_ratio")
    for key, value in (("cold_min_tokens", cold_min_tokens), ("spill_after_s", spill_after_s), ("aging", aging)):
        if not value >= 0:
            raise ConfigError(f"routing.{key}: {value} is negative", param=f"routing.{key}")
    if chunk_tokens < 1:
        raise ConfigError(f"routing.chunk_tokens: {chunk_tokens} is not positive", param="routing.chunk_tokens")
    model = CostModel(chunk_tokens=chunk_tokens, shortest_remaining=shortest_remaining, aging=aging)
    return POLICIES[name](model, ColdRule(cold_ratio, cold_min_tokens), spill_after_s)

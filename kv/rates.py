"""How fast bytes come from each tier, measured as they come.

Owns a fading sum of bytes and seconds a tier; the ratio weighs a transfer by its size. Invariant: a tier always has a rate: its prior,
until something was measured.
"""

from __future__ import annotations

from collections.abc import Mapping

HALF_LIFE_BYTES = 1 << 30
"""A measurement counts half once this many later bytes have come from its tier."""
PRIOR_BYTES = 16 << 20
"""What the prior counts for against the first measurements."""


class Rates:
    """Bytes per second by tier."""

    def __init__(self, priors_bytes_per_s: Mapping[str, float]) -> None:
        self._bytes = dict.fromkeys(priors_bytes_per_s, float(PRIOR_BYTES))
        self._seconds = {tier: PRIOR_BYTES / rate for tier, rate in priors_bytes_per_s.items()}

    def observe(self, tier: str, nbytes: int, seconds: float) -> None:
        """`nbytes` came from `tier` in `seconds`, waiting included. Nothing is learnt from nothing."""
        if nbytes <= 0 or seconds <= 0:
            return
        keep = 0.5 ** (nbytes / HALF_LIFE_BYTES)
        self._bytes[tier] = self._bytes[tier] * keep + nbytes
        self._seconds[tier] = self._seconds[tier] * keep + seconds

    def bytes_per_s(self) -> dict[str, float]:
        return {tier: self._bytes[tier] / self._seconds[tier] for tier in self._bytes}

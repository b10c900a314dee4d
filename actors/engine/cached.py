"""Which leading tokens of a request were never computed for it, and by which tier each was spared: exact to the token.

Owns that count through preemption and resumption. Invariant: the runs cover [0, spared) without overlap, and no token that was
computed for the request once is ever counted as cached, wherever it comes from later.
"""

from __future__ import annotations

from cpd_ray.types import CachedTokens, Tier


class CachedRuns:
    """Runs of leading tokens, each from one tier, in order."""

    __slots__ = ("_computed_from", "_runs")

    def __init__(self) -> None:
        self._runs: list[tuple[Tier, int]] = []
        self._computed_from: int | None = None

    @property
    def spared(self) -> int:
        """Leading tokens that were not computed."""
        return self._runs[-1][1] if self._runs else 0

    def extend(self, tier: Tier, stop: int) -> None:
        """Tokens up to `stop` came from `tier`, as far as they were not counted or computed before."""
        if self._computed_from is not None:
            stop = min(stop, self._computed_from)
        if stop > self.spared:
            self._runs.append((tier, stop))

    def lose(self, stop: int) -> None:
        """The KV was given up, and only [0, stop) of it is still there: the rest counts anew, by how it comes back."""
        self._runs = [(tier, min(end, stop)) for (tier, end), start in zip(self._runs, self._starts(), strict=True) if start < stop]

    def computed(self, start: int) -> None:
        """Tokens from `start` on have been computed."""
        self._computed_from = start if self._computed_from is None else min(self._computed_from, start)

    def count(self) -> CachedTokens:
        """Tokens by tier."""
        tokens = dict.fromkeys(Tier, 0)
        for (tier, stop), start in zip(self._runs, self._starts(), strict=True):
            tokens[tier] += stop - start
        return CachedTokens(pool=tokens[Tier.POOL], node=tokens[Tier.NODE], cluster=tokens[Tier.CLUSTER])

    def _starts(self) -> list[int]:
        return [0, *(stop for _, stop in self._runs[:-1])] if self._runs else []

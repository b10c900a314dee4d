"""Which of a request's tokens were never computed for it, and by which tier each was spared: exact to the token.

Owns that count through preemption and resumption, by a mark for each token. Invariant: a token that was computed for the request
once is never counted as cached, wherever its KV comes from later.
"""

from __future__ import annotations

from cpd_ray.types import CachedTokens, Tier

_UNKNOWN, _COMPUTED = 0, 255
_MARKS = {tier: mark for mark, tier in enumerate(Tier, start=1)}


def _replacing(marks: dict[int, int]) -> bytes:
    return bytes(marks.get(mark, mark) for mark in range(256))


_SPARE = {tier: _replacing({_UNKNOWN: mark}) for tier, mark in _MARKS.items()}
_LOSE = _replacing(dict.fromkeys(_MARKS.values(), _UNKNOWN))


class CachedMarks:
    """For the first `tokens` tokens; what lies beyond them is ignored."""

    __slots__ = ("_marks",)

    def __init__(self, tokens: int) -> None:
        self._marks = bytearray(tokens)

    def spare(self, tier: Tier, stop: int) -> None:
        """`tier` had the tokens before `stop`, as far as they were not accounted for."""
        self._marks[:stop] = self._marks[:stop].translate(_SPARE[tier])

    def lose(self, stop: int) -> None:
        """Only the KV of [0, stop) is still held: the rest counts anew, by how it comes back."""
        self._marks[stop:] = self._marks[stop:].translate(_LOSE)

    def compute(self, start: int, stop: int) -> None:
        """Tokens [start, stop) have been computed."""
        stop = min(stop, len(self._marks))
        if stop > start:
            self._marks[start:stop] = bytes((_COMPUTED,)) * (stop - start)

    def count(self) -> CachedTokens:
        """Tokens by tier."""
        pool, node, cluster = (self._marks.count(_MARKS[tier]) for tier in (Tier.POOL, Tier.NODE, Tier.CLUSTER))
        return CachedTokens(pool, node, cluster)

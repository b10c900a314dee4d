"""How much a tenant may ask for in a minute: requests, and tokens.

Owns one pair of buckets a tenant. Knows no key. Invariant: over any time, a tenant gets at most its rate times that time plus one
minute's worth, give or take the size of its last request; `check()` asserts that no bucket holds more than its minute.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.clock import Clock
from cpd_ray.errors import Overloaded

_FEW = 1024
"""So many buckets are kept without looking at them."""


@dataclass(slots=True)
class _Bucket:
    """Fills at `per_minute`, up to one minute's worth. May go below zero: a debt is waited for by those who come next."""

    per_minute: int
    level: float
    filled_s: float

    def refill(self, now_s: float) -> None:
        self.level = min(float(self.per_minute), self.level + (now_s - self.filled_s) * self.per_minute / 60)
        self.filled_s = now_s

    def wait_s(self, wanted: float) -> float:
        """Seconds until `wanted` (or all that the bucket holds) is there."""
        return max(0.0, (min(wanted, self.per_minute) - self.level) * 60 / self.per_minute)


class TenantRates:
    """None: no limit. A bucket that is full again says nothing, and is dropped when there are many."""

    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, clock: Clock) -> None:
        self._per_minute = {"requests": requests_per_minute, "tokens": tokens_per_minute}
        self._clock = clock
        self._buckets: dict[tuple[str, str], _Bucket] = {}
        self._sweep_at = _FEW

    def take_request(self, tenant: str) -> None:
        """Count one request; raises Overloaded, with when to try again."""
        self._take(tenant, "requests", 1)

    def take_tokens(self, tenant: str, tokens: int) -> None:
        """Count a prompt's tokens before it is answered; raises Overloaded. More than a minute's worth passes when the bucket is full."""
        self._take(tenant, "tokens", tokens)

    def spend_tokens(self, tenant: str, tokens: int) -> None:
        """Count an answer's tokens, which nobody knew before."""
        bucket = self._bucket(tenant, "tokens")
        if bucket is not None:
            bucket.level -= tokens

    def __len__(self) -> int:
        return len(self._buckets)

    def check(self) -> None:
        for bucket in self._buckets.values():
            assert bucket.level <= bucket.per_minute

    def _take(self, tenant: str, kind: str, amount: int) -> None:
        bucket = self._bucket(tenant, kind)
        if bucket is None:
            return
        wait_s = bucket.wait_s(amount)
        if wait_s > 0:
            raise Overloaded(
                f"the limit of {bucket.per_minute} {kind} a minute is reached", retry_after_s=wait_s, code="rate_limit_exceeded"
            )
        bucket.level -= amount

    def _bucket(self, tenant: str, kind: str) -> _Bucket | None:
        per_minute = self._per_minute[kind]
        if per_minute is None:
            return None
        now_s = self._clock.now_s()
        bucket = self._buckets.get((tenant, kind))
        if bucket is None:
            self._sweep(now_s)
            bucket = self._buckets[tenant, kind] = _Bucket(per_minute, float(per_minute), now_s)
        bucket.refill(now_s)
        return bucket

    def _sweep(self, now_s: float) -> None:
        if len(self._buckets) < self._sweep_at:
            return
        for bucket in self._buckets.values():
            bucket.refill(now_s)
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if bucket.level < bucket.per_minute}
        self._sweep_at = max(_FEW, 2 * len(self._buckets))

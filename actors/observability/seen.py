"""One request as it was seen from outside, and the line that the log gets of it.

Owns which fields those are. Invariant: no text, no tokens and no salt among them.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cpd_ray.types import CachedTokens, FinishReason, GenerateRequest, RequestTrace, Usage


@dataclass(slots=True)
class Seen:
    """`ended`: a finish reason, or the HTTP status of its error."""

    request: GenerateRequest
    arrived_s: float
    last_s: float
    tokens: int = 0
    ttft_s: float | None = None
    usage: Usage | None = None
    trace: RequestTrace | None = None
    ended: FinishReason | int = 500

    def line(self, e2e_s: float) -> dict[str, Any]:
        """Fields of the log line, durations in seconds."""
        finished = isinstance(self.ended, FinishReason)
        line: dict[str, Any] = {
            "event": "request",
            "tenant": self.request.tenant,
            "finish_reason": str(self.ended) if finished else None,
            "status": 200 if finished else self.ended,
            "prompt_tokens": self.request.prompt_tokens,
            "completion_tokens": self.tokens,
            "max_tokens": self.request.sampling.max_tokens,
            "ttft_s": _short(self.ttft_s),
            "e2e_s": _short(e2e_s),
        }
        if self.usage is not None:
            line["cached_tokens"] = cached_fields(self.usage.cached)
        if (trace := self.trace) is not None:
            line |= {
                "route": trace.route,
                "reason": trace.reason,
                "workers": list(trace.workers),
                "attempts": trace.attempts,
                "predicted_ttft_s": _short(trace.predicted_ttft_s),
                "phases_s": rounded(trace.phases_s),
            }
        return line


def cached_fields(cached: CachedTokens) -> dict[str, int]:
    """Cached tokens by tier."""
    return asdict(cached)


def rounded(phases_s: dict[str, float]) -> dict[str, float]:
    """To 10 us: what a reader of logs wants."""
    return {phase: round(seconds, 5) for phase, seconds in phases_s.items()}


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 5)

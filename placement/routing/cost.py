"""The default policy: each request to its own pool, with a valve.

It weighs a worker by the predicted time to first token (backlog ahead, fetch, own prefill) plus the delay inflicted on those behind.
A request stays in its own pool (cold: pre-prefill, warm: prefill) until the other pool is better by more than `spill_after_s`, less
what it has waited already: so the pools stay apart while there is room, and become one when requests queue for admission.
Invariant: with `spill_after_s` infinite it never leaves a pool that has a worker; with 0 the pools are one.
"""

from __future__ import annotations

from dataclasses import dataclass

from placement.cost_model import CostModel
from placement.routing.candidates import OWN_POOL, ColdRule, candidates, in_role, seconds
from placement.routing.types import Candidate, Decision, RequestView, Snapshot


def weight(candidate: Candidate) -> tuple[float, float, int]:
    """Sort key: least cost, then least time to first token, then longest prefix."""
    return (candidate.cost_s, candidate.ttft_s, -candidate.cached_tokens)


def compared(gain_s: float) -> str:
    """How the other pool compares, as a person reads it."""
    return f"the other is {'better' if gain_s >= 0 else 'worse'} by {seconds(abs(gain_s))}"


@dataclass(frozen=True, slots=True)
class CostPolicy:
    """`spill_after_s`: how much better (in predicted seconds) the other pool must be before a request crosses."""

    model: CostModel
    rule: ColdRule
    spill_after_s: float = 0.8
    name: str = "cost"

    def decide(self, request: RequestView, snapshot: Snapshot) -> Decision:
        considered = candidates(request, snapshot, self.model)
        route = self.rule.route(request)
        role = OWN_POOL[route]
        own = min(in_role(considered, role), key=weight, default=None)
        other = min((c for c in considered if c.role is not role), key=weight, default=None)
        found = self.rule.describe(request, route)
        if own is None or other is None:
            chosen = own or other
            assert chosen is not None, "candidates() raises when there is none"
            gone = "" if own is not None else f", since the {role} pool has no worker"
            why = f"{found}: {chosen.role} worker, first token predicted in {seconds(chosen.ttft_s)}{gone}"
        else:
            gain_s = own.cost_s - other.cost_s
            hurdle_s = max(0.0, self.spill_after_s - request.waited_s)
            crosses = gain_s > hurdle_s
            chosen = other if crosses else own
            verdict = "crosses to" if crosses else "stays in"
            why = f"{found}: {verdict} the {chosen.role} pool ({compared(gain_s)}, crossing takes "
            why += f"{seconds(hurdle_s)}), first token predicted in {seconds(chosen.ttft_s)}"
        return Decision(route, chosen, considered, self.name, why)

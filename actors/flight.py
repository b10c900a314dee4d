"""One request's state in the router, over all its attempts.

Owns what was sent to the client and what was learnt on the way. Invariant: `sent` only grows; a token that the client has seen never
changes, is never lost and never sent twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from cpd_ray import tokens as token_buffers
from cpd_ray.errors import WorkerGone
from cpd_ray.ids import BlockKey, NodeId, RequestId, WorkerId
from cpd_ray.messages import NodeRun, PrefillResult
from cpd_ray.types import (
    CachedTokens,
    FinishReason,
    GenerateRequest,
    RequestTrace,
    SamplingParams,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from placement.routing.types import Decision, RequestView


@dataclass(frozen=True, slots=True)
class Found:
    """Leading blocks of one prompt: in each pool, in each slab, and in common with prompts that a worker computes now.
    `prefill_workers`: those of the prefill role, whose reach decides what is warm; empty when there are none."""

    by_worker: Mapping[WorkerId, int]
    by_node: Mapping[NodeId, int]
    by_flight: Mapping[WorkerId, int]
    prefill_workers: frozenset[WorkerId]


@dataclass(slots=True)
class Flight:
    """`sampling` has its seed set. `actual_cached`: what a worker found when it was less than believed (then beliefs are capped by it)."""

    request: GenerateRequest
    sampling: SamplingParams
    root: BlockKey
    keys: tuple[BlockKey, ...]
    block_tokens: int
    arrived_s: float
    sequence: int
    sent: list[int] = field(default_factory=list)
    attempts: int = 0
    actual_cached: int | None = None
    excluded: set[WorkerId] = field(default_factory=set)
    workers: list[WorkerId] = field(default_factory=list)
    phases_s: dict[str, float] = field(default_factory=dict)
    decision: Decision | None = None
    predicted_ttft_s: float = 0.0
    cached: CachedTokens | None = None
    ttft_s: float | None = None

    @property
    def name(self) -> RequestId:
        """This attempt's id at the workers: one of them may not have heard yet that an earlier one, or an earlier request of the same id, is
        over."""
        return RequestId(f"{self.request.request_id}/{self.sequence}.{self.attempts}")

    @property
    def tokens(self) -> bytes:
        """Prompt and what was sent, as a buffer."""
        return self.request.tokens + token_buffers.pack(self.sent)

    @property
    def known_tokens(self) -> int:
        return self.request.prompt_tokens + len(self.sent)

    @property
    def remaining_tokens(self) -> int:
        return self.sampling.max_tokens - len(self.sent)

    def view(self, found: Found, now_s: float) -> RequestView:
        """What a policy reads; counts in blocks become tokens, capped by what a worker has found."""
        reach = [*(found.by_worker.get(w, 0) for w in found.prefill_workers), *found.by_node.values()]
        cap = self.known_tokens if self.actual_cached is None else self.actual_cached
        return RequestView(
            request_id=self.request.request_id,
            total_tokens=self.known_tokens,
            block_size=self.block_tokens,
            by_worker={w: min(n * self.block_tokens, cap) for w, n in found.by_worker.items()},
            by_node={n: min(b * self.block_tokens, cap) for n, b in found.by_node.items()},
            by_flight={w: n * self.block_tokens for w, n in found.by_flight.items()},
            in_reach=min(max(reach, default=0) * self.block_tokens, cap) if found.prefill_workers else None,
            max_new_tokens=self.remaining_tokens,
            waited_s=now_s - self.arrived_s,
            sequence=self.sequence,
        )

    def spend(self, phases_s: Mapping[str, float]) -> None:
        """Add seconds to the trace."""
        for phase, seconds in phases_s.items():
            self.phases_s[phase] = self.phases_s.get(phase, 0.0) + seconds

    def decided(self, decision: Decision) -> None:
        """The first decision is the one whose prediction is compared with what happened."""
        if self.decision is None:
            self.predicted_ttft_s = decision.predicted_ttft_s
        self.decision = decision
        self.workers.append(decision.chosen.worker)

    def prefilled(self, result: PrefillResult, now_s: float) -> None:
        """A prefill ended: the first one's cached tokens are the request's."""
        self.spend(result.phases_s)
        if self.cached is None:
            self.cached = result.cached
        if self.ttft_s is None and result.token is not None:
            self.ttft_s = now_s - self.arrived_s

    def deliver(self, index: int, tokens: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> TokenChunk:
        """The next tokens for the client; raises WorkerGone when a worker continues at another place than where the client is."""
        if index != len(self.sent):
            raise WorkerGone(f"a worker continued at token {index}, the answer is at {len(self.sent)}")
        self.sent.extend(tokens)
        return TokenChunk(self.request.request_id, index, tokens, logprobs)

    def known(self, chunk: TokenChunk) -> TokenChunk:
        """`chunk` with usage and trace as they are so far: for whoever stops listening before the last chunk."""
        cached = self.cached or CachedTokens()
        assert self.decision is not None, "an answer that was never routed"
        trace = RequestTrace(
            route=self.decision.route,
            reason=self.decision.reason,
            workers=tuple(self.workers),
            cached=cached,
            phases_s=dict(self.phases_s),
            predicted_ttft_s=self.predicted_ttft_s,
            actual_ttft_s=self.ttft_s or 0.0,
            attempts=self.attempts,
        )
        return replace(chunk, usage=Usage(self.request.prompt_tokens, len(self.sent), cached), trace=trace)

    def last(self, chunk: TokenChunk, reason: FinishReason) -> TokenChunk:
        """`chunk` as the answer's last."""
        return replace(self.known(chunk), finish_reason=reason)


def node_runs(by_node: Mapping[NodeId, int], most: int = 4) -> tuple[NodeRun, ...]:
    """The slabs that hold most of a prompt, longest first, for a worker to ask in that order."""
    longest = sorted(by_node.items(), key=lambda item: (-item[1], item[0]))
    return tuple(NodeRun(node, blocks) for node, blocks in longest[:most] if blocks)

"""A face that answers without workers: it says the prompt back, token by token, and tells truly what an earlier request had computed.

Owns what tests and the HTTP benchmark need of a router, and nothing of its work. Invariant: the same requests in the same order get
the same answers, and `check()` finds nothing left running once all answers are closed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field

from actors.http.face import ModelCard, Status
from actors.text.codec import TextCodec
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import ContextLengthExceeded, DuplicateRequest
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.messages import NodeReport, PoolCounts, SlabCounts, StepCost, WorkerReport, WorkerState
from cpd_ray.types import (
    CachedTokens,
    FinishReason,
    GenerateRequest,
    RequestTrace,
    Role,
    Tier,
    TokenChunk,
    TokenLogprobs,
    Usage,
)
from placement.routing.types import Candidate, Decision, Route

BLOCK_TOKENS = 16
WORKER, NODE = WorkerId("prefill-0"), NodeId("node-0")


@dataclass(frozen=True, slots=True)
class FakeWarmed:
    tokens: int
    cached_tokens: int
    blocks: int
    pinned_blocks: int
    worker: WorkerId = WORKER
    node: NodeId = NODE


@dataclass(slots=True)
class Script:
    """How the fake behaves. `answer`: the tokens to say instead of the prompt's. `group`: tokens in a chunk. `fail_with` is raised after
    `fail_after` tokens. `hold_after`: wait for `release` once that many tokens are out. `early_usage`: the first chunk has usage already."""

    answer: tuple[int, ...] | None = None
    group: int = 1
    fail_with: Exception | None = None
    fail_after: int = 0
    hold_after: int | None = None
    early_usage: bool = True
    healthy: bool = True
    release: asyncio.Event = field(default_factory=asyncio.Event)


class FakeFace:
    """`seen` keeps every request that arrived, `open` the ids of those not closed yet."""

    def __init__(self, codec: TextCodec, cards: tuple[ModelCard, ...], script: Script | None = None) -> None:
        self.codec = codec
        self.script = script or Script()
        self.seen: list[GenerateRequest] = []
        self.open: set[str] = set()
        self.arrived = asyncio.Condition()
        self._cards = cards
        self._cached: set[tuple[str | None, str | None, bytes]] = set()
        self.pinned_for_s: dict[bytes, float] = {}

    def models(self) -> tuple[ModelCard, ...]:
        return self._cards

    def healthy(self) -> bool:
        return self.script.healthy

    def check(self) -> None:
        """Asserts that no answer is under way."""
        assert not self.open, f"answers were left running: {sorted(self.open)}"

    async def until(self, running: int) -> None:
        """Returns when so many answers are under way."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.open) == running)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        if request.request_id in self.open:
            raise DuplicateRequest("this request is in flight", param="request_id")
        card = self._cards[0]
        if request.prompt_tokens + request.sampling.max_tokens > card.max_model_len:
            raise ContextLengthExceeded("prompt and answer don't fit the context")
        await self._enter(request)
        try:
            cached = self._compute(request)
            async for chunk in self._say(request, cached):
                yield chunk
        finally:
            self.open.discard(request.request_id)
            async with self.arrived:
                self.arrived.notify_all()

    async def plan(self, request: GenerateRequest) -> Decision:
        cached = self._cached_tokens(request)
        chosen = Candidate(
            WORKER,
            Role.PREFILL,
            cached,
            0,
            0,
            request.prompt_tokens - cached,
            backlog_s=0.0,
            fetch_s=0.0,
            prefill_s=0.5,
            inflicted_s=0.0,
        )
        return Decision(Route.WARM if cached else Route.COLD, chosen, (chosen,), "fake", f"{cached} tokens are cached")

    async def status(self) -> Status:
        pool = PoolCounts(total=64, free=60, cached=1, active=1, leased=1, quarantined=1)
        worker = WorkerReport(
            WORKER, Role.PREFILL, NODE, 1, WorkerState.READY, len(self.open), 0, 0, 0.0, pool,
            StepCost(0.01, 0.001, 0.0, 0.0), BLOCK_TOKENS, {"node": 1e9},
        )  # fmt: skip
        slots = SlabCounts(total=32, free=20, reserved=2, committed=8, quarantined=2, pinned=1, leases=3, bytes_total=1 << 20)
        return Status(len(self.open), 0, (worker,), (NodeReport(NODE, 1, slots),), len(self._cached))

    async def reset(self, tiers: frozenset[Tier]) -> Mapping[Tier, int]:
        dropped = len(self._cached) if Tier.POOL in tiers else 0
        if Tier.POOL in tiers:
            self._cached.clear()
        return {tier: dropped if tier is Tier.POOL else 0 for tier in sorted(tiers)}

    async def warm(self, request: GenerateRequest, ttl_s: float) -> FakeWarmed:
        self.seen.append(request)
        cached = self._compute(request)
        self.pinned_for_s[request.tokens] = ttl_s
        blocks = request.prompt_tokens // BLOCK_TOKENS
        return FakeWarmed(request.prompt_tokens, cached, blocks, blocks)

    async def _enter(self, request: GenerateRequest) -> None:
        self.seen.append(request)
        self.open.add(request.request_id)
        async with self.arrived:
            self.arrived.notify_all()

    def _prefixes(self, request: GenerateRequest) -> list[tuple[str | None, str | None, bytes]]:
        step = BLOCK_TOKENS * token_buffers.TOKEN_BYTES
        ends = range(step, len(request.tokens) + 1, step)
        return [(request.salt, request.adapter, request.tokens[:end]) for end in ends]

    def _cached_tokens(self, request: GenerateRequest) -> int:
        blocks = 0
        for prefix in self._prefixes(request):
            if prefix not in self._cached:
                break
            blocks += 1
        return min(blocks * BLOCK_TOKENS, request.prompt_tokens - 1)

    def _compute(self, request: GenerateRequest) -> int:
        """How much was cached; afterwards all of the prompt's blocks are."""
        cached = self._cached_tokens(request)
        self._cached.update(self._prefixes(request))
        return cached

    async def _say(self, request: GenerateRequest, cached: int) -> AsyncGenerator[TokenChunk, None]:
        script = self.script
        tokens, reason = self._answer(request)
        for start in range(0, len(tokens), script.group):
            if script.fail_with is not None and start >= script.fail_after:
                raise script.fail_with
            if script.hold_after is not None and start >= script.hold_after:
                await script.release.wait()
            await asyncio.sleep(0)
            group = tuple(tokens[start : start + script.group])
            last = start + script.group >= len(tokens)
            yield self._chunk(request, start, group, cached, reason if last else None)

    def _answer(self, request: GenerateRequest) -> tuple[tuple[int, ...], FinishReason]:
        """What the script says, over and over when it may not end; as engines do, with the end or stop token that ended it."""
        sampling, eos = request.sampling, sorted(self.codec.eos_token_ids)
        say = tuple(token_buffers.unpack(request.tokens)) if self.script.answer is None else self.script.answer
        endless = itertools.cycle(say) if sampling.ignore_eos else itertools.chain(say, itertools.cycle(eos or say))
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos)}
        tokens: list[int] = []
        for token in itertools.islice(endless, sampling.max_tokens):
            if token in ends and len(tokens) < sampling.min_tokens:
                token = next(i for i in itertools.count() if i not in ends)
            tokens.append(token)
            if token in ends:
                return tuple(tokens), FinishReason.STOP
        return tuple(tokens), FinishReason.LENGTH

    def _chunk(
        self, request: GenerateRequest, start: int, tokens: tuple[int, ...], cached: int, reason: FinishReason | None
    ) -> TokenChunk:
        told = reason is not None or (start == 0 and self.script.early_usage)
        counted = CachedTokens(pool=cached)
        trace = RequestTrace(
            "warm" if cached else "cold", f"{cached} tokens are cached", (WORKER,), counted, {"compute": 0.25}, 0.5, 0.25
        )
        logprobs: tuple[TokenLogprobs, ...] = ()
        if request.sampling.logprobs is not None:
            logprobs = tuple(fake_logprobs(t, request.sampling.logprobs) for t in tokens)
        usage = Usage(request.prompt_tokens, start + len(tokens), counted)
        return TokenChunk(request.request_id, start, tokens, logprobs, reason, usage if told else None, trace if told else None)


def fake_logprobs(token: int, top: int) -> TokenLogprobs:
    """The chosen token is the likeliest, the following ids come next."""
    return TokenLogprobs(-0.5, tuple((token + i, -0.5 - i) for i in range(top)))

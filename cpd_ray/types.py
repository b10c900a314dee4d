"""What a request is and what comes back: the types that other Ray apps, the router and the workers share.

Invariant: every value here is frozen, and valid once built (`__post_init__` raises InvalidRequest, naming the field).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from cpd_ray import tokens as token_buffers
from cpd_ray.errors import InvalidRequest
from cpd_ray.ids import RequestId, WorkerId


class Role(StrEnum):
    """Which pool a worker serves in. Pre-prefill and prefill workers run the same code on different traffic."""

    PRE_PREFILL = "pre_prefill"
    PREFILL = "prefill"
    DECODE = "decode"


class Tier(StrEnum):
    """Where a cached block was taken from, nearest first."""

    POOL = "pool"
    NODE = "node"
    CLUSTER = "cluster"


class FinishReason(StrEnum):
    """Why the answer ended. `STOP`: an end or stop token or string; `LENGTH`: max_tokens; `ABORT`: its owner left."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """How many prompt tokens were not computed, by the tier that they were taken from."""

    pool: int = 0
    node: int = 0
    cluster: int = 0

    @property
    def total(self) -> int:
        return self.pool + self.node + self.cluster


MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_TOP_K = 2**31
"""More than any vocabulary; a larger one would not fit a message."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when the answer ends. Names and meanings are vLLM's.

    `temperature` 0 is greedy. `top_k` 0 means all. `seed` None lets the router draw one. `logprobs` None means none; k >= 0
    means the chosen token's and the k likeliest's. `min_tokens`: no end or stop token before that many are out.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, param: str, what: str) -> None:
            if not ok:
                raise InvalidRequest(f"{param} must be {what}", param=param)

        def finite(x: float) -> bool:
            return math.isfinite(x)

        need(self.max_tokens >= 1, "max_tokens", "at least 1")
        need(finite(self.temperature) and 0 <= self.temperature <= 100, "temperature", "from 0 to 100")
        need(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        need(0 <= self.top_k < MAX_TOP_K, "top_k", f"0 (all) or more, below {MAX_TOP_K}")
        need(0 <= self.min_p <= 1, "min_p", "from 0 to 1")
        need(
            finite(self.repetition_penalty) and 0 < self.repetition_penalty <= 100, "repetition_penalty", "above 0 and at most 100"
        )
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "from -2 to 2")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "from -2 to 2")
        need(len(self.logit_bias) <= MAX_LOGIT_BIAS, "logit_bias", f"at most {MAX_LOGIT_BIAS} entries")
        need(all(i >= 0 and -100 <= b <= 100 for i, b in self.logit_bias), "logit_bias", "token ids with values from -100 to 100")
        need(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens")
        need(all(i >= 0 for i in self.stop_token_ids), "stop_token_ids", "token ids")
        need(self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS, "logprobs", f"from 0 to {MAX_TOP_LOGPROBS}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One prompt to continue. `tokens`: little-endian uint32 buffer (see `cpd_ray.tokens`). `salt` and `adapter` separate caches:
    prompts that differ in either never share KV. `priority`: higher goes first within a tenant."""

    request_id: RequestId
    tokens: bytes
    sampling: SamplingParams = field(default_factory=SamplingParams)
    salt: str | None = None
    adapter: str | None = None
    tenant: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if not self.request_id:
            raise InvalidRequest("request_id must not be empty", param="request_id")
        if not token_buffers.unpack(self.tokens):
            raise InvalidRequest("the prompt must hold at least one token", param="prompt")

    @property
    def prompt_tokens(self) -> int:
        return token_buffers.count(self.tokens)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one output position: the chosen token's and the likeliest ones'."""

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Why a request went where it went, and where its time went. `phases_s`: seconds by phase, in order of first occurrence
    (`tokenize`, `match`, `admission`, `queue`, `fetch`, `compute`, `handover`, `decode`)."""

    route: str
    reason: str
    workers: tuple[WorkerId, ...]
    cached: CachedTokens
    phases_s: dict[str, float]
    predicted_ttft_s: float
    actual_ttft_s: float
    attempts: int = 1


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """Some tokens of the answer. `index`: position of the first of them in the answer. The last chunk has `finish_reason`,
    `usage` and `trace`, and may hold no token. Earlier chunks may carry `usage` and `trace` as known by then: who closes the
    answer early (a stop string) has no last chunk to read them from."""

    request_id: RequestId
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    trace: RequestTrace | None = None

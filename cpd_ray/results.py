"""What the client's calls return: typed, frozen views of the JSON that the system answers with.

Owns the way from plain data to these types; `raw` is that data, untouched. Invariant: a field that an answer does not have is None, never a
figure made up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from cpd_ray.errors import BadMessage
from cpd_ray.types import CachedTokens, RequestTrace

Json = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """OpenAI's usage. `cached_tokens`: prompt tokens not computed; None when that is not known."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer. `finish_reason`: `stop` or `length`; `stop_reason`: the stop string or token id that ended it; `logprobs` in OpenAI's
    shape."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: Json | None


@dataclass(frozen=True, slots=True)
class Generation:
    """A whole answer. `trace`: where the request went, why, and how long each phase took (the first prompt's first answer, when there are
    several)."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: TokenCounts
    trace: RequestTrace | None
    raw: Json

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.choices[0].text

    @property
    def prompt_tokens(self) -> int:
        return self.usage.prompt_tokens

    @property
    def completion_tokens(self) -> int:
        return self.usage.completion_tokens

    @property
    def cached(self) -> CachedTokens | None:
        """Prompt tokens not computed, by the tier that they were taken from."""
        return self.trace.cached if self.trace else None

    @property
    def route(self) -> str | None:
        """`cold` or `warm`."""
        return self.trace.route if self.trace else None

    @property
    def reason(self) -> str | None:
        return self.trace.reason if self.trace else None

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the request's arrival at the router to its first token."""
        return self.trace.actual_ttft_s if self.trace else None


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a streamed answer. `index` tells which answer it belongs to. The last chunk of a stream has no text, but `usage` and
    `trace`."""

    index: int
    text: str
    finish_reason: str | None
    stop_reason: str | int | None
    logprobs: Json | None
    usage: TokenCounts | None
    trace: RequestTrace | None
    raw: Json


@dataclass(frozen=True, slots=True)
class PlanCandidate:
    """A worker that was considered for a prompt, with the figures: cached tokens by tier, tokens to compute, predicted seconds."""

    worker: str
    role: str
    cached: CachedTokens
    new_tokens: int
    backlog_s: float
    fetch_s: float
    prefill_s: float
    inflicted_s: float
    ttft_s: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be decided for a request now, and why."""

    prompt_tokens: int
    route: str
    policy: str
    reason: str
    predicted_ttft_s: float
    chosen: PlanCandidate
    considered: tuple[PlanCandidate, ...]
    raw: Json


@dataclass(frozen=True, slots=True)
class Warmed:
    """A context whose KV is committed: `pinned_blocks` of its `blocks` full blocks stay for `ttl_s`. `cached_tokens` had been cached
    before."""

    prompt_tokens: int
    cached_tokens: int
    blocks: int
    pinned_blocks: int
    ttl_s: float
    worker: str
    node: str
    raw: Json


@dataclass(frozen=True, slots=True)
class PoolState:
    """A worker's own pool, in blocks."""

    total: int
    free: int
    cached: int
    active: int
    leased: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's last report. `backlog_s`: predicted seconds of prefill that wait there."""

    worker: str
    role: str
    node: str
    state: str
    running: int
    waiting: int
    backlog_tokens: int
    backlog_s: float
    pool: PoolState


@dataclass(frozen=True, slots=True)
class SlabState:
    """A node's slab, in slots of one block each."""

    total: int
    used: int
    free: int
    reserved: int
    committed: int
    quarantined: int
    pinned: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class NodeState:
    """A node's KV cache, by its last report."""

    node: str
    slab: SlabState
    leases: int
    evictions: int
    copies_in: int


@dataclass(frozen=True, slots=True)
class SystemStatus:
    """The whole system. `directory_keys`: blocks of KV that are known to be cached somewhere."""

    in_flight: int
    queued: int
    workers: tuple[WorkerState, ...]
    nodes: tuple[NodeState, ...]
    directory_keys: int
    raw: Json


def generation(raw: Json) -> Generation:
    """From a completion or chat response object; raises BadMessage for anything else."""
    return _read(
        lambda: Generation(
            raw["id"], raw["model"], tuple(_choice(c) for c in raw["choices"]), _counts(raw["usage"]), _trace(raw), raw
        )
    )


def chunk(raw: Json) -> Chunk:
    """From a chunk object of either kind; raises BadMessage for anything else."""

    def read() -> Chunk:
        usage = raw.get("usage")
        one = _choice(raw["choices"][0]) if raw["choices"] else Choice(0, "", None, None, None)
        counts = None if usage is None else _counts(usage)
        return Chunk(one.index, one.text, one.finish_reason, one.stop_reason, one.logprobs, counts, _trace(raw), raw)

    return _read(read)


def plan(raw: Json) -> Plan:
    """From what `/v1/cpd/plan` answers; raises BadMessage for anything else."""

    def read() -> Plan:
        considered = tuple(_candidate(c) for c in raw["considered"])
        return _picked(Plan, raw, raw=raw, chosen=_candidate(raw["chosen"]), considered=considered)

    return _read(read)


def warmed(raw: Json) -> Warmed:
    """From what `/v1/cpd/warm` answers; raises BadMessage for anything else."""
    return _read(lambda: _picked(Warmed, raw, raw=raw))


def status(raw: Json) -> SystemStatus:
    """From what `/v1/cpd/status` answers; raises BadMessage for anything else."""

    def read() -> SystemStatus:
        workers = tuple(_picked(WorkerState, w, pool=_picked(PoolState, w["pool"])) for w in raw["workers"])
        nodes = tuple(_picked(NodeState, n, slab=_picked(SlabState, n["slab"])) for n in raw["nodes"])
        return SystemStatus(raw["requests"]["in_flight"], raw["requests"]["queued"], workers, nodes, raw["directory"]["keys"], raw)

    return _read(read)


def _read(read: Callable[[], T]) -> T:
    try:
        return read()
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise BadMessage("the system's answer is not of the shape that this client knows: are their versions equal?") from error


def _picked(kind: type[T], raw: Json, /, **given: Any) -> T:
    """An object of this dataclass from the fields of the same names; fields that it does not have are left in the raw data."""
    return kind(**given, **{f.name: raw[f.name] for f in fields(kind) if f.name not in given})  # type: ignore[arg-type]


def _choice(raw: Json) -> Choice:
    body = raw.get("message") or raw.get("delta") or {}
    text = raw["text"] if "text" in raw else body.get("content")
    return Choice(raw["index"], text or "", raw["finish_reason"], raw.get("stop_reason"), raw.get("logprobs"))


def _counts(raw: Json) -> TokenCounts:
    details = raw.get("prompt_tokens_details") or {}
    return TokenCounts(raw["prompt_tokens"], raw["completion_tokens"], details.get("cached_tokens"))


def _trace(raw: Json) -> RequestTrace | None:
    told = raw.get("cpd")
    if told is None:
        return None
    cached = CachedTokens(**told["cached_tokens"])
    return _picked(RequestTrace, told, workers=tuple(told["workers"]), cached=cached, phases_s=dict(told["phases_s"]))


def _candidate(raw: Json) -> PlanCandidate:
    return _picked(PlanCandidate, raw, cached=CachedTokens(**raw["cached_tokens"]))

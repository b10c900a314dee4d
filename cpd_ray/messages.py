"""Everything that crosses a process between our own actors, typed, and its one codec.

Token ids and keys travel as buffers. Messages are frozen dataclasses; over Ray they are arguments and results, on a socket of
ours they are msgpack (`encode`, `decode`), never pickle. Invariant: `decode(type(m), encode(m)) == m` for each of `MESSAGES`.

Times are durations, never clock readings: no clock is compared across processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec

from cpd_ray.errors import BadMessage
from cpd_ray.ids import LeaseId, NodeId, RequestId, ReservationId, SourceId, WorkerId
from cpd_ray.types import CachedTokens, FinishReason, Role, SamplingParams, TokenLogprobs

# -- regions of memory that a peer may read --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegionRef:
    """A region of equal slots at a peer. `generation` changes whenever the owner restarts or re-registers it."""

    peer: str
    region: str
    generation: int


@dataclass(frozen=True, slots=True)
class PeerDescriptor:
    """What a reader needs before it may read: `metadata` is the transport's own; `layout` the digest of the block layout, which
    must equal the reader's; `slots_per_extent` for each region, in order of its extents."""

    peer: str
    transport: str
    layout: bytes
    metadata: bytes
    regions: tuple[RegionDescriptor, ...]


@dataclass(frozen=True, slots=True)
class RegionDescriptor:
    ref: RegionRef
    slot_bytes: int
    extent_slots: tuple[int, ...]
    extent_addresses: tuple[int, ...]
    device: int | None = None


# -- KV-cache actor (one a node): the slab's protocol ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReserveBlocks:
    """Ask for slots to write `keys` (joined, in chain order) into; `parent` is the key before the first, empty at the root."""

    writer: str
    keys: bytes
    parent: bytes = b""


@dataclass(frozen=True, slots=True)
class Reservation:
    """`slots[i]` for the i-th key asked for; None where the slab already holds it, is being given it, or has no room."""

    reservation_id: ReservationId
    epoch: int
    ttl_s: float
    slots: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class CommitBlocks:
    """`written`: the keys (joined) whose slots now hold their bytes; the reservation's others are freed. `checksums`: one a key, or empty."""

    reservation_id: ReservationId
    epoch: int
    written: bytes
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseBlocks:
    """Ask to read as many leading `keys` (joined) as are there."""

    holder: str
    keys: bytes
    remote: bool


@dataclass(frozen=True, slots=True)
class LeaseGrant:
    """Slots of the leading keys found, readable until the reader's clock at *sending the request* + `ttl_s`. `lease_id` is None
    when nothing was found."""

    lease_id: LeaseId | None
    epoch: int
    ttl_s: float
    slots: tuple[int, ...]
    region: RegionRef | None = None
    checksums: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PinBlocks:
    """Keep `keys` (joined) from eviction for `ttl_s` seconds, within the slab's pin budget. `pin_id` names the pin for renewal."""

    pin_id: str
    keys: bytes
    ttl_s: float


@dataclass(frozen=True, slots=True)
class SlabCounts:
    """A slab's slots by state, and its leases. total = free + reserved + committed + quarantined."""

    total: int
    free: int
    reserved: int
    committed: int
    quarantined: int
    pinned: int
    leases: int
    bytes_total: int


@dataclass(frozen=True, slots=True)
class NodeReport:
    """`copies_in`: blocks pulled from other nodes so far, `copying`: being pulled now; `evictions`, `leases_lapsed`: so far."""

    node: NodeId
    epoch: int
    slots: SlabCounts
    evictions: int = 0
    copies_in: int = 0
    copying: int = 0
    leases_lapsed: int = 0


# -- the directory's feed --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KvEvents:
    """One source's changes, in order. `stored` and `removed` are joined keys; within a batch `removed` applies first. `cleared`:
    forget all of this source's earlier keys before applying. A gap in `sequence` within an epoch means: ask for a snapshot."""

    source: SourceId
    node: NodeId
    epoch: int
    sequence: int
    stored: bytes = b""
    removed: bytes = b""
    cleared: bool = False


@dataclass(frozen=True, slots=True)
class EventsPage:
    """Answer to "what came after `sequence`": batches in order; the first is a `cleared` snapshot when the log no longer reaches back."""

    batches: tuple[KvEvents, ...]


@dataclass(frozen=True, slots=True)
class EventsAfter:
    source: SourceId
    epoch: int
    sequence: int
    wait_s: float = 0.0


# -- workers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NodeRun:
    """The router's belief: `node`'s slab holds the prompt's first `blocks` blocks."""

    node: NodeId
    blocks: int


@dataclass(frozen=True, slots=True)
class Origin:
    """Which router sent this, as its how-manieth message to this worker: so that a report tells which of them it has counted."""

    router: str = ""
    sequence: int = 0


@dataclass(frozen=True, slots=True)
class PrefillRequest:
    """Compute a prompt's KV and, unless `commit_only`, sample its first token and keep the KV for a decode worker.

    `root`: the key before the first block (see `kv.keys`). `tokens`: uint32 buffer of prompt + tokens already sent; `prompt_tokens`
    of them are the client's. `believed_cached_tokens`: what the router counted on; a worker that finds far less raises
    CacheMissed when `may_bounce`. `seed` is never None here, so that a resumed answer continues alike.
    """

    request_id: RequestId
    root: bytes
    tokens: bytes
    prompt_tokens: int
    sampling: SamplingParams
    sources: tuple[NodeRun, ...] = ()
    believed_cached_tokens: int = 0
    may_bounce: bool = False
    commit_only: bool = False
    priority: int = 0
    handover_ttl_s: float = 30.0
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class Handover:
    """A lease on the blocks of a prefilled request in the pool of `worker`: `blocks[i]` holds tokens
    [i*block_size, (i+1)*block_size), the last one perhaps partly; `tokens` have KV. `peer` is what a reader connects with. The holder
    keeps the blocks for `ttl_s` plus a grace from its own sending; the router ends the lease when decode has read them."""

    worker: WorkerId
    node: NodeId
    lease_id: LeaseId
    region: RegionRef
    blocks: tuple[int, ...]
    tokens: int
    ttl_s: float
    peer: PeerDescriptor | None = None


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """`token` is None for `commit_only`. `finish_reason` is set when the first token ended the answer; then there is no handover."""

    request_id: RequestId
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
    cached: CachedTokens
    phases_s: dict[str, float]
    handover: Handover | None = None
    committed_blocks: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """Continue after `tokens` (prompt + what was sent). KV is taken from own pool, the handover, own slab, other slabs; the rest
    is recomputed. `prompt_tokens` of `tokens` are the client's prompt."""

    request_id: RequestId
    root: bytes
    tokens: bytes
    prompt_tokens: int
    sampling: SamplingParams
    handover: Handover | None = None
    sources: tuple[NodeRun, ...] = ()
    priority: int = 0
    origin: Origin = Origin()


@dataclass(frozen=True, slots=True)
class DecodeChunk:
    """Tokens that were ready together. `index`: the first one's position in the answer (0 is the prefill worker's token). The first
    chunk has `cached`: from then on the handover is not needed any more."""

    request_id: RequestId
    index: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    cached: CachedTokens | None = None
    phases_s: dict[str, float] = field(default_factory=dict)


class WorkerState(StrEnum):
    """`STARTING` takes nothing yet, `DRAINING` takes nothing new."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """A pool's blocks by state. total = free + cached + active + leased + quarantined; `cached` are committed and unreferenced
    (evictable), `active` are held by requests, `leased` by a handover only."""

    total: int
    free: int
    cached: int
    active: int
    leased: int
    quarantined: int


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step's predicted seconds = base + per_token * new tokens + per_attention * sum over requests of new * (context before +
    new / 2) + per_sequence * sequences. `samples` 0 means: nothing measured yet, the values are the configured priors."""

    base_s: float
    per_token_s: float
    per_attention_s: float
    per_sequence_s: float
    samples: int = 0

    def predict_s(self, new_tokens: int, attention: float, sequences: int) -> float:
        """Seconds of one step; `attention` = sum of new * (context before + new / 2), token pairs."""
        return self.base_s + self.per_token_s * new_tokens + self.per_attention_s * attention + self.per_sequence_s * sequences


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself, at least every half second. `backlog_tokens`: prompt tokens accepted and not yet computed or
    fetched; `backlog_s`: the same in predicted seconds, `queue_s` prompt by prompt and `queue_age_s` how long each has waited;
    `fetch_bytes_per_s`: measured, by tier below the pool."""

    worker: WorkerId
    role: Role
    node: NodeId
    epoch: int
    state: WorkerState
    running: int
    waiting: int
    backlog_tokens: int
    backlog_s: float
    pool: PoolCounts
    step_cost: StepCost
    block_size: int
    fetch_bytes_per_s: dict[str, float]
    seen: dict[str, int] = field(default_factory=dict)
    unwritten_blocks: int = 0
    model: str = ""
    queue_s: tuple[float, ...] = ()
    queue_age_s: tuple[float, ...] = ()


MESSAGES: tuple[type, ...] = (
    RegionRef, PeerDescriptor, RegionDescriptor, ReserveBlocks, Reservation, CommitBlocks, LeaseBlocks, LeaseGrant, PinBlocks,
    SlabCounts, NodeReport, KvEvents, EventsPage, EventsAfter, NodeRun, Origin, PrefillRequest, Handover, PrefillResult, DecodeRequest,
    DecodeChunk, PoolCounts, StepCost, WorkerReport,
)  # fmt: skip

M = TypeVar("M")


def encode(message: Any) -> bytes:
    """A message of ours as msgpack."""
    return msgspec.msgpack.encode(message)


def decode(kind: type[M], data: bytes) -> M:
    """The inverse of `encode`; raises BadMessage for anything that is not a `kind`."""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise BadMessage(f"not a {kind.__name__} message") from error

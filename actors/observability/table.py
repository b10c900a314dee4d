"""Every metric there is, as data: name, kind, help, labels with all their values, buckets, who exports it.

Owns the names. Measures nothing. Invariant: each label's values are a closed set, so the number of series is bounded whatever clients send.

Known names are vLLM's; `cpd_` ones are what is new here. Run as a program it prints `docs/METRICS.md`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from cpd_ray.types import FinishReason, Role, Tier

OTHER = "other"
"""What a label's value becomes that is not in its set."""
COMMON_LABELS = ("app", "model", "role")
"""On every metric: the configuration's `name`, the served model, and the kind of actor that exports it."""


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Side(StrEnum):
    """Which actors export a metric. `worker`: of every role."""

    ROUTER = "router"
    WORKER = "worker"
    NODE = "kv_cache"


LABELS: Mapping[str, tuple[str, ...]] = {
    "finished_reason": tuple(FinishReason),
    "status": ("400", "401", "403", "404", "409", "413", "429", "499", "500", "503", "504"),
    "source": (*Tier, "computed"),
    "tier": (Tier.NODE, Tier.CLUSTER),
    "route": ("cold", "warm"),
    "pool": tuple(Role),
    "reason": ("own_pool", "crossed", "own_pool_empty"),
    "block_state": ("free", "cached", "active", "leased", "quarantined"),
    "slot_state": ("free", "reserved", "committed", "quarantined"),
    "store": ("pool", "slab"),
    "phase": ("queue", "fetch", "compute"),
    "outcome": ("ok", "bounced", "draining", "failed", "aborted"),
    "written": ("written", "held", "dropped"),
    "fault": ("lapsed", "checksum", "failed"),
}
"""All values of each label, besides OTHER."""

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
TRANSFER_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
BYTES = tuple(float(4**n * 2**10) for n in range(1, 13))
RATIOS = (0.1, 0.2, 0.33, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """`labels`: besides the common ones; a key of LABELS each. `buckets`: upper bounds, of histograms only."""

    name: str
    kind: Kind
    sides: tuple[Side, ...]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exposed(self) -> str:
        """Its name at Ray's Prometheus endpoint."""
        return f"ray_{self.name}_total" if self.kind is Kind.COUNTER else f"ray_{self.name}"

    @property
    def series(self) -> tuple[str, ...]:
        """The names that a query may use."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.exposed}_{part}" for part in ("bucket", "sum", "count"))
        return (self.exposed,)

    def label_sets(self) -> Iterator[dict[str, str]]:
        """Every combination of known label values."""
        for values in itertools.product(*(LABELS[label] for label in self.labels)):
            yield dict(zip(self.labels, values, strict=True))


def _histogram(name: str, side: Side, buckets: tuple[float, ...], text: str, *labels: str) -> Metric:
    return Metric(name, Kind.HISTOGRAM, (side,), text, labels, buckets)


def _counter(name: str, text: str, *labels: str, sides: tuple[Side, ...]) -> Metric:
    return Metric(name, Kind.COUNTER, sides, text, labels)


def _gauge(name: str, text: str, *labels: str, sides: tuple[Side, ...]) -> Metric:
    return Metric(name, Kind.GAUGE, sides, text, labels)


_ROUTER, _WORKER, _NODE = (Side.ROUTER,), (Side.WORKER,), (Side.NODE,)
_STORES, _BOTH = (Side.WORKER, Side.NODE), (Side.ROUTER, Side.WORKER)

_ALL = (
    # what a client feels
    _histogram("time_to_first_token_seconds", Side.ROUTER, SECONDS, "From a request's arrival at the router to its first token."),
    _histogram("inter_token_latency_seconds", Side.ROUTER, TOKEN_SECONDS, "Between two tokens of an answer, one observation a token."),
    _histogram("e2e_request_latency_seconds", Side.ROUTER, SECONDS, "From a request's arrival at the router to its answer's end."),
    _histogram("request_queue_time_seconds", Side.ROUTER, SECONDS, "Waited for admission and in workers' queues."),
    _counter("request_success", "Answers that ended, by why: stop, length, or abort when the client left.", "finished_reason", sides=_ROUTER),
    _counter("request_errors", "Requests that failed in the router or behind it, by the HTTP status they left with.", "status", sides=_ROUTER),
    _counter("http_errors", "HTTP responses with a status of 400 or more, refusals before the router included.", "status", sides=_ROUTER),
    _counter("prompt_tokens", "Prompt tokens of answered requests.", sides=_ROUTER),
    _counter("generation_tokens", "Tokens generated.", sides=_ROUTER),
    _counter("prompt_tokens_by_source", "Prompt tokens by where their KV came from; `computed` is the rest.", "source", sides=_ROUTER),
    _gauge("num_requests_running", "Requests being worked on.", sides=_BOTH),
    _gauge("num_requests_waiting", "Requests that wait: for admission at the router, for a step at a worker.", sides=_BOTH),
    # where requests went
    _counter(
        "cpd_decisions",
        "Prefill decisions: what the request was, the pool that took it; its own pool, crossed for a gain, or no worker in its own.",
        "route", "pool", "reason", sides=_ROUTER,
    ),
    _counter("cpd_retries", "Attempts beyond a request's first.", sides=_ROUTER),
    _histogram("cpd_ttft_prediction_ratio", Side.ROUTER, RATIOS, "Predicted over actual time to first token, both from admission on.", "route"),
    _histogram("cpd_ttft_prediction_error_seconds", Side.ROUTER, SECONDS, "How far the predicted time to first token was off.", "route"),
    _gauge("cpd_workers", "Workers that the router knows, by pool.", "pool", sides=_ROUTER),
    _gauge("cpd_directory_keys", "Keys of cached blocks that the router knows of.", sides=_ROUTER),
    # workers
    _counter("cpd_worker_requests", "Requests that reached a worker, by how they ended there.", "outcome", sides=_WORKER),
    _histogram("cpd_phase_seconds", Side.WORKER, SECONDS, "Seconds of a request in a worker, by phase.", "phase"),
    _counter("prefix_cache_queries", "Prompt tokens looked up by prefill workers.", sides=_WORKER),
    _counter("prefix_cache_hits", "Prompt tokens that prefill workers did not have to compute.", sides=_WORKER),
    _gauge("cpd_backlog_seconds", "Predicted seconds of prefill accepted and not done.", sides=_WORKER),
    _gauge("cpd_backlog_tokens", "Prompt tokens accepted and neither computed nor fetched.", sides=_WORKER),
    _gauge("kv_cache_usage_perc", "Share of the pool's blocks in use, from 0 to 1; what is cached and evictable is not in use.", sides=_WORKER),
    _gauge("cpd_pool_blocks", "The pool's blocks by state.", "block_state", sides=_WORKER),
    # tiers
    _gauge("cpd_capacity_bytes", "KV that the store has room for.", "store", sides=_STORES),
    _gauge("cpd_committed_bytes", "KV in the store that prompts may reuse, or that requests hold.", "store", sides=_STORES),
    _counter("cpd_evictions", "Blocks that gave way to others.", "store", sides=_STORES),
    _counter("cpd_leases_lapsed", "Leases that ran out before they were given back.", "store", sides=_STORES),
    _counter("cpd_tier_read_bytes", "Bytes fetched into pools, by the tier that they came from.", "tier", sides=_WORKER),
    _gauge("cpd_fetch_bytes_per_second", "Measured rate of reading a tier.", "tier", sides=_WORKER),
    _counter("cpd_fetch_faults", "Fetches that became misses: lease lapsed, checksum wrong, transfer failed.", "fault", sides=_WORKER),
    _counter("cpd_quarantined_blocks", "Blocks put in quarantine because a late transfer might still write there.", sides=_WORKER),
    _counter("cpd_write_down_blocks", "Blocks offered to the slab: written, not needed or no room there, dropped.", "written", sides=_WORKER),
    _gauge("cpd_unwritten_blocks", "Blocks that wait to be written down.", sides=_WORKER),
    _gauge("cpd_slab_slots", "The slab's slots by state.", "slot_state", sides=_NODE),
    _gauge("cpd_slab_pinned", "Slots kept from eviction by a pin.", sides=_NODE),
    _gauge("cpd_slab_leases", "Leases that readers hold.", sides=_NODE),
    _counter("cpd_copied_blocks", "Blocks copied from other nodes' slabs because they were read often.", sides=_NODE),
    _gauge("cpd_copying_blocks", "Blocks being copied, or waiting for it.", sides=_NODE),
    # transfers
    Metric("nixl_xfer_time_seconds", Kind.HISTOGRAM, _STORES, "Seconds of one transfer between processes.", (), TRANSFER_SECONDS),
    Metric("nixl_bytes_transferred", Kind.HISTOGRAM, _STORES, "Bytes of one transfer.", (), BYTES),
    _counter("nixl_num_failed_transfers", "Transfers that failed or did not end in time.", sides=_STORES),
)  # fmt: skip

METRICS: Mapping[str, Metric] = {metric.name: metric for metric in _ALL}


def of_side(side: Side) -> tuple[Metric, ...]:
    """What actors of this side export."""
    return tuple(metric for metric in METRICS.values() if side in metric.sides)


_HEAD = """# Metrics and logs

Exported through Ray's metrics: scrape the endpoint of each node (`ray metrics launch-prometheus` sets a Prometheus up; addresses are in
`prom_metrics_service_discovery.json` of Ray's session folder). Ray puts `ray_` before each name and `_total` after a counter's, and adds
labels of its own, among them `WorkerId` (the process) and `NodeAddress`. Every metric here also has `app` (the configuration's `name`),
`model` and `role` (`router`, `pre_prefill`, `prefill`, `decode`, `kv_cache`). A value that a label does not list is shown as `other`.

Ray rebuilds histograms from bucket counts: quantiles are as good as the buckets, `_sum` is approximate.

`deploy/grafana/cpd.json` is a dashboard over them. This page is printed by `python -m actors.observability.table`.

| at the endpoint | kind | labels | exported by | meaning |
|---|---|---|---|---|
"""

_TAIL = """
## Logs

Every actor writes JSON lines to its standard error, which Ray keeps as `worker-*.err` in each node's session logs. The router writes one line a
request (`"event": "request"`): id, route and reason, workers, predicted and actual seconds to first token, seconds by phase, token
counts, cached tokens by tier, how it ended. Workers write one when they are done with a request (`prefill`, `decode`). Each line about a
request has `request_id`: search for the `X-Request-Id` that the client saw, over the logs of all actors. No prompt text is logged.
"""


def page() -> str:
    """`docs/METRICS.md`."""
    rows = []
    for metric in METRICS.values():
        labels = "; ".join(f"`{label}`: {', '.join(LABELS[label])}" for label in metric.labels)
        rows.append(f"| `{metric.exposed}` | {metric.kind} | {labels} | {', '.join(metric.sides)} | {metric.help} |")
    return _HEAD + "\n".join(rows) + "\n" + _TAIL


if __name__ == "__main__":
    print(page(), end="")

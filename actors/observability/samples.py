"""What actors report of themselves, as metrics: from reports and counters to samples, and from samples to a meter.

Owns no figure of its own. Invariant: a total that its source began anew (another worker's counters, a restarted slab) never makes a counter
go down or jump by what was counted already.
"""

from __future__ import annotations

from collections import Counter as Count
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from actors.http.face import Status
from actors.observability.metrics import Meter
from actors.observability.table import METRICS, Kind
from cpd_ray.messages import NodeReport, WorkerReport
from cpd_ray.types import Role
from kv.tiers import TierCounters
from kv.write_down import WriteCounters


@dataclass(frozen=True, slots=True)
class Sample:
    """A gauge's value, or a counter's total since its source began. `label`: the value of the metric's label, if it has one."""

    name: str
    value: float
    label: str | None = None


class Exporter:
    """Brings samples to a meter."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._totals: dict[tuple[str, str | None], float] = {}

    def export(self, samples: Iterable[Sample]) -> None:
        """Gauges are set, counters follow their totals."""
        for sample in samples:
            metric = METRICS[sample.name]
            labels = {} if sample.label is None else {metric.labels[0]: sample.label}
            if metric.kind is Kind.GAUGE:
                self._meter.gauge(sample.name, **labels).set(sample.value)
                continue
            before = self._totals.get((sample.name, sample.label), 0.0)
            self._totals[sample.name, sample.label] = sample.value
            grown = sample.value - before if sample.value >= before else sample.value
            self._meter.counter(sample.name, **labels).add(grown)


@dataclass(frozen=True, slots=True)
class PoolTotals:
    """A worker's counters since its start that its report does not carry. `block_bytes`: a block's size."""

    evictions: int
    leases_lapsed: int
    block_bytes: int
    tiers: TierCounters
    written: WriteCounters


def worker_samples(report: WorkerReport, totals: PoolTotals) -> Iterator[Sample]:
    """Of one worker."""
    pool, size = report.pool, totals.block_bytes
    yield Sample("num_requests_running", report.running)
    yield Sample("num_requests_waiting", report.waiting)
    yield Sample("cpd_backlog_seconds", report.backlog_s)
    yield Sample("cpd_backlog_tokens", report.backlog_tokens)
    yield Sample("kv_cache_usage_perc", 1 - (pool.free + pool.cached) / pool.total)
    for state in ("free", "cached", "active", "leased", "quarantined"):
        yield Sample("cpd_pool_blocks", getattr(pool, state), state)
    yield Sample("cpd_capacity_bytes", pool.total * size, "pool")
    yield Sample("cpd_committed_bytes", (pool.cached + pool.active + pool.leased) * size, "pool")
    yield Sample("cpd_unwritten_blocks", report.unwritten_blocks)
    for tier, rate in report.fetch_bytes_per_s.items():
        yield Sample("cpd_fetch_bytes_per_second", rate, tier)
    yield Sample("cpd_evictions", totals.evictions, "pool")
    yield Sample("cpd_leases_lapsed", totals.leases_lapsed, "pool")
    for tier, blocks in totals.tiers.blocks.items():
        yield Sample("cpd_tier_read_bytes", blocks * size, tier)
    yield Sample("cpd_fetch_faults", totals.tiers.lapsed, "lapsed")
    yield Sample("cpd_fetch_faults", totals.tiers.checksum_mismatches, "checksum")
    yield Sample("cpd_fetch_faults", totals.tiers.failures, "failed")
    yield Sample("cpd_quarantined_blocks", totals.tiers.poisoned_blocks)
    for outcome in ("written", "held", "dropped"):
        yield Sample("cpd_write_down_blocks", getattr(totals.written, outcome), outcome)


def node_samples(report: NodeReport) -> Iterator[Sample]:
    """Of one node's KV cache."""
    slots = report.slots
    for state in ("free", "reserved", "committed", "quarantined"):
        yield Sample("cpd_slab_slots", getattr(slots, state), state)
    yield Sample("cpd_slab_pinned", slots.pinned)
    yield Sample("cpd_slab_leases", slots.leases)
    yield Sample("cpd_capacity_bytes", slots.bytes_total, "slab")
    yield Sample("cpd_committed_bytes", slots.committed * (slots.bytes_total // slots.total), "slab")
    yield Sample("cpd_evictions", report.evictions, "slab")
    yield Sample("cpd_leases_lapsed", report.leases_lapsed, "slab")
    yield Sample("cpd_copied_blocks", report.copies_in)
    yield Sample("cpd_copying_blocks", report.copying)


def router_samples(status: Status) -> Iterator[Sample]:
    """Of one router."""
    yield Sample("num_requests_running", status.in_flight)
    yield Sample("num_requests_waiting", status.queued)
    yield Sample("cpd_directory_keys", status.directory_keys)
    workers = Count(report.role for report in status.workers)
    for role in Role:
        yield Sample("cpd_workers", workers[role], role)

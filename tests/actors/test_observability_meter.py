"""Meters: one contract for the one that remembers and the one over Ray; the table that both obey; what is made of reports."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.http.face import Status
from actors.observability.metrics import MemoryMeter, Meter
from actors.observability.ray_meter import RayMeter
from actors.observability.samples import Exporter, PoolTotals, Sample, node_samples, router_samples, worker_samples
from actors.observability.table import COMMON_LABELS, LABELS, METRICS, OTHER, Kind, Side, of_side, page
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.messages import NodeReport, PoolCounts, SlabCounts, StepCost, WorkerReport, WorkerState
from cpd_ray.types import Role, Tier
from kv.tiers import TierCounters
from kv.write_down import WriteCounters

REPOSITORY = Path(__file__).resolve().parents[2]

# -- the contract ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["memory", "ray"])
def meter(request: pytest.FixtureRequest) -> Meter:
    """Ray's takes calls without a cluster too; what comes out at its endpoint is `tests/ray/test_metrics.py`'s."""
    return MemoryMeter() if request.param == "memory" else RayMeter(Side.ROUTER, app="a", model="m", role="router")


def test_equal_labels_are_one_instrument_and_every_metric_of_the_table_can_be_moved(meter: Meter) -> None:
    for metric in METRICS.values():
        for labels in metric.label_sets():
            match metric.kind:
                case Kind.COUNTER:
                    meter.counter(metric.name, **labels).add(0)
                    meter.counter(metric.name, **labels).add(2.5)
                    assert meter.counter(metric.name, **labels) is meter.counter(metric.name, **labels)
                case Kind.GAUGE:
                    meter.gauge(metric.name, **labels).set(-1)
                    assert meter.gauge(metric.name, **labels) is meter.gauge(metric.name, **labels)
                case Kind.HISTOGRAM:
                    meter.histogram(metric.name, **labels).observe(0.2, 3)
                    assert meter.histogram(metric.name, **labels) is meter.histogram(metric.name, **labels)
    assert meter.instruments == sum(len(list(metric.label_sets())) for metric in METRICS.values())


def test_what_is_not_in_the_table_is_our_own_bug(meter: Meter) -> None:
    with pytest.raises(KeyError):
        meter.counter("no_such_metric")
    with pytest.raises(AssertionError, match="is a counter, not a gauge"):
        meter.gauge("cpd_retries")
    with pytest.raises(AssertionError, match="has the labels"):
        meter.counter("request_errors")
    with pytest.raises(AssertionError, match="has the labels"):
        meter.counter("cpd_retries", status="500")
    with pytest.raises(AssertionError, match="went down"):
        meter.counter("cpd_retries").add(-1)


def test_hostile_label_values_make_no_new_series(meter: Meter) -> None:
    rng = random.Random(7)
    for _ in range(3000):
        value = "".join(chr(rng.randrange(1, 0x300)) for _ in range(rng.randrange(12)))
        meter.counter("request_errors", status=rng.choice([value, "429"])).add()
    known = len(list(METRICS["request_errors"].label_sets())) if isinstance(meter, RayMeter) else 1
    others = sum(len(list(m.label_sets())) for m in of_side(Side.ROUTER) if m.kind is Kind.COUNTER and m.name != "request_errors")
    assert meter.instruments == known + 1 + (others if isinstance(meter, RayMeter) else 0)


def test_the_remembering_meter_remembers() -> None:
    meter = MemoryMeter()
    meter.counter("request_errors", status="429").add()
    meter.counter("request_errors", status="429").add(2)
    meter.counter("request_errors", status="418").add()
    meter.gauge("cpd_backlog_seconds").set(3)
    meter.gauge("cpd_backlog_seconds").set(2)
    meter.histogram("cpd_phase_seconds", phase="queue").observe(0.5, 2)
    assert meter.read("request_errors") == {("429",): 3, (OTHER,): 1}
    assert meter.read("cpd_backlog_seconds") == {(): 2}
    assert meter.observed("cpd_phase_seconds") == {("queue",): [0.5, 0.5]}


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_table_is_sound() -> None:
    assert len(METRICS) == len({metric.exposed for metric in METRICS.values()})
    for metric in METRICS.values():
        assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
        assert not metric.name.endswith("_total"), "the endpoint adds it"
        assert metric.sides
        assert not set(metric.labels) & set(COMMON_LABELS)
        assert set(metric.labels) <= LABELS.keys()
        assert (metric.kind is Kind.HISTOGRAM) == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert all(bound > 0 for bound in metric.buckets), "Ray takes no other"
        assert len(list(metric.label_sets())) <= 30, "too many series"
    assert all(OTHER not in values and len(set(values)) == len(values) for values in LABELS.values())


def test_users_find_the_names_that_they_know() -> None:
    known = (
        "time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds request_queue_time_seconds num_requests_running "
        "num_requests_waiting kv_cache_usage_perc prefix_cache_queries prefix_cache_hits prompt_tokens_by_source nixl_xfer_time_seconds "
        "nixl_bytes_transferred request_success prompt_tokens generation_tokens"
    )
    assert set(known.split()) <= METRICS.keys()
    assert all(name in known or name.startswith(("cpd_", "request_", "http_", "nixl_")) for name in METRICS)


def test_the_page_is_the_tables() -> None:
    assert (REPOSITORY / "docs" / "METRICS.md").read_text() == page(), "run: python -m actors.observability.table > docs/METRICS.md"


def test_the_dashboard_asks_for_nothing_that_is_not_there() -> None:
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "cpd.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    queries += [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    exposed = {name: metric for metric in METRICS.values() for name in metric.series}
    asked = set()
    for query in queries:
        names = re.findall(r"\bray_\w+", query)
        assert names, query
        for name in names:
            assert name in exposed, f"{name} is no metric: {query}"
            labels = {label for by in re.findall(r"by \(([^)]*)\)", query) for label in by.split(", ")}
            labels |= set(re.findall(r"(\w+)(?:=~|!=|=)\"", query)) | set(re.findall(r"{{(\w+)}}", query))
            assert labels <= {*exposed[name].labels, *COMMON_LABELS, "le"}, f"{labels} of {name}: {query}"
            asked.add(exposed[name].name)
    assert METRICS.keys() - asked <= {"prompt_tokens", "cpd_backlog_tokens", "cpd_fetch_bytes_per_second", "cpd_copying_blocks"}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboards_legends_name_labels_that_their_queries_keep() -> None:
    dashboard = json.loads((REPOSITORY / "deploy" / "grafana" / "cpd.json").read_text())
    for target in (target for panel in dashboard["panels"] for target in panel.get("targets", ())):
        kept = {label for by in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in by.split(", ")}
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= kept, target


# -- samples ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(0, 1000), st.just("restart")), max_size=40))
def test_a_counter_is_the_sum_of_what_its_sources_counted(moves: list[int | str]) -> None:
    meter = MemoryMeter()
    exporter = Exporter(meter)
    total, counted = 0, 0
    for move in moves:
        if move == "restart":
            total = 0
            exporter.export([Sample("cpd_evictions", 0, "pool")])
            continue
        assert isinstance(move, int)
        total, counted = total + move, counted + move
        exporter.export([Sample("cpd_evictions", total, "pool"), Sample("cpd_evictions", 5, "slab")])
    expected = {("pool",): counted, ("slab",): 5 if any(isinstance(m, int) for m in moves) else 0}
    assert meter.read("cpd_evictions") == {labels: value for labels, value in expected.items() if value}


POOL = PoolCounts(total=100, free=40, cached=35, active=15, leased=7, quarantined=3)
REPORT = WorkerReport(
    WorkerId("w"), Role.PREFILL, NodeId("n"), 1, WorkerState.READY, 2, 3, 4000, 5.5, POOL, StepCost(0.01, 0.001, 0.0, 0.0), 16,
    {Tier.NODE: 4e9, Tier.CLUSTER: 1e9}, unwritten_blocks=6,
)  # fmt: skip
TOTALS = PoolTotals(
    evictions=11,
    leases_lapsed=12,
    block_bytes=1000,
    tiers=TierCounters({Tier.NODE: 13, Tier.CLUSTER: 14}, lapsed=15, poisoned_blocks=16, checksum_mismatches=17, failures=18),
    written=WriteCounters(19, 20, 21),
)
NODE = NodeReport(NodeId("n"), 1, SlabCounts(50, 20, 4, 25, 1, 2, 3, 50_000), evictions=7, copies_in=8, copying=9, leases_lapsed=10)


def test_a_workers_report_is_all_there() -> None:
    meter = MemoryMeter()
    Exporter(meter).export(worker_samples(REPORT, TOTALS))
    assert meter.read("num_requests_running") == {(): 2}
    assert meter.read("num_requests_waiting") == {(): 3}
    assert meter.read("cpd_backlog_tokens") == {(): 4000}
    assert meter.read("cpd_backlog_seconds") == {(): 5.5}
    assert meter.read("kv_cache_usage_perc") == {(): 0.25}
    assert meter.read("cpd_pool_blocks") == {
        ("free",): 40, ("cached",): 35, ("active",): 15, ("leased",): 7, ("quarantined",): 3
    }  # fmt: skip
    assert meter.read("cpd_capacity_bytes") == {("pool",): 100_000}
    assert meter.read("cpd_committed_bytes") == {("pool",): 57_000}
    assert meter.read("cpd_unwritten_blocks") == {(): 6}
    assert meter.read("cpd_fetch_bytes_per_second") == {("node",): 4e9, ("cluster",): 1e9}
    assert meter.read("cpd_evictions") == {("pool",): 11}
    assert meter.read("cpd_leases_lapsed") == {("pool",): 12}
    assert meter.read("cpd_tier_read_bytes") == {("node",): 13_000, ("cluster",): 14_000}
    assert meter.read("cpd_fetch_faults") == {("lapsed",): 15, ("checksum",): 17, ("failed",): 18}
    assert meter.read("cpd_quarantined_blocks") == {(): 16}
    assert meter.read("cpd_write_down_blocks") == {("written",): 19, ("held",): 20, ("dropped",): 21}


def test_a_nodes_and_a_routers_reports_are_all_there() -> None:
    meter = MemoryMeter()
    decode = replace(REPORT, role=Role.DECODE)
    Exporter(meter).export([*node_samples(NODE), *router_samples(Status(4, 5, (REPORT, decode, REPORT), (NODE,), 6))])
    assert meter.read("cpd_slab_slots") == {("free",): 20, ("reserved",): 4, ("committed",): 25, ("quarantined",): 1}
    assert (meter.read("cpd_slab_pinned"), meter.read("cpd_slab_leases")) == ({(): 2}, {(): 3})
    assert meter.read("cpd_capacity_bytes") == {("slab",): 50_000}
    assert meter.read("cpd_committed_bytes") == {("slab",): 25_000}
    assert meter.read("cpd_evictions") == {("slab",): 7}
    assert meter.read("cpd_leases_lapsed") == {("slab",): 10}
    assert (meter.read("cpd_copied_blocks"), meter.read("cpd_copying_blocks")) == ({(): 8}, {(): 9})
    assert (meter.read("num_requests_running"), meter.read("num_requests_waiting")) == ({(): 4}, {(): 5})
    assert meter.read("cpd_directory_keys") == {(): 6}
    assert meter.read("cpd_workers") == {("prefill",): 2, ("decode",): 1}


def test_every_gauge_is_sampled_by_every_side_that_exports_it() -> None:
    sampled = {
        Side.WORKER: {s.name for s in worker_samples(REPORT, TOTALS)},
        Side.NODE: {s.name for s in node_samples(NODE)},
        Side.ROUTER: {s.name for s in router_samples(Status(0, 0, (), (), 0))},
    }
    for side, names in sampled.items():
        gauges = {metric.name for metric in of_side(side) if metric.kind is Kind.GAUGE}
        assert gauges == {name for name in names if METRICS[name].kind is Kind.GAUGE}
        assert names <= {metric.name for metric in of_side(side)}

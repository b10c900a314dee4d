"""What the whole system tells its operators: metrics at Ray's Prometheus endpoints, and logs that one request id finds in every actor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import httpx
import openai
import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from actors.observability.table import LABELS, METRICS, OTHER, Kind, Side
from cpd_ray.types import CachedTokens
from tests.ray.system import BLOCK, Asker, until

pytestmark = pytest.mark.slow

BLOCKS = 8
LENGTH = BLOCKS * BLOCK + 5
Series = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape() -> Series:
    """Our own series of all nodes, over all processes: name and labels (ours only) to value."""
    sums: Counter[tuple[str, frozenset[tuple[str, str]]]] = Counter()
    ours = {name for metric in METRICS.values() for name in metric.series}
    async with httpx.AsyncClient(timeout=60) as client:
        for node in ray.nodes():
            if not node["Alive"]:
                continue
            response = await client.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics")
            for family in text_string_to_metric_families(response.text):
                for sample in family.samples:
                    if sample.name in ours and sample.labels.get("app") == "cpd":
                        labels = {k: v for k, v in sample.labels.items() if k in {"role", *LABELS}}
                        sums[sample.name, frozenset(labels.items())] += sample.value
    return sums


def total(series: Series, metric: str, **labels: str) -> float:
    """A counter's value, or a histogram's count, over all series with these labels."""
    name = METRICS[metric].exposed + ("_count" if METRICS[metric].kind is Kind.HISTOGRAM else "")
    return sum(value for (known, having), value in series.items() if known == name and labels.items() <= dict(having).items())


async def a_bit_of_everything(asker: Asker) -> None:
    """Cold, warm from each tier, streamed, refused, and left by its client."""
    prompt = await asker.ids(LENGTH)
    cached = BLOCKS * BLOCK
    await asker.complete(prompt)
    await asker.known(prompt, CachedTokens(cluster=cached))
    await asker.complete(prompt)
    await asker.known(prompt, CachedTokens(pool=cached))
    await asker.complete(prompt)
    await asker.forget("pool")
    await asker.known(prompt, CachedTokens(node=cached))
    await asker.complete(prompt)
    with pytest.raises(openai.BadRequestError):
        await asker.complete(prompt, max_tokens=10**6)
    with pytest.raises(openai.NotFoundError):
        await asker.openai.completions.create(model="no such model", prompt="a")
    stream = await asker.stream(await asker.ids(LENGTH), max_tokens=2000, extra_body={"ignore_eos": True})
    async for _ in stream:
        break
    await stream.close()


MOVED: tuple[tuple[str, dict[str, str], float], ...] = (
    ("time_to_first_token_seconds", {}, 5),
    ("inter_token_latency_seconds", {}, 4),
    ("e2e_request_latency_seconds", {}, 5),
    ("request_queue_time_seconds", {}, 4),
    ("request_success", {"finished_reason": "abort"}, 1),
    ("http_errors", {"status": "400"}, 1),
    ("http_errors", {"status": "404"}, 1),
    ("prompt_tokens", {}, 4 * LENGTH),
    ("generation_tokens", {}, 5),
    ("prompt_tokens_by_source", {"source": "cluster"}, BLOCKS * BLOCK),
    ("prompt_tokens_by_source", {"source": "node"}, BLOCKS * BLOCK),
    ("prompt_tokens_by_source", {"source": "pool"}, BLOCKS * BLOCK),
    ("prompt_tokens_by_source", {"source": "computed"}, LENGTH),
    ("cpd_decisions", {"route": "cold", "pool": "pre_prefill", "reason": "own_pool"}, 1),
    ("cpd_decisions", {"route": "warm", "pool": "prefill", "reason": "own_pool"}, 3),
    ("cpd_ttft_prediction_ratio", {"route": "warm"}, 1),
    ("cpd_ttft_prediction_error_seconds", {"route": "warm"}, 1),
    ("cpd_worker_requests", {"role": "pre_prefill", "outcome": "ok"}, 1),
    ("cpd_worker_requests", {"role": "prefill", "outcome": "ok"}, 3),
    ("cpd_worker_requests", {"role": "decode", "outcome": "aborted"}, 1),
    ("cpd_phase_seconds", {"role": "prefill", "phase": "compute"}, 3),
    ("prefix_cache_queries", {"role": "prefill"}, 3 * LENGTH),
    ("prefix_cache_hits", {"role": "prefill"}, 3 * BLOCKS * BLOCK),
    ("cpd_tier_read_bytes", {"role": "prefill", "tier": "cluster"}, 1),
    ("cpd_tier_read_bytes", {"role": "prefill", "tier": "node"}, 1),
    ("cpd_write_down_blocks", {"written": "written"}, BLOCKS),
    ("nixl_xfer_time_seconds", {"role": "decode"}, 1),
    ("nixl_bytes_transferred", {"role": "decode"}, 1),
)
"""What a bit of everything moves, by how much at least."""
RARE = {"request_errors", "cpd_retries", "cpd_evictions", "cpd_leases_lapsed", "cpd_fetch_faults", "cpd_quarantined_blocks"} | {
    "nixl_num_failed_transfers", "cpd_copied_blocks",
}  # fmt: skip
"""Counters that stay where they are when nothing goes wrong and nothing is short; they are there all the same, at 0."""


async def test_every_documented_metric_is_at_the_endpoint_and_moves(asker: Asker) -> None:
    before = await scrape()
    await a_bit_of_everything(asker)

    async def look() -> str:
        now = await scrape()
        missing = [metric.name for metric in METRICS.values() if not {name for name, _ in now} >= set(metric.series)]
        still = [
            f"{name}{labels}: {total(before, name, **labels)} to {total(now, name, **labels)}"
            for name, labels, least in MOVED
            if total(now, name, **labels) - total(before, name, **labels) < least
        ]
        return f"missing: {missing}; unmoved: {still}" if missing or still else ""

    await until(look, "metrics are missing")
    series = await scrape()
    assert {name for name, _, _ in MOVED} | RARE == {m.name for m in METRICS.values() if m.kind is not Kind.GAUGE}
    assert not [key for key in series if OTHER in dict(key[1]).values()], "a value that the table does not know"
    for metric in METRICS.values():
        roles = {dict(labels)["role"] for name, labels in series if name == metric.series[-1]}
        workers = {"pre_prefill", "prefill", "decode"}
        may = {"router"} if Side.ROUTER in metric.sides else set()
        may |= workers if Side.WORKER in metric.sides else set()
        may |= {"kv_cache"} if Side.NODE in metric.sides else set()
        assert roles and roles <= may, metric.name
        if metric.kind is not Kind.HISTOGRAM:
            assert roles == may, metric.name


async def test_gauges_agree_with_the_status(asker: Asker) -> None:
    status = await asker.status()

    async def look() -> str:
        series = await scrape()
        found: dict[str, Any] = {
            "workers": {dict(labels)["pool"]: v for (name, labels), v in series.items() if name == "ray_cpd_workers"},
            "slots": sum(v for (name, _), v in series.items() if name == "ray_cpd_slab_slots"),
            "blocks": sum(v for (name, _), v in series.items() if name == "ray_cpd_pool_blocks"),
            "running": sum(v for (name, _), v in series.items() if name == "ray_num_requests_running"),
        }
        wanted = {
            "workers": Counter(worker["role"] for worker in status["workers"]),
            "slots": sum(node["slab"]["total"] for node in status["nodes"]),
            "blocks": sum(worker["pool"]["total"] for worker in status["workers"]),
            "running": 0,
        }
        return "" if found == wanted else f"{found}, not {wanted}"

    await until(look, "gauges differ from the status")

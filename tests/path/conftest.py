"""One local cluster of processes, shared by the tests of a module: real NIXL between two nodes, real engines, one router."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio

from actors.local.cluster import LocalCluster
from cpd_ray.config import load


def config_of(model: str, **sections: Any) -> Any:
    """Every prompt with nothing cached is cold, each block read from afar is copied near, fp32, checksums on."""
    base: dict[str, Any] = {
        "model": {"id": model, "dtype": "float32", "threads": 1},
        "cache": {"block_tokens": 64, "pool_tokens": 8192},
        "transfer": {"copy_after_reads": 1, "copy_share": 1.0, "checksums": True},
        "runtime": {
            "routing": {"policy": "threshold", "cold_min_uncached_tokens": 1},
            "engine": {"step_tokens": 1024, "chunk_tokens": 512},
        },
    }
    return load({**base, **sections})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiny_cluster() -> AsyncIterator[LocalCluster]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    async with LocalCluster(config_of("tiny"), slab_mib=64) as cluster:
        yield cluster
        await assert_nothing_leaked(cluster)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def smollm2_cluster() -> AsyncIterator[LocalCluster]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    async with LocalCluster(config_of("smollm2"), slab_mib=768) as cluster:
        yield cluster
        await assert_nothing_leaked(cluster)


async def assert_nothing_leaked(cluster: LocalCluster) -> None:
    """No request, reservation, lease or block is held when nobody asks for anything."""
    await cluster.router.membership.settled()
    cluster.router.check()
    counts = cluster.router.counts
    assert (counts.in_flight, counts.queued) == (0, 0)
    for client in cluster.workers().values():
        pool = (await client.report()).pool
        assert (pool.active, pool.leased, pool.quarantined) == (0, 0, 0), pool
    for node in cluster.nodes().values():
        slots = (await node.report()).slots
        assert (slots.reserved, slots.quarantined, slots.leases) == (0, 0, 0), slots

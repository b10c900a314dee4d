"""Processes die, freeze and come back under running answers: the tokens stay those of an undisturbed request, each sent once.

Two decode workers, one a node. The tests stand in the order of what they break: caches freeze, workers die (some come back), caches die,
and then all who prefill.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from actors import build
from actors.local.cluster import LocalCluster, NodePlan
from cpd_ray.config import load
from cpd_ray.errors import Unavailable, WorkerGone
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import CachedTokens, Role
from tests.path.asking import ask, busy, collect, nothing_left, prompt, request, until
from tests.path.conftest import config_of
from tests.path.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PREFILL = WorkerId("n1-prefill-0")
PRE_PREFILL = WorkerId("n0-pre-prefill-0")
DECODES = (WorkerId("n0-decode-1"), WorkerId("n1-decode-1"))
PLAN = (NodePlan("n0", (Role.PRE_PREFILL, Role.DECODE)), NodePlan("n1", (Role.PREFILL, Role.DECODE)))
HANDOVER_TTL_S = 2.0
RECLAIMED_S = 20.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[LocalCluster]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    async with LocalCluster(config_of("tiny"), PLAN, slab_mib=64) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(running: LocalCluster) -> AsyncIterator[LocalCluster]:
    """After each test nothing is held by whoever lives."""
    runtime = running.config.runtime
    running.router.reconfigure(runtime.model_copy(update={"handover_ttl_s": HANDOVER_TTL_S}))
    yield running
    running.router.reconfigure(runtime)
    await nothing_left(running, RECLAIMED_S)


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build.model_folder(load({"model": {"id": "tiny"}})))


async def forget_pools(cluster: LocalCluster) -> None:
    for client in cluster.workers().values():
        with contextlib.suppress(WorkerGone):
            await client.clear_pool()
    await cluster.router.membership.refresh()


async def warmed(cluster: LocalCluster, seed: int, tokens: int) -> list[int]:
    """A prompt whose KV is in slabs only: the next request for it is warm, and reads it from there."""
    ids = prompt(seed, tokens)
    await ask(cluster, request(ids, 1))
    await cluster.router.membership.settled()
    await forget_pools(cluster)
    return ids


async def test_a_lapsed_handover_is_computed_again(cluster: LocalCluster, oracle: Oracle) -> None:
    cluster.router.reconfigure(cluster.config.runtime.model_copy(update={"handover_ttl_s": 1e-6}))
    for length in (30, 64, 65, 700):
        ids = prompt(100 + length, length)
        answer = await ask(cluster, request(ids, 20, ignore_eos=False))
        assert answer.tokens == await asyncio.to_thread(oracle.greedy, ids, 20)


# -- caches freeze -----------------------------------------------------------------------------------------------------


async def test_a_slab_that_freezes_while_it_is_read_changes_no_token(cluster: LocalCluster, oracle: Oracle) -> None:
    rng = random.Random(6)
    for round_ in range(4):
        ids = await warmed(cluster, 200 + round_, 4000)
        wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
        asking = asyncio.create_task(ask(cluster, request(ids, ignore_eos=False)))
        await asyncio.sleep(rng.random() * 0.02)
        await cluster.kill("n0", signal.SIGSTOP)
        try:
            await asyncio.sleep(0.3 if round_ else 3.0)
        finally:
            await cluster.kill("n0", signal.SIGCONT)
        assert (await asking).tokens == wanted
        await cluster.router.membership.settled()


async def test_a_frozen_slab_is_a_miss_within_its_patience(cluster: LocalCluster, oracle: Oracle) -> None:
    ids = await warmed(cluster, 210, 2000)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    await cluster.kill("n0", signal.SIGSTOP)
    try:
        answer = await ask(cluster, request(ids, ignore_eos=False))
    finally:
        await cluster.kill("n0", signal.SIGCONT)
    assert answer.tokens == wanted
    assert answer.usage.cached == CachedTokens()


# -- workers die -----------------------------------------------------------------------------------------------------


async def test_answers_of_a_dead_decode_worker_go_on_elsewhere_unchanged(cluster: LocalCluster) -> None:
    """Greedy and sampled ones, in all stages of decoding; the last to come may not have reached it yet."""
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "repetition_penalty": 1.1}
    kinds: list[dict[str, Any]] = [{}, sampled, {}, {**sampled, "seed": 2**63}, sampled, {}]
    asked = [(prompt(20 + i, 60 + 97 * i), 300, kind) for i, kind in enumerate(kinds)]
    whole = [(await ask(cluster, request(ids, most, **kind))).tokens for ids, most, kind in asked]
    tokens: list[int] = []
    ids, most, kind = asked[1]
    stream = cluster.router.generate(request(ids, most, **kind))
    while len(tokens) < 70:
        tokens += (await anext(stream)).tokens
    others = [asyncio.create_task(ask(cluster, request(ids, most, **kind))) for ids, most, kind in asked]
    dead = await busy(cluster, Role.DECODE)
    await cluster.kill(dead)
    last = await collect(stream, tokens)
    answers = await asyncio.gather(*others)
    assert tokens == whole[1]
    assert [a.tokens for a in answers] == whole
    assert last.trace is not None and last.trace.attempts == 2
    assert {w for w in last.trace.workers if w in DECODES} == set(DECODES)
    await cluster.revive(dead)
    await cluster.kill(next(name for name in DECODES if name != dead))
    answers = await asyncio.gather(*(ask(cluster, request(ids, most, **kind)) for ids, most, kind in asked))
    assert [a.tokens for a in answers] == whole
    assert all(a.trace.workers[-1] == dead for a in answers), "who came back takes over"


async def test_a_dead_prefill_worker_is_replaced_by_pre_prefill(cluster: LocalCluster, oracle: Oracle) -> None:
    ids = await warmed(cluster, 1, 1500) + prompt(2, 6000)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    asking = asyncio.create_task(ask(cluster, request(ids, ignore_eos=False)))
    assert await busy(cluster, Role.PREFILL) == PREFILL
    await cluster.kill(PREFILL)
    answer = await asking
    assert answer.tokens == wanted
    assert answer.trace.workers[:2] == (PREFILL, PRE_PREFILL)
    assert answer.trace.attempts == 2
    await cluster.revive(PREFILL)
    again = await ask(cluster, request(ids, ignore_eos=False))
    assert again.tokens == wanted
    assert again.trace.workers[0] == PREFILL


# -- caches die ------------------------------------------------------------------------------------------------------


async def test_a_dead_slab_is_a_miss(cluster: LocalCluster, oracle: Oracle) -> None:
    """First the far one of a warm prompt, then the last one: nothing is cached below the pools any more, and all is answered."""
    ids = await warmed(cluster, 220, 3000)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    await cluster.kill("n0")
    answer = await ask(cluster, request(ids, ignore_eos=False))
    assert answer.tokens == wanted
    assert answer.usage.cached == CachedTokens()

    async def forgotten() -> bool:
        await cluster.router.membership.refresh()
        return NodeId("n0") not in cluster.router.membership.node_reports

    await until(forgotten, "the dead node is forgotten")
    ids = await warmed(cluster, 221, 1000)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    for _ in range(2):  # computed by a worker without a slab, then perhaps found in its pool
        assert (await ask(cluster, request(ids, ignore_eos=False))).tokens == wanted
        await cluster.router.membership.settled()
    await cluster.kill("n1")
    await forget_pools(cluster)
    answer = await ask(cluster, request(ids, ignore_eos=False))
    assert answer.tokens == wanted
    assert answer.usage.cached == CachedTokens()


async def test_the_last_prefill_workers_die(cluster: LocalCluster, oracle: Oracle) -> None:
    ids = prompt(3, 7000)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    asking = asyncio.create_task(ask(cluster, request(ids, ignore_eos=False)))
    assert await busy(cluster, Role.PRE_PREFILL) == PRE_PREFILL
    await cluster.kill(PRE_PREFILL)
    answer = await asking
    assert answer.tokens == wanted
    assert answer.trace.workers[:2] == (PRE_PREFILL, PREFILL)
    await cluster.kill(PREFILL)
    with pytest.raises(Unavailable):
        await ask(cluster, request(prompt(4, 100)))

"""Clients over Serve handles: errors by type, cancelled work ended, and a roster that follows the replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from ray import serve

from actors.clients import DecodeClient, PrefillClient
from actors.ray_handles import ServeRoster, handle_of, replicas
from cpd_ray.errors import CacheMissed, CPDError, PeerGone, WorkerGone
from cpd_ray.types import Role
from kv.node import KvNode
from tests.ray.conftest import RayCluster
from tests.ray.echo import EchoClient, caller_app, cancel_at_moments, echo_deployment, echoes, until

ABOVE_THE_LIMIT = 6 * 2**20


async def _one(deploy: Callable[..., Any], name: str) -> EchoClient:
    (client,) = (await echoes(deploy(echo_deployment(1).bind(), name))).values()
    return client


async def test_errors_arrive_as_what_they_are(deploy: Callable[..., Any]) -> None:
    client = await _one(deploy, "errors")
    with pytest.raises(CacheMissed) as missed:
        await client.bounce(77)
    assert type(missed.value) is CacheMissed
    assert (missed.value.cached_tokens, missed.value.message) == (77, "less than believed")
    items = client.fail_after(3)
    assert [await anext(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(CacheMissed) as missed:
        await anext(items)
    assert missed.value.cached_tokens == 3
    with pytest.raises(CPDError) as fault:
        await client.fault()
    assert type(fault.value) is CPDError
    assert "none of ours" not in str(fault.value)


async def test_a_cancellation_at_the_other_end_is_not_taken_for_ones_own(deploy: Callable[..., Any]) -> None:
    client = await _one(deploy, "giveup")
    with pytest.raises(WorkerGone):
        await client.give_up()
    assert (await client.who()).pid


async def test_cancelled_calls_and_closed_streams_end_their_work(deploy: Callable[..., Any]) -> None:
    client = await _one(deploy, "cancel")
    call = asyncio.create_task(client.wait("call"))
    stream, unstarted = client.count("stream", 2), client.count("unstarted", 2)
    assert (await anext(stream))[1] == 0
    await until(lambda: _waiting(client, {"call", "stream"}))
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await stream.aclose()
    await unstarted.aclose()
    await until(lambda: _waiting(client, set()))
    _, cancelled = await client.state()
    assert sorted(cancelled) == ["call", "stream"]


async def test_a_call_cancelled_at_any_moment_leaves_no_work_behind(deploy: Callable[..., Any]) -> None:
    caller = deploy(caller_app(1), "moments")
    (client,) = (await echoes(handle_of("Echo", "moments"))).values()
    await cancel_at_moments(client)
    await caller.moments.remote()
    await caller.unasked.remote("unasked")
    await until(lambda: _waiting(client, set()))


async def _waiting(client: EchoClient, names: set[str]) -> bool:
    waiting, _ = await client.state()
    return waiting == names


async def test_messages_above_the_quick_ways_limit_go_another_way(deploy: Callable[..., Any]) -> None:
    client = await _one(deploy, "large")
    large = bytes(ABOVE_THE_LIMIT)
    assert await client.size(large) == ABOVE_THE_LIMIT
    assert len(await client.blob(ABOVE_THE_LIMIT)) == ABOVE_THE_LIMIT
    assert [n async for n in client.sizes(large)] == [ABOVE_THE_LIMIT]


async def test_from_within_a_replica_calls_of_one_request_go_where_they_should(deploy: Callable[..., Any]) -> None:
    caller = deploy(caller_app(3), "within")
    pairs = await caller.all.remote(30)
    assert len({asked for asked, _ in pairs}) == 3
    assert all(asked == answered for asked, answered in pairs)
    with pytest.raises(CacheMissed) as missed:
        await caller.bounce.remote(5)
    assert missed.value.cause.cached_tokens == 5


async def test_a_client_that_leaves_ends_its_stream_and_nothing_that_others_need(deploy: Callable[..., Any]) -> None:
    caller = deploy(caller_app(1), "leave")
    (client,) = (await echoes(handle_of("Echo", "leave"))).values()
    relay = caller.options(method_name="relay", stream=True).remote("relay", 2)
    assert (await anext(relay))[1] == 0
    keeping = caller.keep.remote("kept")
    await until(lambda: _waiting(client, {"relay", "kept"}))
    relay.cancel()
    keeping.cancel()
    await until(lambda: _waiting(client, {"kept"}))
    await client.let_go()
    assert len(await caller.kept.remote()) == 1


async def test_the_roster_names_workers_by_role_and_caches_by_node(cluster: RayCluster, deploy: Callable[..., Any]) -> None:
    prefill, decode, kv = handle_of("prefill", "roster"), handle_of("decode", "roster-decode"), handle_of("kv", "roster-kv")
    roster = ServeRoster({Role.PREFILL: prefill, Role.DECODE: decode}, kv)
    assert (roster.workers(), roster.nodes()) == ({}, {})  # nothing is deployed yet
    deploy(echo_deployment(2, name="prefill").bind(), "roster")
    deploy(echo_deployment(1, name="decode").bind(), "roster-decode")
    deploy(echo_deployment(2, name="kv", max_replicas_per_node=1).bind(), "roster-kv")
    workers = await until(lambda: found if len(found := roster.workers()) == 3 else None)
    assert sorted(w.split("-")[0] for w in workers) == ["decode", "prefill", "prefill"]
    by_name = {w.split("-")[0]: c for w, c in workers.items()}
    assert _methods(by_name["prefill"]) == _methods(PrefillClient)
    assert _methods(by_name["decode"]) == _methods(DecodeClient)
    nodes = await until(lambda: found if len(found := roster.nodes()) == 2 else None)
    assert sorted(nodes) == sorted(cluster.nodes)
    assert all(client.node == node and _methods(client) == _methods(KvNode) for node, client in nodes.items())
    again = roster.workers()
    assert all(again[w] is c for w, c in workers.items())
    serve.delete("roster-kv")
    await until(lambda: not roster.nodes())
    with pytest.raises(PeerGone):
        await next(iter(nodes.values())).report()
    assert replicas(kv) == []


def _methods(client: Any) -> set[str]:
    return {name for name in dir(client) if not name.startswith("_") and callable(getattr(client, name))}

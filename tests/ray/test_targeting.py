"""The contract with Ray 2.60's router: calls reach the replica they name and Serve counts them; the gone are told at once."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import ray
from ray import serve

from actors.ray_handles import ReplicaCaller, replicas
from actors.targets import session_for
from cpd_ray.errors import WorkerGone
from tests.ray.echo import EchoClient, echo_deployment, echoes, until


def ids(handle: Any) -> list[str]:
    return sorted(r.replica_id.unique_id for r in replicas(handle))


def test_ray_is_the_version_whose_internals_are_used() -> None:
    assert ray.__version__.split(".")[:2] == ["2", "60"]


async def test_each_call_reaches_the_replica_it_names(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(3).bind(), "targets")
    clients = await echoes(handle, 3)
    order = [i for n in range(20) for i in sorted(clients, key=lambda i: hash((i, n)))]
    answers = await asyncio.gather(*(clients[i].who() for i in order))
    assert [a.replica_id for a in answers] == order


async def test_calls_that_name_nobody_are_balanced(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(2).bind(), "balanced")
    await echoes(handle, 2)
    plain = handle.options(method_name="who", _by_reference=False)
    answers = await asyncio.gather(*(plain.remote() for _ in range(40)))
    assert {a.replica_id for a in answers} == set(ids(handle))


async def test_a_name_that_no_replica_has_is_refused_at_once(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(1).bind(), "nobody")
    await echoes(handle, 1)
    with pytest.raises(WorkerGone):
        await asyncio.wait_for(handle.options(method_name="who", session_id=session_for("nobody")).remote(), 5)


async def test_a_full_replica_makes_its_own_calls_wait_and_no_others(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(2, max_ongoing_requests=2).bind(), "full")
    clients = await echoes(handle, 2)
    full, free = clients.values()
    held = [asyncio.create_task(full.wait(f"w{n}")) for n in range(12)]
    full_id, free_id = clients
    books = handle._router._asyncio_router._metrics_manager
    await until(lambda: _queue_length(handle, full_id) >= 2 and books.num_queued_requests == 10)
    assert (await asyncio.wait_for(free.who(), 10)).replica_id == free_id
    # nothing can reach the full one by a call; what it holds ends when cancelled, and the waiting ones follow
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert (await asyncio.wait_for(full.who(), 10)).replica_id == full_id
    assert books.num_queued_requests == 0


def _queue_length(handle: Any, replica_id: str) -> int:
    router = handle._router._asyncio_router.request_router
    lengths = {r.replica_id.unique_id: router.replica_queue_len_cache.get(r.replica_id) for r in replicas(handle)}
    return lengths[replica_id] or 0


async def test_a_replica_killed_mid_stream_is_gone_and_a_replacement_appears(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(2, health_check_period_s=0.5).bind(), "killed")
    clients = await echoes(handle, 2)
    (doomed, client), (other, survivor) = clients.items()
    stream = client.count("s", 3)
    assert [await anext(stream) for _ in range(3)] == [(doomed, n) for n in range(3)]
    waiting = asyncio.create_task(client.wait("w"))
    await until(lambda: _holds(client, {"s", "w"}))
    os.kill((await client.who()).pid, signal.SIGKILL)
    with pytest.raises(WorkerGone):
        await asyncio.wait_for(anext(stream), 10)
    with pytest.raises(WorkerGone):
        await asyncio.wait_for(waiting, 10)
    with pytest.raises(WorkerGone):
        await asyncio.wait_for(client.who(), 10)
    assert (await survivor.who()).replica_id == other
    fresh = await until(lambda: set(ids(handle)) - {doomed, other})
    assert doomed not in ids(handle)
    newcomer = ReplicaCaller(handle, *fresh, WorkerGone).client(EchoClient)
    assert (await newcomer.who()).replica_id in fresh


async def _holds(client: EchoClient, names: set[str]) -> bool:
    waiting, _ = await client.state()
    return waiting == names


async def test_draining_replicas_leave_the_view_while_their_streams_go_on(deploy: Callable[..., Any]) -> None:
    handle = deploy(echo_deployment(2, graceful_shutdown_timeout_s=30).bind(), "drain")
    clients = await echoes(handle, 2)
    streams = {i: c.count("s", 2) for i, c in clients.items()}
    for i, stream in streams.items():
        assert await anext(stream) == (i, 0)
    deletion = asyncio.create_task(asyncio.to_thread(serve.delete, "drain"))
    await until(lambda: not ids(handle))
    for i, client in clients.items():
        with pytest.raises(WorkerGone):  # at once, though Serve would make calls wait for a first replica
            await asyncio.wait_for(client.who(), 5)
        assert await anext(streams[i]) == (i, 1)
    for stream in streams.values():
        await stream.aclose()
    await asyncio.wait_for(deletion, 20)

"""The whole system when clients leave and processes die: what was taken is given back, answers go on or say 503, and the next is answered."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import pytest

from cpd_ray.types import CachedTokens
from tests.ray.system import BLOCK, LONG, Asker, held, until, with_runtime

pytestmark = pytest.mark.slow


async def busy(asker: Asker, **least: int) -> list[str]:
    """Wait until workers of these roles run so many requests (`queued`: the router keeps so many waiting); the names of those that do."""
    names: list[str] = []

    async def look() -> str:
        status = await asker.status()
        running = Counter({"queued": status["requests"]["queued"]})
        for worker in status["workers"]:
            running[worker["role"]] += worker["running"]
        names[:] = [w["worker"] for w in status["workers"] if w["role"] in least and w["running"]]
        return "" if all(running[name] >= n for name, n in least.items()) else f"{running}"

    await until(look, f"never busy with {least}")
    return names


async def reclaimed(asker: Asker) -> None:
    """Wait until nothing is held for anyone any more, with the same workers."""

    async def look() -> str:
        return held(await asker.status())

    await until(look, "not reclaimed", 30)


async def test_a_client_that_leaves_during_prefill_leaves_nothing(asker: Asker) -> None:
    prompt = await asker.ids(LONG)
    for stream in (False, True):
        asking = asyncio.create_task(asker.stream(prompt, 50) if stream else asker.complete(prompt, 50))
        await busy(asker, pre_prefill=1)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await reclaimed(asker)
        await asker.forget()
    assert (await asker.complete("hello", max_tokens=2)).usage.completion_tokens == 2


async def test_a_client_that_leaves_while_it_waits_leaves_nothing(asker: Asker) -> None:
    system = asker.system
    long, other = await asker.ids(LONG), await asker.ids(200)
    system.deploy(with_runtime(system.config, admission={"max_in_flight": 1, "max_queued": 1}))

    async def left_while_queued() -> str:
        running = asyncio.create_task(asker.complete(long, max_tokens=1))
        await busy(asker, pre_prefill=1)
        waiting = asyncio.create_task(asker.complete(other))
        try:
            await busy(asker, queued=1)
        except AssertionError as error:
            return f"the new limit is not there yet: {error}"
        finally:
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await waiting

        async def unqueued() -> str:
            queued = (await asker.status())["requests"]["queued"]
            return f"{queued} queued" if queued else ""

        await until(unqueued, "who left still waits", 10)
        assert not running.done(), "the queue was looked at too late"
        assert (await running).usage.completion_tokens == 1
        return ""

    await until(left_while_queued, "nobody ever waits")
    await reclaimed(asker)
    assert await asker.in_reach(other) == CachedTokens()


async def test_a_client_that_leaves_during_decode_leaves_nothing(asker: Asker) -> None:
    prompt = await asker.ids(900)
    for chunks in (1, 5):
        stream = await asker.stream(prompt, 5000, extra_body={"ignore_eos": True})
        for _ in range(chunks):
            await anext(stream)
        await stream.close()
        await reclaimed(asker)
    assert (await asker.complete("hello", max_tokens=2)).usage.completion_tokens == 2


async def test_the_other_pool_takes_over_when_the_worker_dies_in_the_midst_of_a_prompt(asker: Asker) -> None:
    prompt = await asker.ids(LONG)
    asking = asyncio.create_task(asker.complete(prompt))
    await busy(asker, pre_prefill=1)
    dead = asker.system.kill("pre-prefill")
    answer = await asking
    assert answer.text == (await asker.greedy(prompt))[1]
    assert answer.roles[-2:] == ["prefill", "decode"]
    assert answer.trace["attempts"] == 2
    next_one = await asker.ids(100)
    assert (await asker.complete(next_one)).text == (await asker.greedy(next_one))[1]
    await replaced(asker, "pre-prefill", dead.replica_id)
    again = await asker.ids(300)
    fresh = await asker.complete(again)
    assert (fresh.text, fresh.roles) == ((await asker.greedy(again))[1], ["pre-prefill", "decode"])


async def test_a_stream_whose_worker_dies_goes_on_elsewhere_without_a_lost_or_changed_token(asker: Asker) -> None:
    prompt, length, going_on = await asker.ids(900), 2000, {"ignore_eos": True}
    stream = await asker.stream(prompt, length, extra_body=going_on)
    text, dead = "", None
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
        if dead is None and len(text) > 20:
            (name,) = await busy(asker, decode=1)
            dead = asker.system.kill("decode", name=name)
    assert dead is not None
    assert chunk.usage.completion_tokens == length
    assert chunk.cpd["attempts"] == 2
    _, first, _, second = chunk.cpd["workers"]  # prefilled again, warm or cold, as far as the router had heard of the first time
    assert first == name != second
    assert second.startswith("decode-")
    whole = await asker.complete(prompt, length, extra_body=going_on)
    assert text == whole.text
    await replaced(asker, "decode", dead.replica_id)


async def test_a_node_whose_cache_dies_answers_without_it_and_maps_the_next_one(asker: Asker) -> None:
    system = asker.system
    (prefill,) = system.replicas("prefill")
    prompt = await asker.ids(10 * BLOCK + 1)
    text = (await asker.greedy(prompt))[1]
    await asker.complete(prompt)
    await asker.known(prompt, CachedTokens(cluster=640))
    await asker.complete(prompt)
    await asker.known(prompt, CachedTokens(pool=640))
    await asker.forget("pool", "cluster")
    await asker.known(prompt, CachedTokens(node=640))
    dead = system.kill("kv-cache", node=prefill.node)
    missed = await asker.complete(prompt)
    assert (missed.text, missed.cached.node) == (text, 0)
    await replaced(asker, "kv-cache", dead.replica_id)
    await asker.forget()

    async def warm_from_the_node(ids: list[int]) -> str:
        await asker.complete(ids)
        await asker.complete(ids)
        await asker.forget("pool")
        reach = await asker.in_reach(ids)
        return "" if reach.node else f"{reach}"

    await until(lambda: warm_from_the_node(prompt), "nothing is written to the new slab")
    near = await asker.complete(prompt)
    assert (near.text, near.cached) == (text, CachedTokens(node=640))


async def replaced(asker: Asker, deployment: str, replica_id: str) -> None:
    """Wait until another replica has taken that one's place, and all is whole."""

    async def look() -> str:
        there = asker.system.replicas(deployment)
        return f"{there}" if replica_id in {r.replica_id for r in there} or not all(r.running for r in there) else ""

    await until(look, "no replacement", 120)
    await asker.until_whole()

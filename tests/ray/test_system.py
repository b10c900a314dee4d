"""The whole system on two Ray nodes, asked over HTTP: answers, what was cached where, its own routes, refusals, changes while it runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import httpx
import openai
import pytest
from transformers import AutoTokenizer

from cpd_ray.types import CachedTokens
from tests.ray.system import ANSWER, BLOCK, LONG, MODEL, Asker, Got, system_config, until, with_runtime

pytestmark = pytest.mark.slow


def reusable(prompt: list[int]) -> int:
    """The last token is always computed."""
    return (len(prompt) - 1) // BLOCK * BLOCK


async def test_the_same_prompt_is_cold_then_warm_from_each_tier_and_so_is_the_next_turn(asker: Asker) -> None:
    for length in (1000, 2 * BLOCK, 2 * BLOCK + 1):
        prompt = await asker.ids(length)
        tokens, text = await asker.greedy(prompt)
        cached = reusable(prompt)
        cold = await asker.complete(prompt)
        await asker.known(prompt, CachedTokens(cluster=cached))
        far = await asker.complete(prompt)
        await asker.known(prompt, CachedTokens(pool=cached))
        await asker.forget("pool")
        await asker.known(prompt, CachedTokens(node=cached))
        near = await asker.complete(prompt)
        await asker.known(prompt, CachedTokens(pool=cached))
        own = await asker.complete(prompt)
        assert [a.text for a in (cold, far, near, own)] == [text] * 4
        assert [(a.route, *a.roles) for a in (cold, far)] == [("cold", "pre-prefill", "decode"), ("warm", "prefill", "decode")]
        assert [a.cached for a in (cold, far, near, own)] == [
            CachedTokens(), CachedTokens(cluster=cached), CachedTokens(node=cached), CachedTokens(pool=cached)
        ]  # fmt: skip
        assert far.usage.prompt_tokens_details.cached_tokens == cached
        assert (far.usage.prompt_tokens, far.usage.completion_tokens) == (length, len(tokens))

        more = prompt + tokens + await asker.ids(70)
        written = (len(prompt) + len(tokens) - 1) // BLOCK * BLOCK
        turn = await asker.complete(more)
        assert turn.text == (await asker.greedy(more))[1]
        assert (turn.route, turn.cached.total) == ("warm", min(written, reusable(more)))


async def test_streamed_and_whole_chats_and_completions_are_transformers_answers(asker: Asker) -> None:
    tokenizer = AutoTokenizer.from_pretrained(asker.system.folder)
    messages: list[Any] = [{"role": "system", "content": asker.text(300)}, {"role": "user", "content": "What is this?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    _, wanted = await asker.greedy(ids)

    whole = await asker.openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=ANSWER, temperature=0)
    assert whole.choices[0].message.content == wanted
    assert whole.usage.prompt_tokens == len(ids)
    await asker.known(ids, CachedTokens(cluster=reusable(ids)))
    streamed = await asker.openai.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=ANSWER, temperature=0, stream=True
    )
    parts = [chunk async for chunk in streamed]
    assert "".join(c.choices[0].delta.content or "" for c in parts) == wanted
    assert parts[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert parts[-1].cpd["cached_tokens"] == {"pool": 0, "node": 0, "cluster": reusable(ids)}

    text = asker.text(500)
    ids = tokenizer.encode(text)
    _, wanted = await asker.greedy(ids)
    assert (await asker.complete(text)).text == wanted
    await asker.known(ids, CachedTokens(cluster=reusable(ids)))
    chunks = [chunk async for chunk in await asker.stream(ids)]
    assert "".join(c.choices[0].text for c in chunks if c.choices) == wanted
    assert chunks[-1].usage.prompt_tokens == len(ids)
    assert chunks[-1].cpd["route"] == "warm"


async def test_many_at_once_get_the_answers_that_each_gets_alone(asker: Asker) -> None:
    prompts = [await asker.ids(length) for length in (1, 30, 63, 64, 65, 200, 700, 700, 1500)]
    wanted = [(await asker.greedy(prompt, 40))[1] for prompt in prompts]
    answers = await asyncio.gather(*(asker.complete(prompt, 40) for prompt in prompts * 2))
    assert [a.text for a in answers] == wanted * 2


async def test_models_and_tokens(asker: Asker) -> None:
    assert [m.id async for m in asker.openai.models.list()] == [MODEL]
    text = "Apache License ß €"
    told = await asker.post("/tokenize", {"prompt": text})
    assert told["tokens"] == AutoTokenizer.from_pretrained(asker.system.folder).encode(text)
    assert (await asker.post("/detokenize", {"tokens": told["tokens"]}))["prompt"] == text
    assert (await asker.http.get("/health")).status_code == 200


async def test_a_plan_runs_nothing_and_a_warmed_context_is_pinned_and_warm(asker: Asker) -> None:
    prompt = await asker.ids(640 + 1)
    before = await asker.status()
    plan = await asker.post("/v1/cpd/plan", {"prompt": prompt})
    assert (plan["route"], plan["chosen"]["role"], plan["chosen"]["new_tokens"]) == ("cold", "pre_prefill", 641)
    assert "cached" in plan["reason"]
    assert (await asker.status())["directory"] == before["directory"]

    warmed = await asker.post("/v1/cpd/warm", {"prompt": prompt, "ttl_s": 3})
    by_role = {w["role"]: w for w in (await asker.status())["workers"]}
    assert (warmed["worker"], warmed["node"]) == (by_role["pre_prefill"]["worker"], by_role["pre_prefill"]["node"])
    assert (warmed["prompt_tokens"], warmed["blocks"], warmed["pinned_blocks"], warmed["cached_tokens"]) == (641, 10, 10, 0)
    await asker.known(prompt, CachedTokens(cluster=640))
    answer = await asker.complete(prompt)
    assert (answer.route, answer.cached) == ("warm", CachedTokens(cluster=640))
    assert answer.text == (await asker.greedy(prompt))[1]

    async def pinned() -> str:
        slabs = [n["slab"]["pinned"] for n in (await asker.status())["nodes"]]
        return str(slabs) if any(slabs) else ""

    await until(pinned, "what was warmed for a time stays pinned")


async def test_a_trace_tells_the_way_of_a_request_and_is_there_only_when_asked_for(asker: Asker) -> None:
    prompt = await asker.ids(300)
    body = {"prompt": prompt, "max_tokens": 4}
    response = await asker.http.post("/v1/completions", json=body, headers={"X-CPD-Trace": "1"})
    trace = response.json()["cpd"]
    assert trace["reason"]
    assert 0 < trace["actual_ttft_s"] < 60
    assert trace["predicted_ttft_s"] > 0
    assert {"tokenize", "admission", "handover", "decode"} <= set(trace["phases_s"])
    assert all(seconds >= 0 for seconds in trace["phases_s"].values())
    assert trace["workers"] and trace["attempts"] == 1
    assert "cpd" not in (await asker.http.post("/v1/completions", json=body)).json()


async def test_the_status_counts_blocks_and_a_reset_drops_them(asker: Asker) -> None:
    prompt = await asker.ids(10 * BLOCK + 1)
    await asker.complete(prompt, max_tokens=1)
    await asker.known(prompt, CachedTokens(cluster=10 * BLOCK))
    status = await asker.status()
    cached = sorted((w["role"], w["pool"]["cached"]) for w in status["workers"])
    assert cached == [("decode", 0), ("decode", 0), ("pre_prefill", 10), ("prefill", 0)]
    assert sorted(n["slab"]["committed"] for n in status["nodes"]) == [0, 10]
    assert status["directory"]["keys"] == 10
    assert await asker.forget("node") == {"node": 0}
    assert await asker.forget("cluster") == {"cluster": 10}
    assert await asker.forget("pool") == {"pool": 10}
    await asker.known(prompt, CachedTokens())

    async def emptied() -> str:
        keys = (await asker.status())["directory"]["keys"]
        return f"{keys} keys" if keys else ""

    await until(emptied, "the directory still knows what was dropped")
    assert (await asker.complete(prompt)).cached == CachedTokens()


BAD_BODIES: list[tuple[dict[str, Any], int, str | None]] = [
    ({"model": "gpt-5", "prompt": "hello"}, 404, "model"),
    ({"prompt": ""}, 400, "prompt"),
    ({"prompt": [1, 260]}, 400, "prompt"),
    ({"prompt": [-1]}, 400, "prompt"),
    ({"prompt": "a" * 40_000}, 400, "prompt"),
    ({"prompt": "hello", "max_tokens": 0}, 400, "max_tokens"),
    ({"prompt": "hello", "max_tokens": 10**9}, 400, "prompt"),
    ({"prompt": "hello", "temperature": -1}, 400, "temperature"),
    ({"prompt": "hello", "temperature": "hot"}, 400, "temperature"),
    ({"prompt": "hello", "n": 10**6}, 400, "n"),
    ({"prompt": "hello", "stop": ["x"] * 99}, 400, "stop"),
    ({"prompt": "hello", "frobnicate": 1}, 400, "frobnicate"),
    ({"messages": [], "model": MODEL}, 400, "messages"),
    ({"messages": [{"role": "user"}]}, 400, None),
    ({"messages": "hello"}, 400, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused_in_openais_shape(asker: Asker, stream: bool) -> None:
    for body, status, param in BAD_BODIES:
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        _refused(await asker.http.post(path, json={**body, "stream": stream}), status, param, body)
    kind = {"Content-Type": "application/json"}
    for raw in (b"", b"{", b"[]", b'"hello"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 20_000):
        _refused(await asker.http.post("/v1/completions", content=raw, headers=kind), 400, None, raw)
    with contextlib.suppress(httpx.ReadError, httpx.WriteError):  # the rest is not read: the refusal may be lost with it
        _refused(await asker.http.post("/v1/completions", content=b" " * (9 * 2**20), headers=kind), 413, None, "9 MiB")
    _refused(await asker.http.post("/v1/completions", content=b"prompt=hello"), 400, None, "a form")
    _refused(await asker.http.get("/v1/completions"), 405, None, "GET")
    _refused(await asker.http.get("/v2/completions"), 404, None, "v2")
    _refused(await asker.http.post("/v1/cpd/cache/reset", json={"tiers": ["attic"]}), 400, None, "attic")
    with pytest.raises(openai.BadRequestError) as refused:
        await asker.openai.completions.create(model=MODEL, prompt="a", max_tokens=-5, stream=stream)
    assert refused.value.param == "max_tokens"
    assert (await asker.complete("hello", max_tokens=1)).usage.completion_tokens == 1


def _refused(response: Any, status: int, param: str | None, what: Any) -> None:
    assert response.status_code == status, (what, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, what
    assert error["message"], what
    assert param is None or error["param"] == param, (what, error)
    assert "Traceback" not in json.dumps(error), what


async def test_a_full_queue_is_429_with_the_time_to_come_back(asker: Asker) -> None:
    system = asker.system
    long = await asker.ids(LONG)
    system.deploy(with_runtime(system.config, admission={"max_in_flight": 1, "max_queued": 0}))

    async def refused() -> str:
        running = asyncio.create_task(asker.complete(long, max_tokens=1))
        await prefilling(asker)
        second = await asker.http.post("/v1/completions", json={"prompt": "hello", "max_tokens": 1})
        assert (await running).usage.completion_tokens == 1
        await asker.forget()
        if second.status_code == 200:
            return "the new limit is not there yet"
        assert second.status_code == 429, second.text
        assert int(second.headers["Retry-After"]) >= 1
        assert second.json()["error"]["type"] == "rate_limit_error"
        return ""

    await until(refused, "the queue never fills")
    assert (await asker.complete("hello", max_tokens=1)).usage.completion_tokens == 1


async def prefilling(asker: Asker) -> None:
    """Wait until someone prefills."""

    async def look() -> str:
        status = await asker.status()
        return "" if any(w["running"] for w in status["workers"] if w["role"] != "decode") else "nobody prefills"

    await until(look, "no prompt came")


async def test_a_threshold_changes_under_load_without_a_restart_or_a_lost_block(asker: Asker) -> None:
    system = asker.system
    documents = [await asker.ids(900) for _ in range(4)]
    for document in documents:
        await asker.complete(document, max_tokens=1)
        await asker.known(document, CachedTokens(cluster=896))
    short = await asker.ids(300)
    before = sorted(r.replica_id for r in system.replicas())
    hits: list[Got] = []
    stop = asyncio.Event()

    async def load(document: list[int]) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            hits.append(await asker.complete(document + [turn % 256] * 10, max_tokens=3))

    async def changes_to(threshold: int, route: str) -> None:
        system.deploy(with_runtime(system.config, routing={"cold_min_uncached_tokens": threshold}))
        enough = len(hits) + 10

        async def changed() -> str:
            assert not any(task.done() for task in loads), loads
            planned = (await asker.post("/v1/cpd/plan", {"prompt": short}))["route"]
            settled = planned == route and system.is_running() and len(hits) >= enough
            return "" if settled else f"{planned}, {len(hits)} answers"

        await until(changed, "the threshold did not change")

    loads = [asyncio.create_task(load(document)) for document in documents]
    for threshold, route in ((2500, "warm"), (1, "cold"), (2500, "warm")):
        await changes_to(threshold, route)
    stop.set()
    await asyncio.gather(*loads)
    assert sorted(r.replica_id for r in system.replicas()) == before
    assert {(got.route, got.cached.total, *got.roles) for got in hits} == {("warm", 896, "prefill", "decode")}
    assert {got.trace["attempts"] for got in hits} == {1}


async def test_a_redeploy_of_the_workers_leaves_the_slabs_warm(asker: Asker) -> None:
    system = asker.system
    prompt = await asker.ids(1000)
    text = (await asker.greedy(prompt))[1]
    await asker.complete(prompt)
    await asker.known(prompt, CachedTokens(cluster=960))
    before = {r.replica_id: r.deployment for r in system.replicas()}
    system.config = system_config(http={"max_n": 3})
    system.deploy()

    async def replaced() -> str:
        there = [r for r in system.replicas() if r.running]
        old = sorted(r.deployment for r in there if r.replica_id in before)
        return "" if len(there) == 8 and old == ["directory", "kv-cache", "kv-cache"] else f"{there}"

    await until(replaced, "the workers are not replaced", 120)
    await asker.until_whole()
    await asker.known(prompt, CachedTokens(cluster=960))
    warm = await asker.complete(prompt)
    assert (warm.text, warm.route, warm.cached) == (text, "warm", CachedTokens(cluster=960))
    assert (await asker.http.post("/v1/completions", json={"prompt": "a", "n": 4})).json()["error"]["param"] == "n"

"""`/v1/cpd/...`: what operators see, what would be decided, warming ahead, dropping caches."""

from __future__ import annotations

from typing import Any

from actors.http.fake_face import BLOCK_TOKENS

MESSAGES = [{"role": "system", "content": "A long document. " * 10}]


async def test_status_has_the_figures_that_operators_look_for(app: Any) -> None:
    status = (await app.get("/v1/cpd/status")).json()
    assert status["requests"] == {"in_flight": 0, "queued": 0}
    (worker,) = status["workers"]
    assert (worker["role"], worker["node"], worker["state"]) == ("prefill", "node-0", "ready")
    assert {"backlog_tokens", "backlog_s"} <= set(worker)
    assert worker["pool"] == {"total": 64, "free": 60, "cached": 1, "active": 1, "leased": 1, "quarantined": 1}
    (node,) = status["nodes"]
    assert node["node"] == "node-0" and node["leases"] == 3
    assert {name: node["slab"][name] for name in ("total", "used", "quarantined")} == {"total": 32, "used": 12, "quarantined": 2}
    assert status["directory"] == {"keys": 0}


async def test_a_plan_runs_nothing_and_says_why(app: Any) -> None:
    body = {"prompt": "p" * 40}
    cold = (await app.post("/v1/cpd/plan", body)).json()
    assert app.face.seen == []
    await app.post("/v1/completions", body)
    warm = (await app.post("/v1/cpd/plan", {**body, "stream": True, "max_tokens": 5})).json()
    assert (cold["route"], warm["route"]) == ("cold", "warm")
    assert cold["prompt_tokens"] == 40 and cold["reason"] == "0 tokens are cached" and cold["policy"] == "fake"
    assert cold["chosen"] in cold["considered"]
    assert warm["chosen"]["cached_tokens"] == {"pool": 32, "node": 0, "cluster": 0}
    assert {"backlog_s", "fetch_s", "prefill_s", "inflicted_s", "ttft_s", "new_tokens", "worker", "role"} <= set(cold["chosen"])


async def test_a_chat_s_plan_is_of_the_prompt_that_the_chat_would_have(app: Any) -> None:
    planned = (await app.post("/v1/cpd/plan", {"messages": MESSAGES})).json()
    await app.post("/v1/chat/completions", {"messages": MESSAGES})
    assert planned["prompt_tokens"] == app.face.seen[0].prompt_tokens


async def test_warming_makes_the_coming_chat_warm(app: Any) -> None:
    warmed = (await app.post("/v1/cpd/warm", {"messages": MESSAGES, "ttl_s": 60, "cache_salt": "s"})).json()
    chat = [*MESSAGES, {"role": "user", "content": "And?"}]
    usage = (await app.post("/v1/chat/completions", {"messages": chat, "cache_salt": "s"})).json()["usage"]
    blocks = warmed["prompt_tokens"] // BLOCK_TOKENS
    assert (warmed["blocks"], warmed["pinned_blocks"], warmed["ttl_s"], warmed["cached_tokens"]) == (blocks, blocks, 60.0, 0)
    assert usage["prompt_tokens_details"]["cached_tokens"] == blocks * BLOCK_TOKENS
    assert list(app.face.pinned_for_s.values()) == [60.0]
    assert app.face.seen[0].salt == app.face.seen[1].salt is not None


async def test_warming_takes_the_very_body_of_the_coming_request(app: Any) -> None:
    body = {"model": "fake", "prompt": "p" * 40, "max_tokens": 9, "temperature": 0, "stream": True, "user": "u"}
    assert (await app.post("/v1/cpd/warm", body)).json()["prompt_tokens"] == 40


async def test_reset_drops_the_tiers_named_or_all(app: Any) -> None:
    await app.post("/v1/completions", {"prompt": "p" * 40})
    some = (await app.post("/v1/cpd/cache/reset", {"tiers": ["node"]})).json()
    every = (await app.post("/v1/cpd/cache/reset", {})).json()
    assert some == {"dropped_blocks": {"node": 0}}
    assert every == {"dropped_blocks": {"cluster": 0, "node": 0, "pool": 2}}

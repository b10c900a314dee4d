"""Keys, tenants, salts, rates: default-deny, nobody reads another's cache, nobody takes more than their share."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.http.app import HttpSettings
from actors.http.entrance import harmless
from actors.http.identity import Caller, KeyRing, derive_salt, hash_key
from actors.http.rates import TenantRates
from cpd_ray.clock import ManualClock
from cpd_ray.errors import ConfigError, Overloaded, Unauthorized

KEYS = {"anna": "key-a", "bert": "key-b", "root": "key-r"}


def key_file() -> str:
    lines = ["# keys", ""]
    for tenant, key in KEYS.items():
        lines.append(f"{tenant}:{hashlib.sha256(key.encode()).hexdigest()}" + (":admin" if tenant == "root" else ""))
    return "\n".join(lines)


@pytest.fixture
def locked(make_app: Any) -> Any:
    return make_app(settings=HttpSettings(keys=KeyRing.parse(key_file()), salt_secret=b"s"))


def bearer(tenant: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[tenant]}"}


async def test_every_route_but_health_is_closed_without_a_key(locked: Any, app: Any) -> None:
    document = (await app.get("/openapi.json")).json()
    paths = [(method, path.replace("{name}", "fake")) for path, methods in document["paths"].items() for method in methods]
    assert len(paths) >= 11
    paths += [("get", p) for p in ("/openapi.json", "/docs", "/nope", "/health/", "//health", "/health/x", "/")]
    async with locked.client() as client:
        for method, path in paths:
            response = await client.request(method, path)
            if (method, path) == ("get", "/health"):
                assert response.status_code == 200
                continue
            assert response.status_code == 401, (method, path)
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        assert (await client.post("/health")).status_code == 401
    assert locked.face.seen == []


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic key-a",
        "key-a",
        "bearer\tkey-a",
        "Bearer key-a x",
        "Bearer KEY-A",
        "Bearer \x80\xff",
    ],
)
async def test_wrong_keys_are_all_alike(locked: Any, header: str) -> None:
    async with locked.client() as client:
        response = await client.get("/v1/models", headers={"Authorization": header.encode("latin-1")})
    assert response.status_code == 401 and KEYS["anna"] not in response.text


async def test_the_openai_client_gets_in_with_its_key(locked: Any) -> None:
    async with locked.openai(key="key-a") as client:
        assert [m.id async for m in client.models.list()]
    async with locked.openai(key="key-x") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_tenant_and_salt_are_the_server_s(locked: Any) -> None:
    for tenant, salt in (("anna", None), ("bert", None), ("anna", "s"), ("bert", "s")):
        body = {"prompt": "p" * 40} | ({"cache_salt": salt} if salt else {})
        assert (await locked.post("/v1/completions", body, **bearer(tenant))).status_code == 200
    assert [r.tenant for r in locked.face.seen] == ["anna", "bert", "anna", "bert"]
    salts = [r.salt for r in locked.face.seen]
    assert len(set(salts)) == 4 and None not in salts and "s" not in salts


async def test_one_tenant_never_hits_another_s_cache(locked: Any) -> None:
    cached = []
    for tenant in ("anna", "bert", "anna"):
        usage = (await locked.post("/v1/completions", {"prompt": "secret " * 10}, **bearer(tenant))).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached == [0, 0, 64]


async def test_only_admins_drop_what_all_share(locked: Any) -> None:
    denied = await locked.post("/v1/cpd/cache/reset", {}, **bearer("anna"))
    assert denied.status_code == 403 and denied.json()["error"]["type"] == "permission_error"
    assert (await locked.post("/v1/cpd/cache/reset", {}, **bearer("root"))).status_code == 200
    for tenant in KEYS:
        assert (await locked.get("/v1/cpd/status", **bearer(tenant))).status_code == 200


def test_without_keys_and_salt_everyone_shares_one_cache() -> None:
    assert derive_salt(b"", "", None) is None
    assert derive_salt(b"", "", "x") != derive_salt(b"", "", "y")


@given(
    st.tuples(st.text(max_size=4), st.none() | st.text(max_size=4)), st.tuples(st.text(max_size=4), st.none() | st.text(max_size=4))
)
def test_salts_are_equal_only_for_equal_tenants_and_client_salts(a: tuple[str, str | None], b: tuple[str, str | None]) -> None:
    """None and "" differ (vllm#44701), and no concatenation of one is another."""
    assert (derive_salt(b"k", *a) == derive_salt(b"k", *b)) == (a == b)


def test_the_secret_matters() -> None:
    assert derive_salt(b"1", "anna", None) != derive_salt(b"2", "anna", None)


def test_key_files_are_read_strictly() -> None:
    ring = KeyRing.parse(key_file())
    assert ring.tenants == frozenset(KEYS)
    assert ring.authenticate("Bearer key-r") == Caller("root", admin=True)
    assert ring.authenticate("bearer  key-a ") == Caller("anna", admin=False)
    digest = hash_key("x").hex()
    wrong = ["", "# nothing", "anna", "anna:", f":{digest}", f"anna:{digest[:-1]}", "anna:key-in-the-clear"]
    for text in (*wrong, f"anna:{digest}:root", f"a:{digest}\nb:{digest}"):
        with pytest.raises(ConfigError) as caught:
            KeyRing.parse(text)
        assert "key-in-the-clear" not in caught.value.message
    with pytest.raises(Unauthorized):
        ring.authenticate(None)


# -- request ids -----------------------------------------------------------------------------------------------------


async def test_request_ids_come_back_and_are_part_of_the_inner_ids(app: Any) -> None:
    response = await app.post("/v1/completions", {"prompt": "ab"}, **{"X-Request-Id": "run-7:a.b_c"})
    assert response.headers["x-request-id"] == "run-7:a.b_c"
    assert "run-7:a.b_c" in app.face.seen[0].request_id and "run-7:a.b_c" in response.json()["id"]
    without = await app.get("/health")
    assert len(without.headers["x-request-id"]) == 24
    failed = await app.get("/nope", **{"X-Request-Id": "x"})
    assert failed.headers["x-request-id"] == "x"


async def test_equal_ids_don_t_collide(app: Any) -> None:
    """vllm#10583: two requests with one id in flight broke the engine."""
    app.face.script.hold_after = 0
    ask = {"X-Request-Id": "same"}
    tasks = [asyncio.ensure_future(app.post("/v1/completions", {"prompt": "ab"}, **ask)) for _ in range(2)]
    await app.face.until(running=2)
    app.face.script.release.set()
    for task in tasks:
        assert (await task).status_code == 200


@given(st.text(alphabet=st.characters(min_codepoint=1, max_codepoint=255), max_size=300))
def test_hostile_ids_become_harmless(request_id: str) -> None:
    safe = harmless(request_id)
    assert len(safe) <= 128
    assert all(c.isascii() and (c.isalnum() or c in "._:-") for c in safe)
    assert harmless(safe) == safe


async def test_a_hostile_id_reaches_neither_headers_nor_inner_ids(app: Any) -> None:
    hostile = "a b%0d%0aSet-Cookie: x=1/../../etc\x7f<script>"
    response = await app.post("/v1/completions", {"prompt": "ab"}, **{"X-Request-Id": hostile})
    assert response.headers["x-request-id"] == harmless(hostile)
    assert not set("/ <>%") & set(app.face.seen[0].request_id)


# -- rates -----------------------------------------------------------------------------------------------------------


async def test_requests_a_minute(make_app: Any) -> None:
    app = make_app(settings=HttpSettings(keys=KeyRing.parse(key_file()), requests_per_minute=3))
    codes = [(await app.post("/v1/completions", {"prompt": "a"}, **bearer("anna"))).status_code for _ in range(5)]
    assert codes == [200, 200, 200, 429, 429]
    assert (await app.post("/v1/completions", {"prompt": "a"}, **bearer("bert"))).status_code == 200, "one tenant starved another"
    refused = await app.post("/v1/completions", {"prompt": "a"}, **bearer("anna"))
    assert refused.headers["retry-after"] == "20" and refused.json()["error"]["code"] == "rate_limit_exceeded"
    app.clock.advance(20.0)
    codes = [(await app.post("/v1/completions", {"prompt": "a"}, **bearer("anna"))).status_code for _ in range(2)]
    assert codes == [200, 429]


async def test_tokenising_counts_as_a_request_and_is_the_tenant_s_own(make_app: Any) -> None:
    app = make_app(settings=HttpSettings(keys=KeyRing.parse(key_file()), requests_per_minute=2))
    text = {"prompt": "<|im_start|>never seen before: a tenant's own words " * 3}
    entries = len(app.codec.memo)
    await app.post("/tokenize", text, **bearer("anna"))
    alone = len(app.codec.memo) - entries
    await app.post("/tokenize", text, **bearer("bert"))
    assert alone > 0 and len(app.codec.memo) - entries == 2 * alone, "what a tenant sent could be guessed from another one's timing"
    codes = [(await app.post("/detokenize", {"tokens": [1]}, **bearer("anna"))).status_code for _ in range(2)]
    assert codes == [200, 429]


async def test_tokens_a_minute_count_prompt_and_answer(make_app: Any) -> None:
    app = make_app(settings=HttpSettings(tokens_per_minute=100))
    body = {"prompt": "p" * 40, "max_tokens": 20, "ignore_eos": True}
    assert (await app.post("/v1/completions", body)).status_code == 200
    assert (await app.post("/v1/completions", body)).status_code == 200  # leaves a debt of 20
    assert (await app.post("/v1/completions", body)).headers["retry-after"] == "36"
    app.clock.advance(36.0)
    assert (await app.post("/v1/completions", body)).status_code == 200


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 60), tokens=st.integers(1, 2_000))
def test_over_any_time_a_tenant_gets_its_rate_and_one_minute_s_worth(seed: int, requests: int, tokens: int) -> None:
    rng, clock = random.Random(seed), ManualClock()
    rates = TenantRates(requests, tokens, clock)
    let_in = spent = largest = 0

    def refused_s(take: Callable[[], None]) -> float | None:
        try:
            take()
        except Overloaded as error:
            return error.retry_after_s
        finally:
            rates.check()
        return None

    for _ in range(200):
        clock.advance(rng.random() * 3)
        size, answer = rng.randrange(1, 500), rng.randrange(100)
        wait_s = refused_s(lambda: rates.take_request("t"))
        if wait_s is not None:
            assert 0 < wait_s <= 60 / requests + 1e-6
            continue
        let_in += 1
        wait_s = refused_s(partial(rates.take_tokens, "t", size))
        if wait_s is not None:
            assert wait_s > 0
            continue
        rates.spend_tokens("t", answer)
        spent += size + answer
        largest = max(largest, size + answer)
    minutes = clock.now_s() / 60
    assert let_in <= requests * (minutes + 1) + 1e-6
    assert spent <= tokens * (minutes + 1) + largest


def test_many_tenants_take_bounded_room_and_debts_are_not_forgotten() -> None:
    clock = ManualClock()
    rates = TenantRates(1, None, clock)
    for i in range(20_000):
        rates.take_request(f"tenant-{i}")
        clock.advance(1.0)
        assert len(rates) <= 1024
    with pytest.raises(Overloaded):
        rates.take_request("tenant-19999")


async def test_waiting_as_told_is_enough() -> None:
    clock = ManualClock()
    rates = TenantRates(None, 100, clock)
    for size in (70, 250, 30, 100, 1):
        try:
            rates.take_tokens("t", size)
        except Overloaded as error:
            clock.advance(error.retry_after_s + 1e-9)
            rates.take_tokens("t", size)


# -- other origins ---------------------------------------------------------------------------------------------------


async def test_no_other_origin_is_allowed_unless_named(make_app: Any) -> None:
    ask = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    for origins, allowed in (((), None), (("https://good.example",), None), (("https://evil.example",), "https://evil.example")):
        app = make_app(settings=HttpSettings(cors_origins=origins))
        async with app.client() as client:
            preflight = await client.options("/v1/completions", headers=ask)
            simple = await client.get("/health", headers={"Origin": "https://evil.example"})
        assert preflight.headers.get("access-control-allow-origin") == allowed
        assert simple.headers.get("access-control-allow-origin") == allowed

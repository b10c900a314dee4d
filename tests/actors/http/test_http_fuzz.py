"""The face fuzzed from its own OpenAPI document: no 5xx but 503 and 504, errors in one shape, alive and empty after."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.http.fake_face import Script

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
TEXT = st.text(max_size=12) | st.sampled_from(["user", "fake", "auto", "none", "<|im_end|>", "\x00", "💥"])


def strategy(schema: dict[str, Any], components: dict[str, Any], noise: bool) -> st.SearchStrategy[Any]:
    """Values that fit a schema of our document; with noise, now and then something else."""
    fits = fitting(schema, components, noise)
    return st.one_of(fits, fits, fits, fits, ANYTHING) if noise else fits


def fitting(schema: dict[str, Any], components: dict[str, Any], noise: bool) -> st.SearchStrategy[Any]:
    if "$ref" in schema:
        return fitting(components[schema["$ref"].rsplit("/", 1)[1]], components, noise)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([fitting(option, components, noise) for option in schema["anyOf"]])
    kind = schema.get("type")
    if kind == "object":
        return fitting_object(schema, components, noise)
    if kind == "array":
        return st.lists(strategy(schema["items"], components, noise), min_size=schema.get("minItems", 0), max_size=4)
    plain: dict[str | None, st.SearchStrategy[Any]] = {
        "string": TEXT,
        "integer": st.integers(1, 8) | st.integers(-5, 300) | st.integers(),
        "number": st.floats(0.1, 1) | st.floats(-3, 3) | st.floats(allow_nan=False, allow_infinity=False),
        "boolean": st.booleans(),
        "null": st.none(),
    }
    return plain.get(kind, ANYTHING)


def fitting_object(schema: dict[str, Any], components: dict[str, Any], noise: bool) -> st.SearchStrategy[Any]:
    fields = schema.get("properties", {})
    if not fields:
        extra = schema.get("additionalProperties")
        inner = fitting(extra, components, noise) if isinstance(extra, dict) else ANYTHING
        return st.dictionaries(TEXT, inner, max_size=4)
    required = schema.get("required", ())
    always = {name: strategy(fields[name], components, noise) for name in required}
    if "model" in fields:
        always["model"] = st.sampled_from(["fake", "fake", "fake", None, "nope"])
    others = sorted(set(fields) - set(always))

    def some(names: list[str]) -> st.SearchStrategy[Any]:
        return st.fixed_dictionaries({**always, **{name: strategy(fields[name], components, noise) for name in names}})

    return st.lists(st.sampled_from(others), max_size=4, unique=True).flatmap(some) if others else some([])


def check_response(response: httpx.Response) -> None:
    assert response.status_code < 500 or response.status_code in (503, 504), response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"] and error["type"]
    elif response.headers["content-type"].startswith("text/event-stream"):
        last = response.text.removesuffix("\n\n").split("\n\n")[-1].removeprefix("data: ")
        assert last == "[DONE]" or set(json.loads(last)) == {"error"}
    else:
        response.json()


PATHS = [
    "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/cpd/plan", "/v1/cpd/warm", "/v1/cpd/cache/reset",
]  # fmt: skip


@pytest.fixture(scope="module")
def app_once(app_of: Any) -> Any:
    return app_of(Script(group=3))


@pytest.fixture(scope="module")
def document(app_once: Any) -> dict[str, Any]:
    got: dict[str, Any] = asyncio.run(app_once.get("/openapi.json")).json()
    return got


def test_every_route_with_a_body_is_fuzzed(document: dict[str, Any]) -> None:
    with_bodies = {path for path, methods in document["paths"].items() if "requestBody" in methods.get("post", {})}
    assert with_bodies == set(PATHS) == {path for path, methods in document["paths"].items() if "post" in methods}


@pytest.mark.parametrize("path", PATHS)
def test_bodies_of_the_document_and_near_it(app_once: Any, document: dict[str, Any], path: str) -> None:
    schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    components = document["components"]["schemas"]
    seen: Counter[int] = Counter()

    @settings(max_examples=150, database=None)
    @given(body=strategy(schema, components, noise=False) | strategy(schema, components, noise=True))
    def fuzz(body: Any) -> None:
        async def run() -> None:
            response = await app_once.post(path, body)
            check_response(response)
            seen[response.status_code] += 1
            assert (await app_once.get("/health")).status_code == 200
            app_once.face.check()

        asyncio.run(run())

    fuzz()
    assert seen[200] >= 1, f"nothing was accepted: {seen}"
    assert seen[400] >= 1, f"nothing was refused: {seen}"


@settings(max_examples=150)
@given(
    path=st.sampled_from([*PATHS, "/health", "/v1/models", "/v1/models/x/../y", "/", "/v1/%00", "/v1/cpd/status", "/%2e%2e/x"]),
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"]),
    content=st.binary(max_size=40)
    | st.sampled_from([b"", b"{}", b'{"prompt": "\xf0\x9f"}', b'{"messages": [[[[]]]]}', b"\xef\xbb\xbf{}"]),
    headers=st.dictionaries(
        st.sampled_from(["content-type", "x-request-id", "x-cpd-trace", "authorization", "content-length", "cookie"]),
        st.sampled_from(["application/json", "1", "-1", "99999999999999999999999", "\u00ff\u00fe", "a" * 300, "", "Bearer x"]),
    ),
)
def test_any_request_at_all(app_once: Any, path: str, method: str, content: bytes, headers: dict[str, str]) -> None:
    async def run() -> None:
        encoded = {name: value.encode("latin-1") for name, value in headers.items()}
        async with app_once.client() as client:
            response = await client.request(method, path, content=content, headers=encoded)
        if method != "HEAD":
            check_response(response)
        app_once.face.check()

    asyncio.run(run())

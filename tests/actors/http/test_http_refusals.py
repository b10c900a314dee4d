"""What is wrong is refused, by name, in OpenAI's shape; what is not supported is never ignored; nothing leaks."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import openai
import pytest

from actors.http.app import HttpSettings
from actors.http.fake_face import Script
from actors.http.limits import HttpLimits
from actors.http.schemas import REFUSED
from cpd_ray import errors

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "x"}]


def refused(response: httpx.Response, status: int, param: str | None, code: str | None = None) -> dict[str, Any]:
    """Asserts OpenAI's error shape, and which field it names."""
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}, body
    error: dict[str, Any] = body["error"]
    assert (response.status_code, error["param"]) == (status, param), error
    assert isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    if code is not None:
        assert error["code"] == code
    return error


WRONG: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {}, "prompt"),
    (COMPLETIONS, {"prompt": ""}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, "a"]}, "prompt"),
    (COMPLETIONS, {"prompt": [1, True]}, "prompt"),
    (COMPLETIONS, {"prompt": [1.5]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [2**32]}, "prompt"),
    (COMPLETIONS, {"prompt": [260]}, "prompt"),  # one past the vocabulary (vllm#54195)
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 4096}, "prompt"),
    (COMPLETIONS, {"prompt": "x" * 4000, "max_tokens": 97}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 10**30}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": 0}, "n"),
    (COMPLETIONS, {"prompt": "x", "n": 17}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 32, "n": 3}, "n"),
    (COMPLETIONS, {"prompt": ["x"] * 33}, "prompt"),
    (COMPLETIONS, {"prompt": "x", "temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "temperature": True}, "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_p": 1.01}, "top_p"),
    (COMPLETIONS, {"prompt": "x", "top_k": -2}, "top_k"),
    (COMPLETIONS, {"prompt": "x", "min_p": 2}, "min_p"),
    (COMPLETIONS, {"prompt": "x", "presence_penalty": 3}, "presence_penalty"),
    (COMPLETIONS, {"prompt": "x", "repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 20, "max_tokens": 10}, "min_tokens"),
    (COMPLETIONS, {"prompt": "x", "seed": 2**63}, "seed"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "logprobs": True}, "logprobs"),
    (COMPLETIONS, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
    (COMPLETIONS, {"prompt": "x", "stop": ""}, "stop.0"),
    (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": "s" * 257}, "stop"),
    (COMPLETIONS, {"prompt": "x", "stop": [1]}, "stop.0"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [260]}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 65}, "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"260": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {"one": 1}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": "s" * 257}, "cache_salt"),
    (COMPLETIONS, {"prompt": "x", "priority": 2**31}, "priority"),
    (COMPLETIONS, {"prompt": "x", "metadata": {str(i): "" for i in range(17)}}, "metadata"),
    (COMPLETIONS, {"prompt": "x", "metadata": {"k": "v" * 513}}, "metadata"),
    (COMPLETIONS, {"prompt": "x", "user": "u" * 513}, "user"),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"prompt": "x", "stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
    (COMPLETIONS, {"prompt": "x", "messages": USER}, "messages"),
    (COMPLETIONS, {"prompt": "x", "bogus": 1}, "bogus"),
    (COMPLETIONS, {"prompt": "x", "model": "nope"}, "model"),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [1]}, "messages"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "content": "x", "function_call": {"name": "f"}}]}, "messages"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 4096}]}, "messages"),
    (CHAT, {"messages": USER, "max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"messages": USER, "logprobs": 3}, "logprobs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    (CHAT, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
    (CHAT, {"messages": USER, "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"messages": USER, "echo": True}, "echo"),
    (CHAT, {"messages": USER, "add_special_tokens": True}, "add_special_tokens"),
    ("/tokenize", {}, "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, "prompt"),
    ("/tokenize", {"prompt": "x", "model": "nope"}, "model"),
    ("/detokenize", {}, "tokens"),
    ("/detokenize", {"tokens": "x"}, "tokens"),
    ("/detokenize", {"tokens": [260]}, "tokens"),
    ("/v1/cpd/plan", {"prompt": ["a", "b"]}, "prompt"),
    ("/v1/cpd/warm", {"prompt": "x", "ttl_s": 0}, "ttl_s"),
    ("/v1/cpd/warm", {"prompt": "x", "ttl_s": 1e9}, "ttl_s"),
    ("/v1/cpd/cache/reset", {"tiers": ["disk"]}, "tiers.0"),
]


@pytest.mark.parametrize(("path", "body", "param"), WRONG, ids=lambda v: json.dumps(v)[:60] if isinstance(v, dict) else None)
async def test_what_is_wrong_is_refused_by_name(app: Any, path: str, body: dict[str, Any], param: str | None) -> None:
    response = await app.post(path, body)
    refused(response, 404 if param == "model" else 400, param)
    assert app.face.seen == [], "the face was asked"
    # and the next request is answered
    assert (await app.post(COMPLETIONS, {"prompt": "x"})).status_code == 200


async def test_context_overflow_has_the_code_that_clients_look_for(app: Any) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x" * 5000}), (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]})):
        error = refused(await app.post(path, body), 400, "prompt" if path == COMPLETIONS else "messages", "context_length_exceeded")
        assert "4096" in error["message"]


@pytest.mark.parametrize("name", sorted(REFUSED))
async def test_what_is_not_supported_is_refused_unless_it_asks_for_nothing(app: Any, name: str) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": USER})):
        error = refused(await app.post(path, {**body, name: {"some": "thing"}}), 400, name, "unsupported_parameter")
        assert name in error["message"]
        for inert in (None, *REFUSED[name]):
            assert (await app.post(path, {**body, name: inert})).status_code == 200


async def test_best_of_is_refused_when_it_is_more_than_n(app: Any) -> None:
    refused(await app.post(COMPLETIONS, {"prompt": "x", "best_of": 3, "n": 2}), 400, "best_of")
    assert (await app.post(COMPLETIONS, {"prompt": "x", "best_of": 2, "n": 2})).status_code == 200


async def test_a_client_s_chat_template_is_refused(app: Any) -> None:
    refused(await app.post(CHAT, {"messages": USER, "chat_template": "{{ 7 * 7 }}"}), 400, "chat_template")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"[]", b"null", b"5", b'"x"', b"\xff\xfe", b"{'prompt': 'x'}", b'{"prompt": NaN}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xff"}', b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}",
        b"[" * 100_000, b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
    ],
)  # fmt: skip
async def test_what_is_no_json_object_is_refused(app: Any, data: bytes) -> None:
    async with app.client() as client:
        response = await client.post(COMPLETIONS, content=data, headers={"Content-Type": "application/json"})
    refused(response, 400, None, "invalid_json")


@pytest.mark.parametrize("value", ["1e400", "-1e400"])
async def test_infinities_are_refused(app: Any, value: str) -> None:
    async with app.client() as client:
        content = '{"prompt": "x", "temperature": ' + value + "}"
        refused(await client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"}), 400, "temperature")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data; boundary=x"])
async def test_other_content_types_are_refused(app: Any, kind: str) -> None:
    """A foreign page may post these without asking a browser's permission."""
    async with app.client() as client:
        response = await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": kind})
        refused(response, 400, None, "unsupported_media_type")
        kind = "application/json; charset=utf-8"
        assert (await client.post(COMPLETIONS, content=b'{"prompt": "x"}', headers={"Content-Type": kind})).status_code == 200


async def test_unknown_routes_and_methods_have_the_same_shape(app: Any) -> None:
    refused(await app.get("/nope"), 404, None)
    refused(await app.get("/docs"), 404, None)
    refused(await app.get(COMPLETIONS), 405, None)
    refused(await app.get("/v1/models/absent/model"), 404, "model", "model_not_found")
    refused(await app.post("/health", {}), 405, None)


# -- sizes -----------------------------------------------------------------------------------------------------------


async def test_long_bodies_are_not_read(make_app: Any) -> None:
    app = make_app(settings=HttpSettings(limits=HttpLimits(body_bytes=1000)))
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 100
            yield b"x" * 100

    async with app.served() as address, httpx.AsyncClient(base_url=address) as client:
        refused(await client.post(COMPLETIONS, json={"prompt": "x" * 1000}), 413, None, "body_too_large")
        # the connection is closed under the sender, which may see that before it sees the answer
        with contextlib.suppress(httpx.TransportError):
            refused(await client.post(COMPLETIONS, content=endless(), headers={"Content-Type": "application/json"}), 413, None)
        assert (await client.post(COMPLETIONS, json={"prompt": "x"})).status_code == 200
    assert 1000 < sent < 10_000_000


async def test_long_headers_are_refused(app: Any) -> None:
    refused(await app.get("/health", **{"X-Long": "y" * 20_000}), 413, None, "headers_too_large")
    refused(await app.get("/health?" + "q" * 20_000), 413, None, "headers_too_large")


async def test_limits_are_checked_before_anything_is_tokenised(app: Any) -> None:
    before = len(app.codec.memo)
    text = "never seen before: test of limits " * 20
    for extra in ({"n": 17}, {"stop": ["a"] * 17}, {"logprobs": 21}, {"temperature": -1}, {"model": "nope"}, {"cache_salt": ""}):
        assert (await app.post(COMPLETIONS, {"prompt": text, **extra})).status_code >= 400
    assert len(app.codec.memo) == before


# -- faults of the face ----------------------------------------------------------------------------------------------

FAULTS: list[tuple[Exception, int, str]] = [
    (errors.Overloaded("full"), 429, "rate_limit_error"),
    (errors.Unavailable("no worker is left"), 503, "service_unavailable_error"),
    (errors.DeadlineExceeded("too late"), 504, "timeout_error"),
    (errors.DuplicateRequest("in flight"), 409, "invalid_request_error"),
    (errors.ContextLengthExceeded("too long"), 400, "invalid_request_error"),
    (errors.WorkerGone("the worker is gone"), 503, "service_unavailable_error"),
    (errors.EngineFault("the model gave no usable result"), 500, "internal_error"),
    (RuntimeError("secret path /root/x at 10.0.0.1"), 500, "internal_error"),
    (KeyError("secret"), 500, "internal_error"),
]


@pytest.mark.parametrize(("fault", "status", "kind"), FAULTS, ids=lambda v: type(v).__name__ if isinstance(v, Exception) else None)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
async def test_a_fault_before_the_first_token_is_an_http_error(
    make_app: Any, fault: Exception, status: int, kind: str, stream: bool, n: int
) -> None:
    """Never 200 (smg#2503), and back-pressure never 500 (ray#51145)."""
    app = make_app(Script(fail_with=fault))
    response = await app.post(COMPLETIONS, {"prompt": "abc", "stream": stream, "n": n})
    error = refused(response, status, getattr(fault, "param", None))
    assert error["type"] == kind and "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("n", [1, 3])
async def test_a_fault_in_a_stream_is_an_error_event_and_its_end(make_app: Any, n: int) -> None:
    for fault in (errors.Unavailable("no worker is left"), RuntimeError("secret")):
        app = make_app(Script(fail_with=fault, fail_after=2))
        async with app.openai() as client:
            stream = await client.completions.create(model="fake", prompt="abcdef", stream=True, n=n)
            assert (await anext(stream)).choices[0].text == "a"
            with pytest.raises(openai.APIError) as caught:
                await anext(chunk async for chunk in stream if chunk.choices[0].text == "f")
        assert "secret" not in str(caught.value)
        raw = await app.post(COMPLETIONS, {"prompt": "abcdef", "stream": True})
        last = raw.text.removesuffix("\n\n").split("\n\n")[-1]
        assert set(json.loads(last.removeprefix("data: "))) == {"error"}, "something came after the error"
        app.face.check()


async def test_an_answer_that_breaks_off_is_no_answer(make_app: Any) -> None:

    app = make_app()
    generate = app.face.generate

    async def cut(request: Any) -> Any:
        async for chunk in generate(request):
            if chunk.finish_reason is None:
                yield chunk

    app.face.generate = cut
    refused(await app.post(COMPLETIONS, {"prompt": "abc"}), 503, None)


async def test_health_tells_whether_a_request_would_be_answered(make_app: Any) -> None:
    assert (await make_app().get("/health")).status_code == 200
    refused(await make_app(Script(healthy=False)).get("/health"), 503, None)


async def test_a_request_has_its_time_and_no_more(make_app: Any) -> None:
    app = make_app(Script(hold_after=0), HttpSettings(limits=HttpLimits(request_timeout_s=0.05)))
    for stream in (False, True):
        refused(await app.post(COMPLETIONS, {"prompt": "abc", "stream": stream}), 504, None)
        app.face.check()
    app.face.script.hold_after = 1
    raw = await app.post(COMPLETIONS, {"prompt": "abc", "stream": True})
    assert raw.status_code == 200 and "timeout_error" in raw.text and "[DONE]" not in raw.text

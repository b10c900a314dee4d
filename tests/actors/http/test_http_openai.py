"""The OpenAI surface, driven by the real client: shapes, counts, streams that equal whole answers."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from actors.http.fake_face import BLOCK_TOKENS, Script
from actors.text.codec import TextCodec
from cpd_ray.tokens import unpack

USER = [{"role": "user", "content": "Hi 👍 there"}]
RENDERED = "<|im_start|>user\nHi 👍 there<|im_end|>\n<|im_start|>assistant\n"


async def events(app: Any, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    """The data of a stream's events, `[DONE]` and all."""
    async with app.client(**headers) as client, client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = (await response.aread()).decode()
    assert text.endswith("\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    return [d if d == "[DONE]" else json.loads(d) for d in data]


# -- completions -----------------------------------------------------------------------------------------------------


async def test_a_completion_has_openai_s_shape(app: Any) -> None:
    async with app.openai() as client:
        answer = await client.completions.create(model="fake", prompt="Hello", max_tokens=10)
    assert answer.object == "text_completion" and answer.model == "fake" and answer.id.startswith("cmpl-")
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index, choice.logprobs) == ("Hello", "stop", 0, None)
    assert answer.usage is not None
    # the end token counts, and shows nothing
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 6, 11)
    assert Completion.model_validate(answer.model_dump()) == answer


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cde"], ["ab", "cde"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99, 100]], ["ab", "cd"]),
    ],
)
async def test_prompts_come_as_text_or_ids_alone_or_in_lists(app: Any, prompt: Any, texts: list[str]) -> None:
    async with app.openai() as client:
        answer = await client.completions.create(model="fake", prompt=prompt, n=2, echo=True)
    assert [c.text for c in answer.choices] == [t + t for t in texts for _ in range(2)]
    assert [c.index for c in answer.choices] == list(range(2 * len(texts)))
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, texts))
    assert answer.usage.completion_tokens == 2 * sum(len(t) + 1 for t in texts)
    ids = [request.request_id for request in app.face.seen]
    assert len(set(ids)) == len(ids)


async def test_an_absent_max_tokens_is_16_for_completions_and_the_context_for_chats(app: Any) -> None:
    async with app.openai() as client:
        await client.completions.create(model="fake", prompt="x" * 100)
        await client.chat.completions.create(model="fake", messages=USER)  # type: ignore[arg-type]
        await client.completions.create(model="fake", prompt="x" * 4090)
        await client.completions.create(model="fake", prompt="x" * 100, extra_body={"min_tokens": 40})
    limits = [(r.prompt_tokens, r.sampling.max_tokens) for r in app.face.seen]
    chat_tokens = len(RENDERED.encode()) - (len("<|im_start|>") - 1) * 2 - (len("<|im_end|>") - 1)
    assert limits == [(100, 16), (chat_tokens, 4096 - chat_tokens), (4090, 6), (100, 40)]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_max_tokens_are_exact(app: Any, name: str) -> None:
    async with app.openai() as client:
        answer = await client.chat.completions.create(model="fake", messages=USER, **{name: 3})  # type: ignore[arg-type]
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    assert answer.choices[0].finish_reason == "length"
    assert app.face.seen[0].sampling.max_tokens == 3


async def test_log_probabilities_of_a_completion(app: Any) -> None:
    async with app.openai() as client:
        answer = await client.completions.create(model="fake", prompt="a👍b", logprobs=2)
        bare = await client.completions.create(model="fake", prompt="ab", logprobs=0)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    emoji = [f"bytes:\\x{b:02x}" for b in "👍".encode()]
    assert logprobs.tokens == ["a", *emoji, "b"]
    assert logprobs.text_offset == [0, 1, 1, 1, 1, 2]
    assert logprobs.token_logprobs == [-0.5] * 6
    assert logprobs.top_logprobs is not None and logprobs.top_logprobs[0] == {"a": -0.5, "b": -1.5}
    assert bare.choices[0].logprobs is not None and bare.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}]


# -- chat ------------------------------------------------------------------------------------------------------------


async def test_a_chat_has_openai_s_shape(app: Any) -> None:
    async with app.openai() as client:
        answer = await client.chat.completions.create(model="fake", messages=USER, logprobs=True, top_logprobs=3)  # type: ignore[arg-type]
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.tool_calls is None
    assert choice.message.content == "user\nHi 👍 there"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    data = b"".join(bytes(t.bytes or ()) for t in choice.logprobs.content)
    assert data.decode() == choice.message.content
    assert all(len(t.top_logprobs) == 3 for t in choice.logprobs.content)
    assert ChatCompletion.model_validate(answer.model_dump()) == answer


async def test_text_parts_are_joined_and_tools_reach_the_template(model_folder: Any, make_app: Any) -> None:
    app = make_app()
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    tools = [{"type": "function", "function": {"name": "weather"}}]
    async with app.openai() as client:
        answer = await client.chat.completions.create(model="fake", messages=parts, tools=tools)  # type: ignore[call-overload]
    assert answer.choices[0].message.content == "user\na\nb"


async def test_a_stream_of_a_chat(app: Any) -> None:
    async with app.openai() as client:
        stream = await client.chat.completions.create(
            model="fake",
            messages=USER,  # type: ignore[arg-type]
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0].choices[0].delta.role == "assistant" and chunks[0].choices[0].delta.content == ""
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == "user\nHi 👍 there"
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens_details is not None
    for chunk in chunks:
        assert ChatCompletionChunk.model_validate(chunk.model_dump()) == chunk


async def test_usage_is_in_a_stream_only_when_asked_for(app: Any) -> None:
    body = {"model": "fake", "prompt": "abc"}
    plain = await events(app, "/v1/completions", body)
    asked = await events(app, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    always = await events(
        app, "/v1/completions", {**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    )
    assert all("usage" not in e for e in plain[:-1])
    assert [e["usage"] is None for e in asked[:-1]] == [True] * (len(asked) - 2) + [False]
    assert [e["usage"]["completion_tokens"] for e in always[:-1]] == [1, 2, 3, 4, 4]
    assert plain[-1] == asked[-1] == always[-1] == "[DONE]"
    assert len(plain) == len(asked) - 1


def put_together(chunks: list[Any], chat: bool) -> dict[int, dict[str, Any]]:
    """A client's view of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            whole = choices.setdefault(choice["index"], {"text": "", "tokens": [], "finish_reason": None, "stop_reason": None})
            whole["text"] += (choice["delta"].get("content") or "") if chat else choice["text"]
            logprobs = choice["logprobs"]
            if logprobs:
                whole["tokens"] += logprobs["content"] if chat else zip(*(logprobs[k] for k in sorted(logprobs)), strict=True)
            assert whole["finish_reason"] is None, "a choice went on after its end"
            whole["finish_reason"] = choice["finish_reason"]
            whole["stop_reason"] = choice.get("stop_reason")
    return choices


@settings(max_examples=60)
@given(
    chat=st.booleans(),
    text=st.text(alphabet="ab👍語\n ", min_size=1, max_size=20),
    group=st.integers(1, 7),
    stop=st.lists(st.text(alphabet="ab👍\n", min_size=1, max_size=4), max_size=3),
    n=st.integers(1, 3),
    extra=st.fixed_dictionaries(
        {},
        optional={
            "include_stop_str_in_output": st.booleans(),
            "min_tokens": st.integers(0, 5),
            "max_tokens": st.integers(5, 30),
            "skip_special_tokens": st.booleans(),
            "stop_token_ids": st.lists(st.sampled_from([97, 98, 10]), max_size=1),
        },
    ),
    logprobs=st.booleans(),
)
def test_a_stream_adds_up_to_the_whole_answer(
    app_of: Any, chat: bool, text: str, group: int, stop: list[str], n: int, extra: dict[str, Any], logprobs: bool
) -> None:
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {"model": "fake", "n": n, "stop": stop, **extra}
    body |= {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}
    if logprobs:
        body |= {"logprobs": True, "top_logprobs": 2} if chat else {"logprobs": 2}

    async def run() -> None:
        app = app_of(Script(group=group))
        whole = (await app.post(path, body)).json()
        streamed = await events(app, path, {**body, "stream_options": {"include_usage": True}})
        one_by_one = (await app_of(Script(group=1)).post(path, body)).json()
        assert one_by_one["choices"] == whole["choices"], "how tokens are grouped changed the answer"
        assert one_by_one["usage"] == whole["usage"]
        choices = put_together(streamed[:-1], chat)
        for choice in whole["choices"]:
            got = choices[choice["index"]]
            assert got["text"] == (choice["message"]["content"] if chat else choice["text"])
            assert (got["finish_reason"], got["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"])
            if logprobs:
                lists = choice["logprobs"]
                expected = lists["content"] if chat else list(zip(*(lists[k] for k in sorted(lists)), strict=True))
                assert got["tokens"] == expected
        counted = streamed[-2]["usage"]
        assert counted["completion_tokens"] == whole["usage"]["completion_tokens"]
        app.face.check()

    asyncio.run(run())


@settings(max_examples=80)
@given(
    text=st.text(alphabet="ab👍語\n ", min_size=1, max_size=20),
    stop=st.lists(st.text(alphabet="ab👍\n", min_size=1, max_size=4), max_size=3),
    group=st.integers(1, 7),
)
def test_tokens_shown_with_log_probabilities_are_the_text(app_of: Any, text: str, stop: list[str], group: int) -> None:
    """Also where a stop string cuts the answer: no token of the stop string is shown unless part of its text is."""
    body = {"model": "fake", "messages": [{"role": "user", "content": text}], "stop": stop, "logprobs": True}
    answer = asyncio.run(app_of(Script(group=group)).post("/v1/chat/completions", body)).json()
    (choice,) = answer["choices"]
    data = b"".join(bytes(t["bytes"]) for t in choice["logprobs"]["content"])
    assert data.decode() == choice["message"]["content"]


# -- ends ------------------------------------------------------------------------------------------------------------


async def test_a_stop_string_ends_the_answer_and_the_work(app: Any) -> None:
    async with app.openai() as client:
        answer = await client.completions.create(model="fake", prompt="one STOP two", stop=["STOP", "never"], max_tokens=50)
        shown = await client.completions.create(
            model="fake", prompt="one STOP two", stop="STOP", max_tokens=50, extra_body={"include_stop_str_in_output": True}
        )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("one ", "stop")
    assert answer.choices[0].stop_reason == "STOP"  # type: ignore[attr-defined]
    assert answer.usage is not None and answer.usage.completion_tokens == len("one STOP")
    assert shown.choices[0].text == "one STOP"
    app.face.check()


async def test_stop_tokens_end_without_being_shown(make_app: Any, codec: TextCodec) -> None:
    (eos,) = codec.eos_token_ids
    for answer, extra, text, reason in [
        ((97, 98), {}, "ab", None),
        ((97, 98, 99), {"stop_token_ids": [98]}, "a", 98),
        ((97, 98, 99), {"stop_token_ids": [98], "include_stop_str_in_output": True}, "ab", 98),
        ((97, eos, 98), {"ignore_eos": True, "max_tokens": 3}, "ab", None),
        ((97, eos), {"skip_special_tokens": False, "include_stop_str_in_output": True}, "a<|im_end|>", None),
    ]:
        app = make_app(Script(answer=answer))
        (choice,) = (await app.post("/v1/completions", {"prompt": "x", **extra})).json()["choices"]
        assert (choice["text"], choice["stop_reason"]) == (text, reason)


async def test_min_tokens_holds_for_stop_strings_too(app: Any) -> None:
    answer = (await app.post("/v1/completions", {"prompt": "ababab", "stop": "b", "min_tokens": 2})).json()
    assert answer["choices"][0]["text"] == "aba"


# -- counts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("early_usage", [True, False])
async def test_cached_tokens_are_true_whole_and_streamed(make_app: Any, early_usage: bool) -> None:
    app = make_app(Script(early_usage=early_usage))
    prompt = "p" * (3 * BLOCK_TOKENS)
    seen = []
    for length in (40, 40, 48, 48, 47):
        body = {"model": "fake", "prompt": prompt[:length]}
        whole = (await app.post("/v1/completions", body)).json()["usage"]
        seen.append(whole["prompt_tokens_details"]["cached_tokens"])
    # the last token is always computed
    assert seen == [0, 32, 32, 47, 32]
    body["stream_options"] = {"include_usage": True}  # type: ignore[assignment]
    streamed = await events(app, "/v1/completions", body)
    assert streamed[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


async def test_an_answer_cut_by_a_stop_string_tells_cached_tokens_only_if_it_knows_them(make_app: Any) -> None:
    for early_usage, details in ((True, {"cached_tokens": 0}), (False, None)):
        app = make_app(Script(early_usage=early_usage))
        usage = (await app.post("/v1/completions", {"prompt": "ab STOP", "stop": "STOP"})).json()["usage"]
        assert usage.get("prompt_tokens_details") == details
        assert usage["completion_tokens"] == 7


async def test_the_trace_comes_with_the_last_object_when_asked_for(app: Any) -> None:
    body = {"model": "fake", "prompt": "ab"}
    assert "cpd" not in (await app.post("/v1/completions", body)).json()
    traced = (await app.post("/v1/completions", body, **{"X-CPD-Trace": "1"})).json()["cpd"]
    assert traced["route"] in ("cold", "warm") and traced["reason"] and traced["workers"] == ["prefill-0"]
    assert traced["cached_tokens"] == {"pool": 0, "node": 0, "cluster": 0}
    assert set(traced["phases_s"]) == {"tokenize", "compute"}
    assert {"predicted_ttft_s", "actual_ttft_s", "attempts", "request_id"} <= set(traced)
    for options in ({}, {"stream_options": {"include_usage": True}}):
        streamed = await events(app, "/v1/completions", {**body, **options, "n": 2}, **{"X-CPD-Trace": "1"})
        assert ["cpd" in e for e in streamed[:-1]] == [False] * (len(streamed) - 2) + [True]
        assert len(streamed[-2]["cpd"]["requests"]) == 2


# -- what reaches the face -------------------------------------------------------------------------------------------


async def test_every_sampling_field_reaches_the_face(app: Any) -> None:
    fields = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2,
        "min_tokens": 3, "ignore_eos": True, "seed": 42, "stop_token_ids": [5, 6], "logit_bias": {"7": -100, "3": 5}, "max_tokens": 9,
    }  # fmt: skip
    await app.post("/v1/completions", {"prompt": "ab", "n": 2, **fields})
    for choice, request in enumerate(app.face.seen):
        got = request.sampling
        expected = {**fields, "stop_token_ids": (5, 6), "logit_bias": ((3, 5), (7, -100)), "seed": 42 + choice}
        assert {name: getattr(got, name) for name in fields} == expected


async def test_absent_fields_and_nulls_are_defaults(app: Any) -> None:
    nulls = dict.fromkeys(
        ["temperature", "top_p", "seed", "stop", "logprobs", "n", "stream", "user", "suffix", "best_of", "no_such_field"]
    )
    await app.post("/v1/completions", {"prompt": "ab", **nulls})
    await app.post("/v1/completions", {"prompt": "ab", "top_k": -1})
    first, second = (request.sampling for request in app.face.seen)
    assert first == second
    assert (first.temperature, first.top_p, first.top_k, first.seed, first.logprobs) == (1.0, 1.0, 0, None, None)


async def test_priority_is_vllm_s_lower_goes_first(app: Any) -> None:
    for priority in (-5, 0, 5):
        await app.post("/v1/completions", {"prompt": "ab", "priority": priority})
    assert [request.priority for request in app.face.seen] == [5, 0, -5]


async def test_an_adapter_is_a_model_of_its_own(app: Any) -> None:
    async with app.openai() as client:
        await client.completions.create(model="org/fake-adapter", prompt="a")
        names = [model.id async for model in client.models.list()]
        adapter = await client.models.retrieve("org/fake-adapter")
    assert app.face.seen[0].adapter == "fake-adapter"
    assert names == ["fake", "org/fake-adapter"]
    assert adapter.model_dump()["parent"] == "fake" and adapter.object == "model"


async def test_token_ids_are_passed_on_as_they_are(app: Any) -> None:
    await app.post("/v1/completions", {"prompt": [1, 2, 3], "model": "fake"})
    assert list(unpack(app.face.seen[0].tokens)) == [1, 2, 3]


async def test_tokenize_and_detokenize_answer_as_vllm_does(app: Any) -> None:
    text = (await app.post("/tokenize", {"model": "fake", "prompt": "hé"})).json()
    assert text == {"count": 3, "max_model_len": 4096, "tokens": [104, 195, 169], "token_strs": None}
    named = (await app.post("/tokenize", {"prompt": "h", "return_token_strs": True})).json()
    assert named["token_strs"] == ["h"]
    chat = (await app.post("/tokenize", {"messages": USER})).json()
    bare = (await app.post("/tokenize", {"messages": USER, "add_generation_prompt": False})).json()
    back = (await app.post("/detokenize", {"model": "fake", "tokens": chat["tokens"]})).json()
    assert back == {"prompt": RENDERED}
    assert chat["tokens"][: bare["count"]] == bare["tokens"] and bare["count"] < chat["count"]


async def test_an_overloaded_face_is_a_rate_limit_to_the_client(make_app: Any) -> None:
    from cpd_ray.errors import Overloaded

    app = make_app(Script(fail_with=Overloaded("the queue is full", retry_after_s=2.2)))
    async with app.openai() as client:
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(model="fake", messages=USER, stream=True)  # type: ignore[call-overload]
    assert caught.value.response.headers["retry-after"] == "3"
    assert caught.value.body == {
        "message": "the queue is full",
        "type": "rate_limit_error",
        "param": None,
        "code": "overloaded",
    }

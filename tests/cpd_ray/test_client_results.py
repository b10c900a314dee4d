"""The client's vocabulary without a cluster: what importing it loads, bodies that are sent, answers that are read."""

from __future__ import annotations

import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpd_ray import results
from cpd_ray import tokens as token_buffers
from cpd_ray.client import _body
from cpd_ray.errors import BadMessage, InvalidRequest
from cpd_ray.types import CachedTokens

REPOSITORY = Path(__file__).resolve().parents[2]
TRACE = {
    "request_id": "call-1-0", "route": "warm", "reason": "64 of 70 tokens are cached", "workers": ["prefill-a", "decode-b"],
    "cached_tokens": {"pool": 0, "node": 64, "cluster": 0}, "phases_s": {"tokenize": 0.001, "queue": 0.0, "compute": 0.1},
    "predicted_ttft_s": 0.1, "actual_ttft_s": 0.12, "attempts": 1,
}  # fmt: skip
USAGE = {"prompt_tokens": 70, "completion_tokens": 3, "total_tokens": 73, "prompt_tokens_details": {"cached_tokens": 64}}
HEAD = {"id": "call-1", "created": 1, "model": "tiny"}


def completion(**changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": "\n"}
    return {**HEAD, "object": "text_completion", "choices": [choice], "usage": USAGE, "cpd": TRACE, **changes}


def test_importing_the_client_loads_neither_ray_nor_torch_nor_the_other_rooms() -> None:
    program = (
        "import sys, cpd_ray; from cpd_ray import CPDClient; from cpd_ray import errors, results\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'ray', 'torch', 'transformers', 'kv', 'placement', 'actors', 'grpc'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_prompt_is_sent_as_text_or_lists_whatever_it_came_as() -> None:
    ids = [1, 2, 70_000]
    for given in (ids, tuple(ids), token_buffers.pack(ids), memoryview(token_buffers.pack(ids)), np.array(ids), array("I", ids)):
        assert _body(given, None, {})["prompt"] == ids
    assert _body([ids, tuple(ids[:1])], None, {})["prompt"] == [ids, ids[:1]]
    assert _body("text", None, {"top_k": 5}) == {"prompt": "text", "top_k": 5}
    assert _body(["a", "b"], None, {})["prompt"] == ["a", "b"]
    assert _body(None, [{"role": "user", "content": "x"}], {}) == {"messages": [{"role": "user", "content": "x"}]}


def test_a_request_is_a_prompt_or_messages_never_both_or_neither() -> None:
    for prompt, messages in ((None, None), ("x", [{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequest) as wrong:
            _body(prompt, messages, {})
        assert wrong.value.param == "prompt"
    with pytest.raises(InvalidRequest):
        _body(b"123", None, {})


def test_a_generation_tells_what_the_answer_did() -> None:
    read = results.generation(raw := completion())
    assert (read.text, read.prompt_tokens, read.completion_tokens) == ("abc", 70, 3)
    assert read.usage.cached_tokens == 64
    assert read.cached == CachedTokens(node=64)
    assert (read.route, read.reason, read.ttft_s) == ("warm", TRACE["reason"], 0.12)
    assert read.trace is not None
    assert read.trace.workers == ("prefill-a", "decode-b")
    assert read.choices[0].stop_reason == "\n"
    assert read.raw is raw


def test_what_an_answer_does_not_tell_is_none() -> None:
    bare = completion(usage={"prompt_tokens": 70, "completion_tokens": 3, "total_tokens": 73})
    del bare["cpd"]
    read = results.generation(bare)
    assert (read.usage.cached_tokens, read.trace, read.cached, read.route, read.reason, read.ttft_s) == (None,) * 6


def test_chats_and_chunks_of_both_kinds_are_read_alike() -> None:
    message = {"index": 0, "message": {"role": "assistant", "content": "abc"}, "logprobs": None, "finish_reason": "length"}
    assert results.generation(completion(choices=[message])).text == "abc"
    delta = {"index": 1, "delta": {"content": "ab"}, "logprobs": None, "finish_reason": None}
    chunk = results.chunk({**HEAD, "choices": [delta], "usage": None})
    assert (chunk.index, chunk.text, chunk.finish_reason, chunk.usage, chunk.trace) == (1, "ab", None, None, None)
    opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    assert results.chunk({**HEAD, "choices": [opening]}).text == ""
    empty = {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": 7}
    assert (results.chunk({**HEAD, "choices": [empty]}).text, results.chunk({**HEAD, "choices": [empty]}).stop_reason) == ("", 7)
    last = results.chunk({**HEAD, "choices": [], "usage": USAGE, "cpd": TRACE})
    assert last.usage is not None
    assert last.trace is not None
    assert (last.text, last.usage.completion_tokens, last.trace.route) == ("", 3, "warm")


def test_fields_that_a_newer_system_adds_are_left_in_the_raw_answer() -> None:
    read = results.generation(raw := completion(cpd={**TRACE, "weather": "fine"}))
    assert read.trace is not None
    assert read.raw["cpd"]["weather"] == raw["cpd"]["weather"] == "fine"


@pytest.mark.parametrize("reader", [results.generation, results.chunk, results.plan, results.warmed, results.status])
@pytest.mark.parametrize("answer", [{}, {"choices": 5}, {"choices": [{}], "id": "x"}, {"workers": [{}], "requests": {}}])
def test_an_answer_of_another_shape_is_a_typed_error(reader: Any, answer: dict[str, Any]) -> None:
    with pytest.raises(BadMessage):
        reader(answer)

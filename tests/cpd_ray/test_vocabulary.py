"""Messages survive the codec, errors survive a process border, requests are valid once built."""

from __future__ import annotations

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd_ray import errors, messages, tokens
from cpd_ray.errors import BadMessage, CPDError, InvalidRequest
from cpd_ray.types import GenerateRequest, SamplingParams


@pytest.mark.parametrize("kind", messages.MESSAGES, ids=lambda k: k.__name__)
@given(data=st.data())
def test_every_message_round_trips(kind: type, data: st.DataObject) -> None:
    overrides: dict[type, Any] = {SamplingParams: st.builds(SamplingParams, max_tokens=st.integers(1, 9), top_p=st.floats(0.1, 1))}
    for origin, strategy in overrides.items():
        st.register_type_strategy(origin, strategy)
    st.register_type_strategy(float, st.floats(allow_nan=False, width=64))
    st.register_type_strategy(int, st.integers(-(2**62), 2**62))
    message = data.draw(st.from_type(kind))
    assert messages.decode(kind, messages.encode(message)) == message


@given(st.binary(max_size=64))
def test_rubbish_is_a_bad_message(blob: bytes) -> None:
    for kind in messages.MESSAGES:
        try:
            decoded = messages.decode(kind, blob)
        except (BadMessage, InvalidRequest):
            continue
        assert dataclasses.is_dataclass(decoded)


def all_errors(root: type[CPDError] = CPDError) -> list[type[CPDError]]:
    return [root, *(e for sub in root.__subclasses__() if sub.__module__ == errors.__name__ for e in all_errors(sub))]


@pytest.mark.parametrize("kind", all_errors(), ids=lambda k: k.__name__)
def test_errors_survive_pickling_with_their_fields(kind: type[CPDError]) -> None:
    error = kind("what to do")
    error.param = "prompt"
    back = pickle.loads(pickle.dumps(error))
    assert type(back) is kind
    assert back.__dict__ == error.__dict__
    assert str(back) == "what to do"


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_tokens_pack_and_unpack(ids: list[int]) -> None:
    assert list(tokens.unpack(tokens.pack(ids))) == ids


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"], [1.5]])
def test_ids_that_are_none_are_refused(bad: list[Any]) -> None:
    with pytest.raises(InvalidRequest):
        tokens.pack(bad)


def test_torn_buffer_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="not whole"):
        GenerateRequest(request_id="r", tokens=b"123")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="at least one token"):
        GenerateRequest(request_id="r", tokens=b"")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("min_p", 2.0),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3.0),
        ("frequency_penalty", float("nan")),
        ("logit_bias", ((1, 101.0),)),
        ("min_tokens", 17),
        ("stop_token_ids", (-1,)),
        ("logprobs", 21),
        ("seed", 2**64),
    ],
)
def test_absurd_sampling_is_refused_by_field(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field

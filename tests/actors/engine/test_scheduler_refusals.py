"""Aborts in each phase, and the refusal of what can't run."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cpd_ray.config import EngineConfig
from cpd_ray.errors import ContextLengthExceeded, DuplicateRequest, InvalidRequest
from cpd_ray.ids import RequestId
from cpd_ray.types import FinishReason, SamplingParams
from tests.actors.engine.rig import VOCAB, Rig


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@pytest.mark.parametrize("phase", ["waiting", "fetching", "prefill step", "between chunks", "decode step", "between decodes"])
def test_an_abort_in_each_phase_returns_every_block(phase: str) -> None:
    rig = Rig(config=EngineConfig(step_tokens=16, chunk_tokens=16))
    rig.fetch_at_once = False
    tokens = prompt(40, 1)
    rig.add("a", tokens, 6, may_fetch_blocks=4 if phase == "fetching" else 0)
    plan = None
    if phase in ("prefill step", "between chunks"):
        rig.step()
    if phase in ("decode step", "between decodes"):
        rig.run(until=lambda: len(rig.outputs[RequestId("a")]) == 2)
    if phase == "fetching":
        rig.step()
    if phase.endswith(" step"):
        plan = rig.schedule()
        assert plan is not None
    last = rig.scheduler.abort(RequestId("a"))
    assert last is not None
    assert last.finish_reason is FinishReason.ABORT
    assert rig.scheduler.abort(RequestId("a")) is None
    rig.scheduler.check()
    if plan is not None or phase == "fetching":
        assert rig.pool.counts().active >= 10, "a block that may still be written to was given up"
    if plan is not None:
        assert rig.scheduler.complete(plan, rig.runner.run(plan)) == []
    if phase == "fetching":
        rig.land(rig.fetches[0])
    rig.scheduler.check()
    rig.assert_nothing_held()
    assert rig.scheduler.schedule().step is None


@pytest.mark.parametrize(
    ("change", "error", "param"),
    [
        ({"tokens": b""}, InvalidRequest, "prompt"),
        ({"tokens": (VOCAB).to_bytes(4, "little") * 9}, InvalidRequest, "prompt"),
        ({"tokens": b"\xff" * 36}, InvalidRequest, "prompt"),
        ({"tokens": b"\x01" * 35}, InvalidRequest, "prompt"),
        ({"prompt_tokens": 0}, InvalidRequest, "prompt_tokens"),
        ({"prompt_tokens": 10}, InvalidRequest, "prompt_tokens"),
        ({"keys": ()}, InvalidRequest, "keys"),
        ({"root": b"short"}, InvalidRequest, "keys"),
        ({"max_new_tokens": 0}, InvalidRequest, "max_tokens"),
        ({"may_fetch_blocks": -1}, InvalidRequest, "may_fetch_blocks"),
        ({"sampling": SamplingParams(logit_bias=((VOCAB, 1.0),))}, InvalidRequest, "logit_bias"),
        ({"sampling": SamplingParams(stop_token_ids=(VOCAB,))}, InvalidRequest, "stop_token_ids"),
        ({"max_new_tokens": 100}, ContextLengthExceeded, "messages"),
        ({"request_id": "taken"}, DuplicateRequest, "request_id"),
    ],
)
def test_what_cannot_run_is_refused_with_the_fields_name(
    change: dict[str, object], error: type[InvalidRequest], param: str
) -> None:
    rig = Rig(max_model_len=64)
    rig.add("taken", prompt(9, 1), 2)
    with pytest.raises(error) as caught:
        rig.scheduler.add(replace(rig.request("it", prompt(9, 2), 2), **change))
    assert caught.value.param == param
    rig.scheduler.check()
    rig.run()
    rig.assert_nothing_held()


def test_the_models_length_is_exact() -> None:
    rig = Rig(max_model_len=20)
    rig.add("a", prompt(15, 1), 5)
    with pytest.raises(ContextLengthExceeded):
        rig.add("b", prompt(15, 1), 6)
    rig.add("kv", prompt(20, 2), 0, sample=False)
    rig.run()
    assert len(rig.answer("a")) == 5

"""Too few blocks, too many requests: preemption, refusals, poisoned blocks, and the bound that nobody starves."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.engine.fakes import oracle
from cpd_ray.config import EngineConfig
from cpd_ray.errors import ContextLengthExceeded, DuplicateRequest, EngineFault, InvalidRequest
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens, FinishReason, SamplingParams
from placement.cost_model import prefill_s
from tests.actors.engine.rig import TOKEN_BOUND, VOCAB, Rig


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


# -- blocks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["shortest", "fcfs"])
def test_decodes_that_outgrow_the_pool_are_preempted_and_resume_unchanged(order: str) -> None:
    rig = Rig(blocks=20, config=EngineConfig(step_tokens=64, chunk_tokens=16, order=order))
    wanted = {}
    for i in range(6):
        tokens = prompt(9, i)
        rig.add(f"r{i}", tokens, 40)
        wanted[f"r{i}"] = oracle(tokens, 40, VOCAB)
    preempted: set[str] = set()
    while not rig.scheduler.idle:
        running = {s.request_id for s in rig.plans[-1].sequences} if rig.plans else set()
        rig.step()
        preempted |= {name for name in running if name not in {s.request_id for s in rig.plans[-1].sequences}}
    assert {name: rig.answer(name) for name in wanted} == wanted
    assert rig.first("r0").cached == CachedTokens()
    assert rig.last("r0").computed_tokens == 9 + 39, "the first to come was never preempted"
    assert preempted
    rig.assert_nothing_held()


def test_a_resumed_prompt_reuses_what_it_committed() -> None:
    rig = Rig(blocks=30, config=EngineConfig(step_tokens=16, chunk_tokens=16))
    rig.add("cold", prompt(112, 1), 1)
    for _ in range(3):
        rig.step()
    rig.add("warm", prompt(40, 2), 1)
    rig.run()
    assert rig.answer("cold") == oracle(prompt(112, 1), 1, VOCAB)
    assert rig.answer("warm") == oracle(prompt(40, 2), 1, VOCAB)
    order = [s.request_id for plan in rig.plans for s in plan.sequences]
    assert order.index("warm") < len(order) - 1 - order[::-1].index("cold"), "the shorter one went ahead"
    assert rig.last("cold").computed_tokens < 112 + 40
    assert rig.first("cold").cached == CachedTokens(), "what it computed itself once is not cached"
    rig.assert_nothing_held()


def test_a_request_as_large_as_the_pool_runs_among_others() -> None:
    rig = Rig(blocks=20)
    for i in range(8):
        rig.add(f"s{i}", prompt(10, i), 12)
    rig.step()
    rig.add("whole", prompt(60, 99), 21)
    rig.run()
    assert rig.answer("whole") == oracle(prompt(60, 99), 21, VOCAB)
    rig.assert_nothing_held()


def test_one_token_more_than_the_pool_is_refused_at_once() -> None:
    rig = Rig(blocks=20)
    rig.add("fits", prompt(60, 1), 21)
    with pytest.raises(ContextLengthExceeded, match="21 KV blocks"):
        rig.add("too long", prompt(60, 1), 22)
    rig.run()
    rig.assert_nothing_held()


def test_blocks_held_by_others_are_waited_for() -> None:
    rig = Rig(blocks=10)
    outside = rig.pool.allocate(8)
    rig.add("a", prompt(30, 1), 2)
    assert rig.step() is None
    rig.pool.release(outside)
    rig.run()
    assert rig.answer("a") == oracle(prompt(30, 1), 2, VOCAB)


def test_lapsed_leases_give_room() -> None:
    rig = Rig(blocks=10)
    rig.add("a", prompt(30, 1), 1, hold=True)
    rig.run()
    held = rig.last("a").held_blocks
    rig.pool.lease(held, holder="peer", ttl_s=1.0, grace_s=0.5)
    rig.pool.release(held)
    rig.add("b", prompt(30, 2), 1)
    assert rig.step() is None
    rig.clock.advance(1.5)
    rig.run()
    assert rig.answer("b") == oracle(prompt(30, 2), 1, VOCAB)
    rig.assert_nothing_held()


# -- fetches that go wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spare_blocks", [0, 30])
def test_poisoned_blocks_are_replaced_or_the_sequence_starts_anew(spare_blocks: int) -> None:
    rig = Rig(blocks=11 + spare_blocks)
    tokens = prompt(41, 1)
    rig.add("fill", tokens, 1)
    rig.run()
    rig.pool.clear()
    rig.port.landing = lambda plan: (None, plan.blocks[3:5])
    request = rig.add("a", tokens, 3, may_fetch_blocks=10)
    rig.step()
    assert rig.fetches
    transfer_over: list[bool] = []
    plan = rig.fetches.pop()
    result = rig.port.deliver(plan)
    rig.pool.quarantine(result.poisoned, lambda: bool(transfer_over))
    rig.scheduler.fetched(plan, result)
    rig.scheduler.check()
    for _ in range(3):
        rig.step()
    assert bool(rig.outputs[request.request_id]) == bool(spare_blocks)
    for block in result.poisoned:
        rig.runner.memory[block] = [-1] * 4  # the late transfer writes
    transfer_over.append(True)
    rig.port.landing = lambda plan: (0, ())
    rig.run()
    assert rig.answer("a") == oracle(tokens, 3, VOCAB)
    assert rig.first("a").cached is not None
    assert rig.first("a").cached.total == 12
    rig.assert_nothing_held()


def test_a_poisoned_tail_is_computed() -> None:
    rig = Rig()
    rig.port.tails["a"] = [None] * 4
    rig.port.landing = lambda plan: (None, () if plan.tail_block is None else (plan.tail_block,))
    rig.fetch_at_once = False
    tokens = prompt(7, 1)
    rig.add("fill", tokens[:5], 1)
    rig.run()
    rig.add("a", tokens, 2, prompt_tokens=6, fetch_tail=True)
    rig.step()
    rig.land(rig.fetches[0])
    rig.run()
    assert rig.answer("a") == oracle(tokens, 2, VOCAB, answered=1)
    assert rig.first("a").cached == CachedTokens(pool=4)
    assert rig.pool.counts().quarantined == 1


def test_a_port_that_breaks_its_promise_costs_one_request_and_its_blocks() -> None:
    rig = Rig()
    rig.fetch_at_once = False
    rig.add("a", prompt(41, 1), 3, may_fetch_blocks=4)
    rig.add("b", prompt(20, 2), 3)
    rig.step()
    plan = rig.fetches.pop()
    output = rig.scheduler.fetch_broke(plan, EngineFault("fetch"))
    rig.scheduler.check()
    assert output is not None
    assert isinstance(output.error, EngineFault)
    rig.run()
    assert rig.answer("b") == oracle(prompt(20, 2), 3, VOCAB)
    assert rig.pool.counts().quarantined == 4, "something may write there for ever"
    rig.assert_nothing_held()


# -- aborts in each phase --------------------------------------------------------------------------------------------


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


# -- refusals --------------------------------------------------------------------------------------------------------


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


# -- order -----------------------------------------------------------------------------------------------------------


def test_a_short_prompt_interrupts_a_long_one_at_the_next_border() -> None:
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=16, chunk_tokens=16), cost=TOKEN_BOUND)
    rig.add("cold", prompt(400, 1), 1)
    for _ in range(3):
        rig.step()
    rig.add("warm", prompt(7, 2), 1)
    rig.step()
    assert [s.request_id for s in rig.plans[-1].sequences] == ["warm"], "and nothing delays its first token"
    assert rig.answer("warm")


def test_chunks_end_at_block_borders() -> None:
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=18, chunk_tokens=18, max_running=3))
    for i in range(6):
        rig.add(f"r{i}", prompt(50 + i, i), 5)
    rig.run()
    for plan in rig.plans:
        for step in plan.sequences:
            stop = step.start + len(step.tokens)
            assert stop == len(step.history) or stop % 4 == 0


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 120), st.floats(0, 0.02)), min_size=2, max_size=30),
    st.sampled_from([0.5, 2.0, 20.0]),
    st.sampled_from([4, 16]),
)
def test_nobody_starves(arrivals: list[tuple[int, float]], aging_s: float, chunk: int) -> None:
    """The bound: what arrives more than `aging_s` times a prompt's predicted seconds after it computes nothing before it has its
    first token, but in steps in which it computes too. So only what came before that can delay it: finite work, whatever follows."""
    config = EngineConfig(step_tokens=16, chunk_tokens=chunk, max_running=64, aging_s=aging_s)
    rig = Rig(blocks=1000, config=config, checks=False)
    due, at_s = [], 0.0
    for i, (length, gap_s) in enumerate(arrivals):
        at_s += gap_s
        due.append((at_s, f"r{i}", prompt(length, i)))
    arrived: dict[str, float] = {}
    bound: dict[str, float] = {}
    while due or not rig.scheduler.idle:
        while due and due[0][0] <= rig.clock.now_s():
            _, name, tokens = due.pop(0)
            rig.add(name, tokens, 1)
            arrived[name] = rig.clock.now_s()
            bound[name] = arrived[name] + aging_s * prefill_s(rig.runner.cost, 0, len(tokens), chunk)
        unserved = {name for name in arrived if not rig.outputs[RequestId(name)]}
        plan = rig.step()
        served = {s.request_id for s in plan.sequences} if plan else set()
        for name in unserved - served:
            late = [other for other in served if arrived[other] > bound[name] + 1e-9]
            assert not late, f"{late} went before {name}"
    assert all(len(rig.outputs[RequestId(name)]) == 1 for name in arrived)


def test_under_a_flood_of_short_prompts_a_long_one_is_served_within_its_bound() -> None:
    """Short prompts arrive as fast as they can be computed, for ever: without aging the long one would never run."""
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=16, chunk_tokens=16, aging_s=2.0))
    rig.add("long", prompt(200, 0), 1)
    bound_s = 2.0 * prefill_s(rig.runner.cost, 0, 200, 16)
    serial = 0
    waits = []
    while not rig.outputs[RequestId("long")]:
        serial += 1
        rig.add(f"s{serial}", prompt(15, serial), 1)
        rig.step()
        waits.append(rig.clock.now_s())
        assert serial < 1000, "starved"
    # all that came before the bound, its own work, and one step under way
    work_s = bound_s + 2 * prefill_s(rig.runner.cost, 0, 200, 16) + max(b - a for a, b in pairwise(waits))
    assert bound_s * 0.5 < rig.clock.now_s() <= work_s


def test_first_come_first_served_keeps_the_order_of_arrival() -> None:
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=16, chunk_tokens=16, order="fcfs"))
    for i, length in enumerate([90, 3, 50, 8]):
        rig.add(f"r{i}", prompt(length, i), 1)
        rig.clock.advance(0.001)
    rig.run()
    firsts = list(dict.fromkeys(s.request_id for plan in rig.plans for s in plan.sequences))
    assert firsts == ["r0", "r1", "r2", "r3"]


# -- load ------------------------------------------------------------------------------------------------------------


def test_backlog_is_the_time_that_computing_it_takes() -> None:
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=16, chunk_tokens=16))
    for i, length in enumerate([160, 80, 16]):
        rig.add(f"r{i}", prompt(length, i), 1)
    load = rig.scheduler.load()
    assert (load.running, load.waiting, load.backlog_tokens) == (0, 3, 256)
    rig.run()
    assert rig.clock.now_s() == pytest.approx(load.backlog_s, rel=0.01)
    done = rig.scheduler.load()
    assert load.backlog_s == pytest.approx(sum(load.queue_s))
    assert load.queue_age_s == (0.0, 0.0, 0.0)
    assert load.queue_s[0] > load.queue_s[1] > load.queue_s[2]
    assert (done.running, done.waiting, done.backlog_tokens, done.backlog_s) == (0, 0, 0, 0.0)


def test_a_shared_prefix_is_in_the_backlog_once_and_what_is_fetched_costs_no_compute() -> None:
    rig = Rig(blocks=400)
    shared = prompt(160, 0)
    rig.add("a", [*shared, 1], 1)
    alone_s = rig.scheduler.load().backlog_s
    rig.step()
    rig.add("b", [*shared, 2], 1)
    assert rig.scheduler.load().backlog_s < alone_s
    rig.run()
    rig.pool.clear()
    rig.fetch_at_once = False
    rig.add("c", [*shared, 3], 1, may_fetch_blocks=40)
    load = rig.scheduler.load()
    assert load.backlog_tokens == 161
    assert load.backlog_s < alone_s / 5
    rig.step()
    assert rig.scheduler.load().backlog_tokens == 161
    assert rig.scheduler.load().running == 1

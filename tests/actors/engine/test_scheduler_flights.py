"""Single flight: equal prefixes that arrive together are computed once, and whoever computes stands in for those who wait."""

from __future__ import annotations

import pytest

from actors.engine.fakes import oracle
from cpd_ray.config import EngineConfig
from cpd_ray.errors import EngineFault
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens
from tests.actors.engine.rig import TOKEN_BOUND, VOCAB, Rig

SHARED = list(range(100, 140))


def test_sixteen_agents_on_one_context_compute_it_once() -> None:
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=16, chunk_tokens=8, max_running=32))
    tails = {f"agent{i}": [*SHARED, 500 + i, 600 + i] for i in range(16)}
    for name, tokens in tails.items():
        rig.add(name, tokens, 3)
    rig.run()
    for name, tokens in tails.items():
        assert rig.answer(name) == oracle(tokens, 3, VOCAB)
    cached = [rig.first(name).cached for name in tails]
    assert cached.count(CachedTokens()) == 1
    assert cached.count(CachedTokens(pool=40)) == 15
    prompt_tokens = sum(len(s.tokens) for plan in rig.plans for s in plan.sequences if s.start < 40)
    assert prompt_tokens == 40
    rig.assert_nothing_held()


def test_equal_prompts_wait_only_for_what_they_can_use() -> None:
    """Of a prompt of whole blocks everyone computes the last block: nobody waits for it."""
    rig = Rig(config=EngineConfig(step_tokens=8, chunk_tokens=8))
    for name in ("a", "b"):
        rig.add(name, SHARED, 2)
    rig.run()
    assert rig.first("b").cached == CachedTokens(pool=36)
    assert rig.answer("a") == rig.answer("b") == oracle(SHARED, 2, VOCAB)


def test_waiters_hold_no_blocks() -> None:
    rig = Rig(blocks=12, config=EngineConfig(step_tokens=8, chunk_tokens=8))
    for name in ("a", "b", "c"):
        rig.add(name, [*SHARED, 1], 1)
    rig.step()
    assert rig.pool.counts().active == 11, "one table, not three"
    rig.run()
    assert [rig.answer(name) for name in "abc"] == [oracle([*SHARED, 1], 1, VOCAB)] * 3


@pytest.mark.parametrize("death", ["abort", "fault"])
def test_when_the_computing_one_dies_a_waiter_takes_over(death: str) -> None:
    rig = Rig(config=EngineConfig(step_tokens=8, chunk_tokens=8))
    for name in ("a", "b", "c"):
        rig.add(name, [*SHARED, 1], 2)
    rig.step()
    rig.step()
    plan = rig.schedule()
    assert plan is not None
    assert [s.request_id for s in plan.sequences] == ["a"]
    if death == "abort":
        rig.scheduler.abort(RequestId("a"))
        rig.finish(plan)
    else:
        rig.scheduler.fail(plan, EngineFault("boom"))
    rig.scheduler.check()
    rig.run()
    done = 24 if death == "abort" else 16  # what was committed before is not lost, an aborted step's work included
    assert rig.first("b").cached == CachedTokens(pool=done)
    assert rig.first("c").cached == CachedTokens(pool=40)
    assert rig.answer("b") == rig.answer("c") == oracle([*SHARED, 1], 2, VOCAB)
    rig.assert_nothing_held()


def test_the_leader_inherits_the_place_of_the_best_waiter() -> None:
    """`long` computes a prefix that `urgent` needs; `middle` would pass `long`, but must not pass `urgent`."""
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=8, chunk_tokens=8), cost=TOKEN_BOUND)
    rig.add("long", [*SHARED, *range(200, 500)], 1)
    rig.step()
    rig.add("middle", list(range(600, 700)), 1)
    rig.add("urgent", [*SHARED, 1, 2], 1, priority=5)
    rig.run(until=lambda: bool(rig.outputs[RequestId("urgent")]))
    assert not rig.outputs[RequestId("middle")]
    served = [s.request_id for plan in rig.plans for s in plan.sequences]
    assert served == ["long"] * 5 + ["urgent"], "no step went to `middle`, nor to `long` beyond the shared part"
    rig.run()
    assert served.count("long") < [s.request_id for plan in rig.plans for s in plan.sequences].count("long")


def test_a_prefix_that_is_being_fetched_is_waited_for() -> None:
    rig = Rig()
    rig.add("fill", [*SHARED, 1], 1)
    rig.run()
    rig.pool.clear()
    rig.fetch_at_once = False
    rig.add("a", [*SHARED, 2], 1, may_fetch_blocks=10)
    rig.add("b", [*SHARED, 3], 1, may_fetch_blocks=10)
    assert rig.step() is None
    (plan,) = rig.fetches
    assert plan.request_id == "a"
    assert rig.step() is None, "b waits for a's fetch instead of fetching too"
    rig.land(plan)
    rig.run()
    assert rig.first("a").cached == CachedTokens(node=40)
    assert rig.first("b").cached == CachedTokens(pool=40)


def test_others_compute_while_one_fetches() -> None:
    rig = Rig()
    rig.add("fill", [*SHARED, 1], 1)
    rig.run()
    rig.pool.clear()
    rig.fetch_at_once = False
    rig.add("other", list(range(300, 420)), 1)
    rig.step()
    rig.add("fetcher", [*SHARED, 2], 1, may_fetch_blocks=10)
    plan = rig.step()
    assert plan is not None
    assert rig.fetches, "the fetch begins though the budget is spent on another"


def test_a_reused_id_waits_for_its_own_predecessors_blocks() -> None:
    rig = Rig(config=EngineConfig(step_tokens=8, chunk_tokens=8))
    rig.add("a", [*SHARED, 1], 2)
    plan = rig.schedule()
    assert plan is not None
    assert rig.scheduler.abort(RequestId("a")) is not None
    rig.add("a", [*SHARED, 1], 2)
    rig.finish(plan)
    rig.run()
    assert rig.first("a").cached == CachedTokens(pool=8), "what the aborted step computed was committed"
    assert rig.answer("a") == oracle([*SHARED, 1], 2, VOCAB)
    rig.assert_nothing_held()


def test_a_fetch_begins_beside_a_step_and_takes_no_room_that_a_better_placed_one_waits_for() -> None:
    rig = Rig(blocks=24, block_size=4, config=EngineConfig(step_tokens=16, chunk_tokens=16))
    rig.fetch_at_once = False
    assert rig.scheduler.fetch_beside() == (), "without a step, schedule begins them"
    rig.add("running", range(100, 140), 1)
    step = rig.schedule()
    assert step is not None
    rig.add("urgent", range(200, 240), 1, priority=1)
    rig.add("fetching", range(300, 320), 1, may_fetch_blocks=4)
    assert rig.scheduler.fetch_beside() == (), "10 blocks run, 10 are the better-placed one's, and 5 more are not there"
    assert rig.scheduler.abort(RequestId("urgent")) is not None
    begun = rig.scheduler.fetch_beside()
    assert [plan.request_id for plan in begun] == ["fetching"]
    assert rig.scheduler.fetch_beside() == (), "each begins once"
    rig.fetches += begun
    rig.check()
    rig.outputs.pop(RequestId("urgent"))
    rig.land(begun[0])
    rig.finish(step)
    rig.run()
    assert rig.answer("fetching") == rig.expect(range(300, 320), 1)
    assert rig.first("fetching").cached is not None
    rig.assert_nothing_held()

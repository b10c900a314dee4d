"""Too few blocks, and fetches that go wrong: preemption, resumption, waiting, poisoned blocks."""

from __future__ import annotations

import random

import pytest

from actors.engine.fakes import oracle
from actors.engine.interface import FetchResult
from cpd_ray.config import EngineConfig
from cpd_ray.errors import ContextLengthExceeded, EngineFault
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens, FinishReason
from tests.actors.engine.rig import VOCAB, Rig


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


def test_what_a_preempted_prompt_lost_from_the_pool_is_fetched_not_recomputed() -> None:
    rig = Rig(blocks=30, config=EngineConfig(step_tokens=16, chunk_tokens=16))
    rig.add("cold", prompt(112, 1), 1)
    for _ in range(3):
        rig.step()
    rig.add("warm", prompt(40, 2), 1)
    rig.run(until=lambda: bool(rig.outputs[RequestId("warm")]))
    rig.pool.clear()
    rig.run()
    assert rig.last("cold").computed_tokens == 112
    assert rig.first("cold").cached == CachedTokens()
    assert rig.answer("cold") == oracle(prompt(112, 1), 1, VOCAB)


def test_nobody_is_preempted_for_room_that_still_would_not_do() -> None:
    """The cached prefix of the waiting one is evictable, but not for itself."""
    rig = Rig(blocks=20, config=EngineConfig(step_tokens=4, chunk_tokens=4))
    stem = prompt(33, 1)
    rig.add("fill", stem, 1)
    rig.run()
    outside = rig.pool.allocate(8)
    rig.add("running", prompt(16, 2), 1)
    rig.step()
    rig.add("urgent", [*stem, *prompt(31, 3)], 1, priority=5)
    plan = rig.step()
    assert plan is not None
    assert [s.request_id for s in plan.sequences] == ["running"]
    rig.pool.release(outside)
    rig.run()
    assert rig.first("urgent").cached == CachedTokens(pool=32)
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


def test_those_behind_do_not_take_the_blocks_that_the_first_waits_for() -> None:
    """Else small requests, coming for ever, would keep a large one out."""
    rig = Rig(blocks=20, config=EngineConfig(step_tokens=64, chunk_tokens=64, order="fcfs"))
    rig.add("running", prompt(30, 0), 12)
    rig.step()
    rig.clock.advance(1.0)
    rig.add("large", prompt(60, 1), 2)
    rig.clock.advance(1.0)
    for i in range(3):
        rig.add(f"small{i}", prompt(5, 2 + i), 2)
    rig.run(until=lambda: bool(rig.outputs[RequestId("large")]))
    assert rig.last("running").finish_reason is FinishReason.LENGTH
    assert not any(rig.outputs[RequestId(f"small{i}")] for i in range(3))
    rig.run()
    assert rig.answer("small2") == oracle(prompt(5, 4), 2, VOCAB)


def test_a_prompt_does_not_begin_on_the_blocks_that_decodes_need_next() -> None:
    """It would be preempted, begin again, be preempted again: each time for nothing."""
    rig = Rig(blocks=14)
    for i in range(2):
        rig.add(f"d{i}", prompt(17, i), 8)
    rig.run(until=lambda: all(rig.outputs.values()))
    assert rig.pool.available() == 4
    rig.add("late", prompt(15, 9), 2)
    rig.run()
    assert rig.last("late").computed_tokens == 15 + 1, "begun once"
    assert [s.request_id for s in rig.plans[-1].sequences] == ["late"]


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


@pytest.mark.parametrize("lie", ["poisoned block among the landed", "tail after a gap"])
def test_only_a_leading_run_of_clean_blocks_counts(lie: str) -> None:
    rig = Rig()
    rig.fetch_at_once = False
    tokens = prompt(43, 1)
    rig.add("a", tokens, 2, prompt_tokens=42, may_fetch_blocks=10, fetch_tail=True)
    rig.step()
    plan = rig.fetches.pop()
    other = Rig()
    other.add("it", tokens, 1, hold=True)
    other.run()
    theirs = [other.runner.memory[block] for block in other.last("it").held_blocks]
    for block, entries in zip(plan.blocks[:3], theirs, strict=False):
        rig.runner.memory[block] = list(entries)
    if lie == "tail after a gap":
        result = FetchResult(("cluster",) * 3, tail=True)
    else:
        result = FetchResult(("cluster",) * 10, tail=True, poisoned=(plan.blocks[3],))
        rig.pool.quarantine(result.poisoned, lambda: False)
    rig.scheduler.fetched(plan, result)
    rig.scheduler.check()
    rig.run()
    assert rig.first("a").cached == CachedTokens(cluster=12)
    assert rig.answer("a") == oracle(tokens, 2, VOCAB, answered=1)


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

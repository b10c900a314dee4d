"""Who goes first, the bound that nobody starves, and the load that is told."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpd_ray.config import EngineConfig
from cpd_ray.ids import RequestId
from placement.cost_model import prefill_s
from tests.actors.engine.rig import TOKEN_BOUND, VOCAB, Rig


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


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
@example(
    [(50, 0.0), (50, 0.0), (1, 0.0078125)], 0.5, 4
)  # the first one's end leaves less than a block, which only the last could use
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

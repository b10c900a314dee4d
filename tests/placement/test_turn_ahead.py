"""Which worker is prepared for the next turn."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cpd_ray.ids import BlockKey, NodeId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost
from cpd_ray.types import Role
from placement.routing.types import Route, Snapshot, WorkerView
from placement.turn_ahead import Pauses, TurnAhead


def view(name: str, role: Role = Role.PREFILL, backlog_s: float = 0.0) -> WorkerView:
    pool = PoolCounts(10, 10, 0, 0, 0, 0)
    return WorkerView(WorkerId(name), role, NodeId("n"), 0, 0, 0, backlog_s, pool, StepCost(0, 0, 0, 0), {})


def test_the_worker_that_has_most_of_it_unless_prompts_wait_there() -> None:
    workers = (view("a", backlog_s=0.2), view("b"), view("c", Role.PRE_PREFILL), view("d", Role.DECODE))
    rule = TurnAhead()
    assert rule.worker(Route.WARM, WorkerId("a"), Snapshot(workers, 1)) == "a"
    assert rule.worker(Route.WARM, WorkerId("c"), Snapshot(workers, 1)) == "b"
    busy = (replace(workers[0], backlog_s=1.1), *workers[1:])
    assert rule.worker(Route.WARM, WorkerId("a"), Snapshot(busy, 1)) == "b"
    nobody = Snapshot((busy[0], replace(workers[1], draining=True), *workers[2:]), 1)
    assert rule.worker(Route.WARM, WorkerId("a"), nobody) is None


@pytest.mark.parametrize("after_cold", [True, False])
def test_a_first_turn_counts_only_where_it_is_said_to(after_cold: bool) -> None:
    rule = TurnAhead(after_cold=after_cold)
    assert rule.expects(Route.WARM)
    assert rule.expects(Route.COLD) is after_cold
    assert (rule.worker(Route.COLD, WorkerId("a"), Snapshot((view("a"),), 1)) is None) is not after_cold


def context(name: int, blocks: int) -> list[BlockKey]:
    return [BlockKey(f"{name}/{i}".encode()) for i in range(blocks)]


def test_a_fetch_begins_so_late_that_few_turns_come_before_it() -> None:
    rng, pauses = random.Random(1), Pauses()
    assert pauses.wait_s(0.2, 0.5) == 0.5
    seen = []
    for i in range(400):
        pause_s = rng.uniform(4, 20)
        seen.append(pause_s)
        pauses.ended(context(i, 10), 100.0 * i)
        pauses.arrived(context(i, 12), 100.0 * i + pause_s)
        pauses.arrived(context(-i - 1, 12), 100.0 * i + pause_s)  # continues nothing
    wait_s = pauses.wait_s(0.2, 0.5)
    early = sum(pause_s < wait_s + 0.4 for pause_s in seen[-256:]) / 256
    assert 0.02 < early <= 0.06
    assert pauses.wait_s(60.0, 0.5) == 0.5


def test_what_is_remembered_is_bounded_and_the_latest_end_counts() -> None:
    pauses = Pauses(most_contexts=3, most_pauses=30)
    for i in range(100):
        pauses.ended(context(i, 1), float(i))
    for i in range(100):
        pauses.arrived(context(i, 1), 1000.0)
    assert pauses.wait_s(0.0, 0.5) == 0.5, "three pauses are too few to learn from"
    for i in range(40):
        pauses.ended(context(7, 1), 10.0 * i)
        pauses.ended(context(7, 1), 10.0 * i + 1)
        pauses.arrived(context(7, 2), 10.0 * i + 5)
    assert pauses.wait_s(0.0, 0.5) == 4.0
    with pytest.raises(ValueError, match="at least one"):
        Pauses(early_share=1.0)

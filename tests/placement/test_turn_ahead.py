"""Which worker is prepared for the next turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost
from cpd_ray.types import Role
from placement.routing.types import Route, Snapshot, WorkerView
from placement.turn_ahead import TurnAhead


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

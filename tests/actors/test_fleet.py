"""Load on the router's side: counted once, and not at all after the end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from actors.fleet import Client, Fleet
from cpd_ray.clock import ManualClock
from cpd_ray.errors import WorkerGone
from cpd_ray.ids import NodeId, RequestId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost, WorkerReport, WorkerState
from cpd_ray.types import Role

CLIENT = cast(Client, object())
W = WorkerId("w")


def report(worker: str = "w", **changes: Any) -> WorkerReport:
    fields: dict[str, Any] = {
        "worker": WorkerId(worker), "role": Role.PREFILL, "node": NodeId("n"), "epoch": 1, "state": WorkerState.READY,
        "running": 0, "waiting": 0, "backlog_tokens": 0, "backlog_s": 0.0, "pool": PoolCounts(8, 8, 0, 0, 0, 0),
        "step_cost": StepCost(0.01, 0.001, 0.0, 0.0), "block_size": 4, "fetch_bytes_per_s": {},
    }  # fmt: skip
    return WorkerReport(**{**fields, **changes})


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet("r", ManualClock(), bytes_per_token=10)
    fleet.heard(CLIENT, report())
    return fleet


def backlog(fleet: Fleet) -> tuple[int, int]:
    (view,) = fleet.snapshot().workers
    return view.waiting, view.backlog_tokens


def test_a_request_counts_until_the_workers_report_counts_it(fleet: Fleet) -> None:
    with fleet.dispatch(W, RequestId("a"), new_tokens=100, seconds=1.0) as first:
        with fleet.dispatch(W, RequestId("b"), new_tokens=10, seconds=0.5) as second:
            assert (first.sequence, second.sequence) == (1, 2)
            assert backlog(fleet) == (2, 110)
            fleet.heard(CLIENT, report(seen={"r": 1}, waiting=1, backlog_tokens=100))
            assert backlog(fleet) == (2, 110), "the first is in the report now, the second still ours"
            fleet.heard(CLIENT, report(seen={"r": 2, "other": 9}, waiting=2, backlog_tokens=110))
            assert backlog(fleet) == (2, 110)
        assert backlog(fleet) == (2, 110), "what the report counts is the report's to take back"
    fleet.heard(CLIENT, report(seen={"r": 2}))
    assert backlog(fleet) == (0, 0)
    assert fleet.uncounted() == 0


def test_nothing_is_counted_after_an_end_that_no_report_saw(fleet: Fleet) -> None:
    with pytest.raises(RuntimeError), fleet.dispatch(W, RequestId("a"), new_tokens=7, seconds=1.0):
        raise RuntimeError
    assert backlog(fleet) == (0, 0)


def test_a_restarted_worker_knows_nothing_of_what_was_sent(fleet: Fleet) -> None:
    with fleet.dispatch(W, RequestId("a"), new_tokens=7, seconds=1.0):
        fleet.heard(CLIENT, report(epoch=2))
        assert backlog(fleet) == (0, 0)
    with fleet.dispatch(W, RequestId("b"), new_tokens=7, seconds=1.0) as origin:
        assert origin.sequence == 1


def test_the_silent_the_starting_and_the_gone_are_not_chosen() -> None:
    clock = ManualClock()
    fleet = Fleet("r", clock, bytes_per_token=10, stale_after_s=5.0)
    fleet.heard(CLIENT, report("a"))
    fleet.heard(CLIENT, report("b", state=WorkerState.STARTING))
    fleet.heard(CLIENT, report("c", state=WorkerState.DRAINING))
    assert [(v.worker, v.draining) for v in fleet.snapshot().workers] == [("a", False), ("c", True)]
    clock.advance(5.1)
    assert fleet.snapshot().workers != (), "nobody was asked meanwhile: a stall of our own is nobody's silence"
    fleet.round_ended()
    assert fleet.snapshot().workers == ()
    assert fleet.members() == ["a", "b", "c"]
    fleet.gone(WorkerId("a"))
    with pytest.raises(WorkerGone):
        fleet.client(WorkerId("a"))
    with pytest.raises(WorkerGone), fleet.dispatch(WorkerId("a"), RequestId("x"), new_tokens=1, seconds=0.0):
        pass

"""Choosing a decode worker, and promising room on it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from cpd_ray.errors import Unavailable
from cpd_ray.ids import NodeId, RequestId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost
from cpd_ray.types import Role
from placement.reservations import DecodeReservations
from placement.routing.decode import DecodeCostPolicy, blocks_needed
from placement.routing.types import RequestView, Snapshot, WorkerView

BLOCK = 64


def decoder(
    name: str, *, free: int = 100, cached: int = 0, running: int = 0, total: int = 200, draining: bool = False
) -> WorkerView:
    return WorkerView(
        worker=WorkerId(name),
        role=Role.DECODE,
        node=NodeId("n"),
        running=running,
        waiting=0,
        backlog_tokens=0,
        backlog_s=0.0,
        pool=PoolCounts(total, free, cached, total - free - cached, 0, 0),
        step_cost=StepCost(0.01, 1e-4, 1e-9, 1e-4),
        fetch_bytes_per_s={"cluster": 5e9},
        draining=draining,
    )


def request(name: str = "r", total: int = 640, new: int = 64, by_worker: dict[str, int] | None = None) -> RequestView:
    held = {WorkerId(k): v for k, v in (by_worker or {}).items()}
    return RequestView(RequestId(name), total, BLOCK, held, {}, max_new_tokens=new)


def test_only_workers_with_room_and_the_cached_prefix_draws() -> None:
    policy = DecodeCostPolicy()
    snapshot = Snapshot((decoder("full", free=3), decoder("empty"), decoder("holder")), 50_000)
    decision = policy.decide(request(by_worker={"holder": 640, "full": 640}), snapshot)
    assert decision is not None
    assert (decision.worker, decision.cached_tokens, decision.free_blocks) == ("holder", 640, 100)
    assert "640 of 640" in decision.reason


def test_load_outweighs_a_small_prefix() -> None:
    policy = DecodeCostPolicy()
    busy = replace(decoder("busy", running=60), step_cost=StepCost(0.01, 1e-3, 1e-9, 1e-3))
    idle = replace(decoder("idle"), step_cost=busy.step_cost)
    decision = policy.decide(request(new=400, by_worker={"busy": 64}), Snapshot((busy, idle), 50_000))
    assert decision is not None
    assert decision.worker == "idle"


def test_none_when_all_are_full_and_unavailable_when_there_is_nobody() -> None:
    policy = DecodeCostPolicy()
    assert policy.decide(request(), Snapshot((decoder("a", free=2),), 1)) is None
    for views in ((), (decoder("a", draining=True),), (decoder("a", total=5, free=5),)):
        with pytest.raises(Unavailable):
            policy.decide(request(), Snapshot(views, 1))


def test_promises_are_not_given_twice_and_end() -> None:
    promises = DecodeReservations(DecodeCostPolicy())
    snapshot = Snapshot((decoder("a", free=15, cached=8, total=40),), 50_000)
    need = blocks_needed(request())
    assert need == 11
    assert promises.reserve(request("one"), snapshot) is not None
    assert promises.reserve(request("two"), snapshot) is not None
    assert promises.reserve(request("three"), snapshot) is None
    assert promises.reserve(request("two"), snapshot) is not None, "a second call replaces the first promise"
    promises.release(RequestId("one"))
    assert promises.reserve(request("three"), snapshot) is not None
    assert sorted(promises.worker_gone(WorkerId("a"))) == ["three", "two"]
    assert len(promises) == 0


@pytest.mark.parametrize("seed", range(5))
def test_promised_room_never_exceeds_the_pool(seed: int) -> None:
    rng = random.Random(seed)
    promises = DecodeReservations(DecodeCostPolicy())
    snapshot = Snapshot((decoder("a", free=60, cached=30), decoder("b", free=20, cached=100)), 50_000)
    living: set[str] = set()
    for i in range(400):
        if living and rng.random() < 0.45:
            gone = rng.choice(sorted(living))
            living.discard(gone)
            promises.release(RequestId(gone))
        elif promises.reserve(request(f"r{i}", total=rng.randint(1, 2000), new=rng.randint(1, 300)), snapshot) is not None:
            living.add(f"r{i}")
        assert len(promises) == len(living)
        for view, shown in zip(snapshot.workers, promises.apply(snapshot.workers), strict=True):
            room = view.pool.free + view.pool.cached
            assert promises.promised_blocks(view.worker) <= room
            assert shown.pool.free + shown.pool.cached == room - promises.promised_blocks(view.worker)
            counts = shown.pool
            assert counts.free + counts.cached + counts.active + counts.leased + counts.quarantined == counts.total

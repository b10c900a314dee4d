"""Admission: order, fairness, the starvation bound, and a random walk against its invariant."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd_ray.clock import ManualClock
from cpd_ray.errors import DuplicateRequest, Overloaded
from cpd_ray.ids import RequestId
from placement.admission import Admission, AdmissionLimits, Ticket


def ticket(name: str, cost_s: float, arrived_s: float = 0.0, tenant: str = "", priority: int = 0) -> Ticket:
    return Ticket(RequestId(name), cost_s, arrived_s, tenant, priority)


def drain(admission: Admission) -> list[str]:
    """Serve one at a time until nobody is left; the order."""
    order = []
    while (entered := admission.next_ready()) is not None:
        order.append(str(entered.request_id))
        admission.done(entered.request_id)
        admission.check()
    return order


def test_shortest_first_and_never_more_than_the_limit() -> None:
    admission = Admission(AdmissionLimits(max_in_flight=2), ManualClock())
    for name, cost in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        admission.offer(ticket(name, cost))
    first, second = admission.next_ready(), admission.next_ready()
    assert first is not None
    assert second is not None
    assert (first.request_id, second.request_id) == ("a", "b")
    assert admission.next_ready() is None
    admission.done(first.request_id)
    third = admission.next_ready()
    assert third is not None
    assert third.request_id == "c"


def test_one_whose_turn_it_is_may_have_to_wait_for_decode_and_nobody_slips_past() -> None:
    admission = Admission(AdmissionLimits(), ManualClock())
    admission.offer(ticket("a", 1.0))
    admission.offer(ticket("b", 2.0))
    assert admission.next_ready(lambda t: t.request_id != "a") is None
    assert admission.queued == 2
    assert drain(admission) == ["a", "b"]


def test_duplicates_are_refused_in_both_states() -> None:
    admission = Admission(AdmissionLimits(), ManualClock())
    admission.offer(ticket("a", 1.0))
    with pytest.raises(DuplicateRequest):
        admission.offer(ticket("a", 1.0))
    admission.next_ready()
    with pytest.raises(DuplicateRequest):
        admission.offer(ticket("a", 1.0))
    admission.done(RequestId("a"))
    admission.offer(ticket("a", 1.0))
    assert drain(admission) == ["a"]


def test_a_full_queue_says_when_to_come_back_from_the_measured_rate() -> None:
    clock = ManualClock()
    admission = Admission(AdmissionLimits(max_in_flight=1, max_queued=2), clock)
    admission.offer(ticket("r0", 1.0))
    running = admission.next_ready()
    admission.offer(ticket("r1", 1.0))
    admission.offer(ticket("r2", 1.0))
    for i in range(3, 12):  # one completion every two seconds, never idle
        assert running is not None
        clock.advance(2.0)
        admission.done(running.request_id)
        running = admission.next_ready()
        admission.offer(ticket(f"r{i}", 1.0, clock.now_s()))
    with pytest.raises(Overloaded) as caught:
        admission.offer(ticket("late", 1.0, clock.now_s()))
    assert caught.value.retry_after_s == pytest.approx(2.0 * 3)


def test_a_full_queue_of_one_tenant_makes_room_for_another() -> None:
    admission = Admission(AdmissionLimits(max_in_flight=1, max_queued=4), ManualClock())
    admission.offer(ticket("running", 1.0, tenant="greedy"))
    admission.next_ready()
    for i in range(4):
        assert admission.offer(ticket(f"g{i}", 1.0 + i, tenant="greedy")) is None
    displaced = admission.offer(ticket("m0", 50.0, tenant="modest"))
    assert displaced is not None
    assert displaced.request_id == "g3"
    admission.check()
    with pytest.raises(Overloaded):
        admission.offer(ticket("g9", 9.0, tenant="greedy"))
    shorter = admission.offer(ticket("g-short", 0.1, tenant="greedy"))
    assert shorter is not None
    assert shorter.request_id == "g2"


@given(weights=st.lists(st.integers(1, 5), min_size=2, max_size=4), seed=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_tenants_that_always_wait_share_by_weight(weights: list[int], seed: int) -> None:
    rng = random.Random(seed)
    names = [f"t{i}" for i in range(len(weights))]
    admission = Admission(
        AdmissionLimits(max_in_flight=1, max_queued=10_000), ManualClock(), weights=dict(zip(names, weights, strict=True))
    )
    served = dict.fromkeys(names, 0.0)
    count = 0
    for name in names:
        for _ in range(300):
            admission.offer(ticket(f"r{count}", rng.uniform(0.1, 1.0), tenant=name))
            count += 1
    for _ in range(250):
        entered = admission.next_ready()
        assert entered is not None
        served[entered.tenant] += entered.cost_s
        admission.done(entered.request_id)
    share = [served[name] / weight for name, weight in zip(names, weights, strict=True)]
    assert max(share) - min(share) <= 2.0, "start-time fair queueing lets no tenant lead by more than a request each"


@given(seed=st.integers(0, 10_000), aging=st.floats(0.05, 1.0), cost=st.floats(0.5, 20.0))
@settings(max_examples=60, deadline=None)
def test_overtaken_only_by_those_that_arrive_within_cost_over_aging(seed: int, aging: float, cost: float) -> None:
    rng = random.Random(seed)
    clock = ManualClock()
    admission = Admission(AdmissionLimits(max_in_flight=1, max_queued=10_000, aging=aging), clock)
    admission.offer(ticket("long", cost, 0.0))
    arrived = {"long": 0.0}
    for i in range(400):
        clock.advance(rng.uniform(0, 2 * cost / aging / 100))
        name = f"s{i}"
        arrived[name] = clock.now_s()
        admission.offer(ticket(name, rng.uniform(0.0, 0.2), clock.now_s()))
    order = drain(admission)
    before = order[: order.index("long")]
    assert all(arrived[name] <= cost / aging for name in before)


def test_priority_is_a_head_start_not_a_right_to_starve() -> None:
    limits = AdmissionLimits(max_in_flight=1, aging=0.1, priority_s=10.0)
    admission = Admission(limits, ManualClock())
    admission.offer(ticket("plain", 1.0, 0.0))
    admission.offer(ticket("urgent", 1.5, 0.0, priority=1))
    admission.offer(ticket("urgent but later", 1.0, 20.0, priority=1))
    assert drain(admission) == ["urgent", "plain", "urgent but later"]


def test_the_queue_gives_back_those_that_waited_too_long() -> None:
    clock = ManualClock()
    admission = Admission(AdmissionLimits(max_wait_s=5.0), clock)
    admission.offer(ticket("old", 1.0, clock.now_s()))
    clock.advance(5.1)
    admission.offer(ticket("new", 1.0, clock.now_s()))
    assert [t.request_id for t in admission.expire()] == ["old"]
    assert drain(admission) == ["new"]


@pytest.mark.parametrize("seed", range(8))
def test_random_walk(seed: int) -> None:
    rng = random.Random(seed)
    clock = ManualClock()
    limits = AdmissionLimits(max_in_flight=rng.randint(1, 4), max_queued=rng.randint(0, 12), max_wait_s=20.0)
    admission = Admission(limits, clock, weights={"t0": 3.0})
    queued: set[RequestId] = set()
    flying: set[RequestId] = set()
    for i in range(1500):
        clock.advance(rng.random())
        move = rng.random()
        if move < 0.5:
            new = ticket(f"r{i}", rng.expovariate(1.0), clock.now_s(), f"t{rng.randint(0, 3)}", rng.randint(-1, 1))
            refused = None
            try:
                displaced = admission.offer(new)
            except Overloaded as error:
                refused, displaced = error, None
            if refused is not None:
                assert len(queued) >= limits.max_queued
                assert 0 < refused.retry_after_s <= limits.max_wait_s
            else:
                queued.add(new.request_id)
                if displaced is not None:
                    queued.remove(displaced.request_id)
        elif move < 0.75:
            entered = admission.next_ready(lambda _: rng.random() < 0.8)
            if entered is not None:
                queued.remove(entered.request_id)
                flying.add(entered.request_id)
        elif move < 0.95 and (queued or flying):
            gone = rng.choice(sorted(queued | flying))
            admission.done(gone)
            queued.discard(gone)
            flying.discard(gone)
        else:
            queued -= {t.request_id for t in admission.expire()}
        admission.check()
        assert (admission.queued, admission.in_flight) == (len(queued), len(flying))
        assert len(flying) <= limits.max_in_flight
        assert len(queued) <= max(limits.max_queued, 1)
    for name in sorted(queued | flying):
        admission.done(name)
    admission.check()
    assert (admission.queued, admission.in_flight) == (0, 0)


def test_limits_that_cannot_be_are_refused_and_shares_round_up() -> None:
    assert AdmissionLimits(max_in_flight=24).shared_by(5).max_in_flight == 5
    for bad in ({"max_in_flight": 0}, {"max_queued": -1}, {"aging": 0.0}, {"priority_s": -1.0}, {"max_wait_s": 0.0}):
        with pytest.raises(ValueError, match="admission needs"):
            AdmissionLimits(**bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight"):
        Admission(AdmissionLimits(), ManualClock(), weights={"t": 0.0})

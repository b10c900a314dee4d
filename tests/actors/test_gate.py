"""Waiting for a turn: places come back on every path, and nobody waits once a place is free."""

from __future__ import annotations

import asyncio
import random

import pytest

from actors.gate import Gate
from cpd_ray.clock import ManualClock
from cpd_ray.errors import Overloaded, Unavailable
from cpd_ray.ids import RequestId
from placement.admission import Admission, AdmissionLimits, Ticket


def ticket(name: str, clock: ManualClock, cost_s: float = 1.0) -> Ticket:
    return Ticket(RequestId(name), cost_s, clock.now_s())


def gate_of(clock: ManualClock, may_enter=lambda _: True, **limits: float):  # type: ignore[no-untyped-def]
    admission = Admission(AdmissionLimits(**limits), clock)  # type: ignore[arg-type]
    return Gate(admission, may_enter), admission


async def turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_place_is_given_to_the_next_when_its_holder_leaves() -> None:
    clock = ManualClock()
    gate, admission = gate_of(clock, max_in_flight=1)
    entered: list[str] = []
    leave = asyncio.Event()

    async def request(name: str) -> None:
        async with gate.admit(ticket(name, clock)):
            entered.append(name)
            if name == "a":
                await leave.wait()

    tasks = [asyncio.create_task(request(n)) for n in "ab"]
    await turns()
    assert entered == ["a"]
    assert (gate.in_flight, gate.queued) == (1, 1)
    leave.set()
    await asyncio.gather(*tasks)
    assert entered == ["a", "b"]
    assert (gate.in_flight, gate.queued) == (0, 0)
    admission.check()


async def test_a_full_queue_turns_away_and_the_queue_survives() -> None:
    clock = ManualClock()
    gate, _ = gate_of(clock, max_in_flight=1, max_queued=1)
    hold = asyncio.Event()

    async def request(name: str) -> None:
        async with gate.admit(ticket(name, clock)):
            await hold.wait()

    first, second = (asyncio.create_task(request(n)) for n in "ab")
    await turns()
    with pytest.raises(Overloaded) as caught:
        async with gate.admit(ticket("c", clock, cost_s=9.0)):
            pass
    assert caught.value.retry_after_s > 0
    hold.set()
    await asyncio.gather(first, second)
    assert (gate.in_flight, gate.queued) == (0, 0)


async def test_who_waits_too_long_is_turned_away_by_a_tick() -> None:
    clock = ManualClock()
    gate, _ = gate_of(clock, may_enter=lambda _: False, max_wait_s=5.0)
    waiting = asyncio.create_task(gate.admit(ticket("a", clock)).__aenter__())
    await turns()
    clock.advance(4.0)
    gate.tick()
    await turns()
    assert not waiting.done()
    clock.advance(2.0)
    gate.tick()
    with pytest.raises(Overloaded, match="too long"):
        await waiting
    assert gate.queued == 0


async def test_an_error_of_the_reservation_is_its_own_requests_alone() -> None:
    clock = ManualClock()

    def may_enter(asked: Ticket) -> bool:
        if asked.request_id == "bad":
            raise Unavailable("no decode worker is left")
        return True

    gate, admission = gate_of(clock, may_enter, max_in_flight=1)
    hold = asyncio.Event()

    async def request(name: str) -> str:
        async with gate.admit(ticket(name, clock)):
            await hold.wait()
            return name

    tasks = [asyncio.create_task(request(n)) for n in ("a", "bad", "c")]
    await turns()
    hold.set()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    assert done[0] == "a"
    assert isinstance(done[1], Unavailable)
    assert done[2] == "c"
    admission.check()


async def test_random_arrivals_cancellations_and_refusals_leave_nothing() -> None:
    rng = random.Random(7)
    clock = ManualClock()
    gate, admission = gate_of(clock, lambda _: rng.random() < 0.8, max_in_flight=3, max_queued=8, max_wait_s=20.0)
    peak = 0

    async def request(name: str) -> None:
        nonlocal peak
        async with gate.admit(ticket(name, clock, rng.random())):
            peak = max(peak, gate.in_flight)
            for _ in range(rng.randrange(5)):
                await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    for i in range(400):
        tasks.append(asyncio.create_task(request(str(i))))
        if rng.random() < 0.2:
            rng.choice(tasks).cancel()
        await asyncio.sleep(0)
        clock.advance(rng.random())
        gate.tick()
        admission.check()
    while any(not t.done() for t in tasks):
        gate.tick()
        await asyncio.sleep(0)
    kinds = {type(r) for r in await asyncio.gather(*tasks, return_exceptions=True)}
    assert kinds <= {type(None), Overloaded, asyncio.CancelledError}
    assert peak <= 3
    assert (gate.in_flight, gate.queued) == (0, 0)

"""Asking those who may not answer, waiting for what can't be stopped, and measuring what came."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpd_ray.clock import ManualClock
from cpd_ray.errors import KVError, PeerGone, SlabFull
from kv.patience import Patience
from kv.rates import Rates
from kv.waiting import heed, outlast


async def answer() -> int:
    return 7


async def silence() -> int:
    await asyncio.Event().wait()
    return 0


async def gone() -> int:
    raise PeerGone("dead")


async def full() -> int:
    raise SlabFull("full")


@pytest.mark.parametrize("fault", [silence, gone])
async def test_who_does_not_answer_is_left_alone_for_a_while(fault: object) -> None:
    clock = ManualClock()
    patience = Patience(clock, answer_s=0.01, alone_s=1.0)
    assert await patience.ask("a", answer) == 7
    with pytest.raises(PeerGone):
        await patience.ask("a", fault)  # type: ignore[arg-type]
    with pytest.raises(PeerGone, match="a moment ago"):
        await patience.ask("a", answer)
    assert await patience.ask("b", answer) == 7, "others are asked"
    assert await patience.ask("a", answer, insist=True) == 7
    assert await patience.ask("a", answer) == 7, "it has answered"
    with pytest.raises(PeerGone):
        await patience.ask("a", fault)  # type: ignore[arg-type]
    clock.advance(1.0)
    assert await patience.ask("a", answer) == 7


async def test_a_refusal_is_an_answer() -> None:
    patience = Patience(ManualClock())
    with pytest.raises(SlabFull):
        await patience.ask("a", full)
    assert await patience.ask("a", answer) == 7


async def test_what_is_told_is_heard_or_not_but_never_raises() -> None:
    patience = Patience(ManualClock(), answer_s=0.01)
    heard: list[int] = []

    async def hear() -> None:
        heard.append(1)

    patience.tell("a", hear)
    patience.tell("b", full)
    patience.tell("c", silence)
    await patience.drain()
    assert heard == [1]


async def test_a_bug_in_a_call_is_not_taken_for_silence() -> None:
    async def bug() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Patience(ManualClock()).ask("a", bug)


async def test_outlast_waits_through_cancellation() -> None:
    thing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    told: list[str] = []
    waiting = asyncio.ensure_future(outlast(thing, on_cancel=lambda: told.append("stop")))
    for count in (1, 2):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert len(told) == count
        assert not waiting.done()
    thing.set_result(None)
    assert await waiting is True


async def test_outlast_gives_up_in_time_and_leaves_the_thing_alone() -> None:
    thing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    assert await outlast(thing, 0.0) is False
    assert await outlast(thing, 0.001) is False
    assert not thing.done()
    thing.set_exception(KVError("late"))
    heed(thing)
    assert await outlast(thing, 5.0) is False


def test_a_rate_starts_at_its_prior_and_follows_what_comes() -> None:
    rates = Rates({"node": 4e9, "cluster": 1e9})
    assert rates.bytes_per_s() == pytest.approx({"node": 4e9, "cluster": 1e9})
    for _ in range(50):
        rates.observe("node", 1 << 30, (1 << 30) / 2e9)
    assert rates.bytes_per_s()["node"] == pytest.approx(2e9, rel=0.01)
    assert rates.bytes_per_s()["cluster"] == pytest.approx(1e9)
    rates.observe("cluster", 0, 1.0)
    rates.observe("cluster", 100, 0.0)
    assert rates.bytes_per_s()["cluster"] == pytest.approx(1e9)


@given(st.lists(st.tuples(st.integers(1, 1 << 32), st.floats(1e-6, 1e3)), min_size=1, max_size=30))
def test_a_rate_lies_between_the_slowest_and_the_fastest_seen(seen: list[tuple[int, float]]) -> None:
    rates = Rates({"node": 1e9})
    for nbytes, seconds in seen:
        rates.observe("node", nbytes, seconds)
    speeds = [1e9, *(nbytes / seconds for nbytes, seconds in seen)]
    assert min(speeds) * 0.999 <= rates.bytes_per_s()["node"] <= max(speeds) * 1.001

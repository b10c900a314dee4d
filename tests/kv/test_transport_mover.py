"""The mover's thread: parts in turn, errors carried to whoever reads, and a read over only when nothing of it moves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait

import pytest

from cpd_ray.clock import SystemClock
from cpd_ray.errors import PeerGone, TransferFailed
from kv.transport.mover import POSTED_AHEAD, Mover, Part, Read

PATIENCE_S = 30


class Engine:
    """A scripted engine: parts end when the test says so, and tell what was done to them."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ended: set[str] = set()
        self.broken: dict[str, Exception] = {}
        self.changed = threading.Condition()

    def say(self, event: str) -> None:
        with self.changed:
            self.events.append(event)
            self.changed.notify_all()

    def until(self, holds: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(holds, PATIENCE_S), self.events

    def end(self, *names: str) -> None:
        with self.changed:
            self.ended.update(names)

    def parts(self, *names: str, at_once: bool = False) -> Iterator[Part]:
        for name in names:
            yield ScriptedPart(self, name, at_once)


class ScriptedPart:
    def __init__(self, engine: Engine, name: str, at_once: bool) -> None:
        self._engine = engine
        self._name = name
        self._at_once = at_once
        self._released = False

    def post(self) -> bool:
        self._engine.say(f"post {self._name}")
        return self._at_once or self.poll()

    def poll(self) -> bool:
        with self._engine.changed:
            if self._name in self._engine.broken:
                raise self._engine.broken[self._name]
            return self._name in self._engine.ended

    def release(self) -> None:
        assert not self._released
        self._released = True
        self._engine.say(f"release {self._name}")


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def mover() -> Iterator[Mover]:
    made = Mover("test", concurrent_reads=2, clock=SystemClock())
    yield made
    made.close(lambda: None)


def test_a_read_is_over_when_all_its_parts_have_ended(engine: Engine, mover: Mover) -> None:
    read = mover.submit(engine.parts("a", "b", "c"))
    engine.until(lambda: "post b" in engine.events)
    assert "post c" not in engine.events, f"{POSTED_AHEAD} parts at a time"
    assert not read.over
    engine.end("a")
    engine.until(lambda: "post c" in engine.events)
    engine.end("b", "c")
    read.done.result(PATIENCE_S)
    assert sorted(e for e in engine.events if e.startswith("release")) == ["release a", "release b", "release c"]


def test_parts_that_end_at_once_take_turns(engine: Engine, mover: Mover) -> None:
    started = threading.Event()
    mover._inbox.put(lambda: started.wait(PATIENCE_S))  # both reads are there before either begins
    first = mover.submit(engine.parts("a1", "a2", "a3", at_once=True))
    second = mover.submit(engine.parts("b1", at_once=True))
    started.set()
    wait([first.done, second.done], PATIENCE_S)
    assert engine.events.index("post b1") < engine.events.index("post a2"), "the short read is not stuck behind the long one"


def test_an_empty_read_is_over(engine: Engine, mover: Mover) -> None:
    mover.submit(engine.parts()).done.result(PATIENCE_S)


def test_an_error_ends_the_read_when_the_other_parts_have_ended(engine: Engine, mover: Mover) -> None:
    read = mover.submit(engine.parts("a", "b", "c"))
    engine.until(lambda: "post b" in engine.events)
    with engine.changed:
        engine.broken["a"] = PeerGone("gone")
    engine.until(lambda: "release a" in engine.events)
    assert not read.over, "b still moves"
    engine.end("b")
    with pytest.raises(PeerGone):
        read.done.result(PATIENCE_S)
    assert "post c" not in engine.events


def test_an_error_in_making_a_part_is_the_reads(engine: Engine, mover: Mover) -> None:
    def broken() -> Iterator[Part]:
        yield ScriptedPart(engine, "a", False)
        raise TransferFailed("no such memory")

    read = mover.submit(broken())
    engine.until(lambda: "post a" in engine.events)
    engine.end("a")
    with pytest.raises(TransferFailed, match="no such memory"):
        read.done.result(PATIENCE_S)


def test_a_stopped_read_posts_nothing_more_and_is_over_when_it_has_settled(engine: Engine, mover: Mover) -> None:
    read = mover.submit(engine.parts("a", "b", "c"))
    engine.until(lambda: "post b" in engine.events)
    read.stop()
    engine.end("a")
    engine.until(lambda: "release a" in engine.events)
    assert not read.over
    engine.end("b")
    with pytest.raises(TransferFailed, match="stopped"):
        read.done.result(PATIENCE_S)
    assert "post c" not in engine.events


def test_reads_wait_for_their_turn_but_not_for_lingering_ones(engine: Engine, mover: Mover) -> None:
    slow = [mover.submit(engine.parts(f"slow{i}")) for i in range(2)]
    engine.until(lambda: "post slow1" in engine.events)
    third = mover.submit(engine.parts("third", at_once=True))
    mover.call(lambda: None)
    assert "post third" not in engine.events
    slow[0].stop()
    third.done.result(PATIENCE_S)
    assert not slow[0].over
    engine.end("slow0", "slow1")
    wait([read.done for read in slow], PATIENCE_S)


def test_calls_run_on_the_thread_and_raise_here(mover: Mover) -> None:
    assert mover.call(threading.current_thread) is not threading.current_thread()
    with pytest.raises(ZeroDivisionError):
        mover.call(lambda: 1 // 0)


def test_close_lets_go_before_the_teardown_and_fails_what_was_under_way(engine: Engine) -> None:
    mover = Mover("test", concurrent_reads=2, clock=SystemClock())
    reads = [mover.submit(engine.parts(f"p{i}", f"q{i}")) for i in range(4)]
    engine.until(lambda: "post q1" in engine.events)
    mover.close(lambda: engine.say("teardown"))
    for read in reads:
        with pytest.raises(TransferFailed, match="closed"):
            read.done.result(PATIENCE_S)
    assert engine.events[-1] == "teardown"
    assert {e for e in engine.events if e.startswith("release")} == {"release p0", "release q0", "release p1", "release q1"}
    mover.close(lambda: engine.say("again"))
    assert engine.events[-1] == "teardown"
    with pytest.raises(TransferFailed):
        mover.submit(engine.parts("late"))
    with pytest.raises(TransferFailed):
        mover.call(lambda: None)


def test_the_engine_makes_progress_also_when_nothing_is_asked() -> None:
    turns = threading.Semaphore(0)
    mover = Mover("test", concurrent_reads=1, clock=SystemClock(), progress=turns.release)
    for _ in range(6):
        assert turns.acquire(timeout=PATIENCE_S)
    mover.close(lambda: None)


def test_a_read_can_be_abandoned_once_only() -> None:
    read = Read(iter(()))
    read.abandon()
    read.abandon()
    assert isinstance(read.done.exception(), TransferFailed)

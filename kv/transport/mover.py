"""The thread that drives a foreign transfer engine: reads cut in parts, posted in turn, polled until they end.

Owns the order of posting and the knowledge of what still moves; knows no engine (a `Part` wraps one transfer of it).
Invariant: a read is over (`Read.over`) only when none of its posted parts moves any more; parts are released by then, and only then.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Protocol, TypeVar

from cpd_ray.clock import Clock
from cpd_ray.errors import TransferFailed

T = TypeVar("T")

POSTED_AHEAD = 2
"""Parts of one read in flight at a time, where the engine is asynchronous."""
SHORTEST_PAUSE_S = 50e-6
LONGEST_PAUSE_S = 4e-3
IDLE_PAUSE_S = 10e-3
"""Without a read of ours: what a newcomer's connection, or a TCP reader's first byte, may wait for us."""
BUSY_S = 15e-6
"""An engine that takes longer than this to make progress had something to do, and is asked again soon. (Asked for nothing, NIXL takes 1-2 us;
the first time after a pause 20-60, for want of warm caches, which is why it is the second time that counts.)"""


class Part(Protocol):
    """One transfer of the engine. `post` and `poll` return True once it has ended well and raise once it has ended otherwise."""

    def post(self) -> bool: ...

    def poll(self) -> bool: ...

    def release(self) -> None: ...


class Read:
    """A read in the thread's hands. `done` resolves when it is over: None, or the error that ended it."""

    def __init__(self, parts: Iterator[Part]) -> None:
        self.done: Future[None] = Future()
        self._parts = parts
        self._posted: list[Part] = []
        self._exhausted = False
        self._stopped = False
        self._error: Exception | None = None

    @property
    def over(self) -> bool:
        return self.done.done()

    @property
    def lingering(self) -> bool:
        """Only waiting for what was posted: it takes no other read's turn."""
        return self._stopped or self._error is not None

    def stop(self) -> None:
        """Post no further part: the read fails once those under way have ended."""
        self._stopped = True

    def drop_parts(self) -> None:
        """The engine is about to go: let go of what belongs to it."""
        for part in self._posted:
            part.release()
        self._posted.clear()
        self._parts = iter(())

    def abandon(self) -> None:
        """The engine is gone, and with it all that moved."""
        if not self.over:
            self.done.set_exception(self._error or TransferFailed("the transport was closed"))

    def step(self) -> bool:
        """Poll what is posted, post one more part when it is time; True when anything ended or began."""
        moved = False
        for part in list(self._posted):
            if self._ended(part, part.poll):
                self._posted.remove(part)
                moved = True
        if not self.lingering and not self._exhausted and len(self._posted) < POSTED_AHEAD:
            moved = self._post_next() or moved
        if not self._posted and (self.lingering or self._exhausted):
            self._finish()
            moved = True
        return moved

    def _post_next(self) -> bool:
        try:
            part = next(self._parts, None)
        except Exception as error:  # carried to the reader by `done`
            self._error = error
            return True
        if part is None:
            self._exhausted = True
        elif not self._ended(part, part.post):
            self._posted.append(part)
        return True

    def _ended(self, part: Part, ask: Callable[[], bool]) -> bool:
        try:
            if not ask():
                return False
        except Exception as error:  # carried to the reader by `done`
            self._error = self._error or error
        part.release()
        return True

    def _finish(self) -> None:
        if self._error is not None:
            self.done.set_exception(self._error)
        elif not self._exhausted:
            self.done.set_exception(TransferFailed("the read was stopped before its end; nothing moves any more"))
        else:
            self.done.set_result(None)


class Mover:
    """One daemon thread. At most `concurrent_reads` take turns, others wait in order; lingering ones are watched besides.

    `progress` lets the engine do what it has to do, for our reads and for those of others from us: it is called in every round, and
    every few milliseconds when nothing happens. An engine's own progress thread would keep a core busy, which costs more than it brings
    where cores compute."""

    def __init__(self, name: str, *, concurrent_reads: int, clock: Clock, progress: Callable[[], None] | None = None) -> None:
        self._concurrent_reads = concurrent_reads
        self._clock = clock
        self._progress = progress
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._reads: deque[Read] = deque()
        self._closing = False
        self._moved_s = 0.0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, do: Callable[[], T]) -> T:
        """Run `do` on the thread and wait for it. Not from the thread itself."""
        assert threading.current_thread() is not self._thread, "the thread would wait for itself"
        result: Future[T] = Future()

        def run() -> None:
            try:
                result.set_result(do())
            except BaseException as error:  # carried to the caller by `result`
                result.set_exception(error)

        if self._closing:
            raise TransferFailed("the transport is closed")
        self._inbox.put(run)
        return result.result()

    def submit(self, parts: Iterator[Part]) -> Read:
        """Begin a read; `parts` is drawn from on the thread."""
        if self._closing:
            raise TransferFailed("the transport is closed")
        read = Read(parts)
        self._inbox.put(lambda: self._reads.append(read))
        return read

    def close(self, teardown: Callable[[], None]) -> None:
        """Stop after the present step, run `teardown` (which must end all that moves) on the thread, fail what was under way. Closing
        again does nothing."""
        if self._closing:
            return

        def last() -> None:
            self._closing = True
            try:
                for read in self._reads:
                    read.drop_parts()
                teardown()
            finally:
                for read in self._reads:
                    read.abandon()
                self._reads.clear()

        try:
            self.call(last)
        finally:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            try:
                self._inbox.get(timeout=self._pause_s())()
                while not self._closing:
                    self._inbox.get_nowait()()
            except queue.Empty:
                pass
            if not self._closing:
                busy = self._make_progress()
                if self._step() or busy:
                    self._moved_s = self._clock.now_s()
        self._drain()

    def _make_progress(self) -> bool:
        """Give the engine its turn; True when it had something to do."""
        if self._progress is None:
            return False
        self._progress()
        begun_s = self._clock.now_s()
        self._progress()
        return self._clock.now_s() - begun_s > BUSY_S

    def _step(self) -> bool:
        moved = False
        turns = self._concurrent_reads
        for read in list(self._reads):
            if not read.lingering:
                if not turns:
                    continue
                turns -= 1
            moved = read.step() or moved
        if moved:
            self._reads = deque(read for read in self._reads if not read.over)
        return moved

    def _pause_s(self) -> float | None:
        """How long to wait for orders: a twentieth of the time since something last moved, within limits."""
        if not self._reads and self._progress is None:
            return None
        idle_s = self._clock.now_s() - self._moved_s
        return (
            0.0
            if idle_s < SHORTEST_PAUSE_S
            else min(max(idle_s / 20, SHORTEST_PAUSE_S), LONGEST_PAUSE_S if self._reads else IDLE_PAUSE_S)
        )

    def _drain(self) -> None:
        """Fail what was handed in while the thread was closing."""
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                break
        for read in self._reads:
            read.abandon()

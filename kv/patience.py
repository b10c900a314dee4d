"""Asking actors that may be dead, frozen or slow, without letting them hold up a request.

Owns how long an answer may take and who is left alone for now. Invariant: a call ends within `answer_s`, and whoever did not answer costs
the next callers nothing until `alone_s` have passed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from cpd_ray.clock import Clock
from cpd_ray.errors import KVError, PeerGone

T = TypeVar("T")


class Patience:
    """By name of who is asked."""

    def __init__(self, clock: Clock, *, answer_s: float = 2.0, alone_s: float = 1.0) -> None:
        self._clock = clock
        self._answer_s = answer_s
        self._alone_s = alone_s
        self._alone_until_s: dict[str, float] = {}
        self._beside: set[asyncio.Task[None]] = set()

    async def ask(self, who: str, call: Callable[[], Awaitable[T]], *, insist: bool = False) -> T:
        """The call's answer; raises PeerGone when none comes in time or, unless we `insist`, came lately."""
        if not insist and self._clock.now_s() < self._alone_until_s.get(who, 0.0):
            raise PeerGone(f"{who} did not answer a moment ago")
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await call()
        except TimeoutError as error:
            self._leave_alone(who)
            raise PeerGone(f"{who} does not answer") from error
        except PeerGone:
            self._leave_alone(who)
            raise
        self._alone_until_s.pop(who, None)
        return answer

    def tell(self, who: str, call: Callable[[], Awaitable[Any]]) -> None:
        """Make the call beside whatever comes next. A refusal is nobody's loss: what was to be ended lapses, what was a hint is missed."""
        task = asyncio.get_running_loop().create_task(self._told(who, call), name=f"tell {who}")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def drain(self) -> None:
        """Return when everything that was told has been heard, or can't be."""
        while self._beside:
            await asyncio.wait(self._beside)

    async def _told(self, who: str, call: Callable[[], Awaitable[Any]]) -> None:
        with contextlib.suppress(KVError):
            await self.ask(who, call)

    def _leave_alone(self, who: str) -> None:
        self._alone_until_s[who] = self._clock.now_s() + self._alone_s

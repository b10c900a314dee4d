"""Waiting for what can't be interrupted: a copy in a thread, a transfer on a link.

Whoever lends memory to such a thing must know when it is over, even when its own caller has left. Invariant: `outlast` returns only
when the thing is over or the time is up, however often it is cancelled meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


async def outlast(
    thing: asyncio.Future[Any], timeout_s: float | None = None, *, on_cancel: Callable[[], None] | None = None
) -> bool:
    """Wait until `thing` is done, or `timeout_s` have passed; True when the waiting task was cancelled meanwhile (it should then
    raise CancelledError itself, once it has put things in order). Does not cancel `thing` nor look at its result; `on_cancel` may
    ask it to end sooner."""
    loop = asyncio.get_running_loop()
    until_s = None if timeout_s is None else loop.time() + timeout_s
    cancelled = False
    while not thing.done():
        left_s = None if until_s is None else until_s - loop.time()
        if left_s is not None and left_s <= 0:
            break
        try:
            await asyncio.wait({thing}, timeout=left_s)
        except asyncio.CancelledError:
            cancelled = True
            if on_cancel is not None:
                on_cancel()
    return cancelled


def heed(thing: asyncio.Future[Any]) -> None:
    """Done-callback for a future that perhaps nobody awaits any more: its error, if any, is somebody's who has left."""
    if not thing.cancelled():
        thing.exception()

"""Waiting to be admitted, over `placement.admission`: the asyncio side of the queue.

Owns the futures of those who wait. Decides nothing. Invariant: each ticket that was let in gives its place back exactly once, on
every path, and no one is left waiting once a place is free and its turn has come.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from cpd_ray.errors import Overloaded
from cpd_ray.ids import RequestId
from placement.admission import Admission, AdmissionLimits, Ticket


class Gate:
    """`may_enter`: asked of the ticket whose turn it is; it may reserve room for decoding, and is asked again at each `nudge`."""

    def __init__(self, admission: Admission, may_enter: Callable[[Ticket], bool]) -> None:
        self._admission = admission
        self._may_enter = may_enter
        self._waiting: dict[RequestId, asyncio.Future[None]] = {}

    @property
    def in_flight(self) -> int:
        return self._admission.in_flight

    @property
    def queued(self) -> int:
        return self._admission.queued

    def reconfigure(self, limits: AdmissionLimits) -> None:
        """New limits from now on."""
        self._admission.reconfigure(limits)
        self.nudge()

    @contextlib.asynccontextmanager
    async def admit(self, ticket: Ticket) -> AsyncIterator[None]:
        """Inside, the request is in flight. Raises Overloaded (full queue, displaced, waited too long), and what `may_enter` raises."""
        displaced = self._admission.offer(ticket)
        if displaced is not None:
            self._turn_away(displaced, "too many requests are waiting")
        turn = asyncio.get_running_loop().create_future()
        self._waiting[ticket.request_id] = turn
        try:
            self.nudge()
            await turn
            yield
        finally:
            self._waiting.pop(ticket.request_id, None)
            self._admission.done(ticket.request_id)
            self.nudge()

    def nudge(self) -> None:
        """Something changed (a place, room for decoding, a worker): let in whoever's turn it is."""
        while True:
            asked: list[Ticket] = []

            def ask(ticket: Ticket, asked: list[Ticket] = asked) -> bool:
                asked.append(ticket)
                return self._may_enter(ticket)

            try:
                ready = self._admission.next_ready(ask)
            except Exception as error:  # whatever the reservation raised is the answer of the one it was made for
                if not asked:
                    raise
                self._fail(asked[0].request_id, error)
                continue
            if ready is None:
                return
            turn = self._waiting.get(ready.request_id)
            if turn is None or turn.done():
                self._admission.done(ready.request_id)
            else:
                turn.set_result(None)

    def tick(self) -> None:
        """Periodic: send away who waited too long, and look again."""
        for late in self._admission.expire():
            self._turn_away(late, "the request waited too long for its turn")
        self.nudge()

    def _turn_away(self, ticket: Ticket, why: str) -> None:
        self._fail(ticket.request_id, Overloaded(why, retry_after_s=self._admission.retry_after_s()))

    def _fail(self, request_id: RequestId, error: Exception) -> None:
        self._admission.done(request_id)
        turn = self._waiting.get(request_id)
        if turn is not None and not turn.done():
            turn.set_exception(error)

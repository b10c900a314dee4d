"""The transport between owners that live in one process: for tests, the simulator, and a machine without NIXL.

Owns a switchboard of who is there; the copies run in the caller's executor. Invariant: what a real link can do to a reader (the peer
dies, freezes, restarts) can be brought about here, and shows as the same errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cpd_ray.errors import PeerGone
from cpd_ray.messages import PeerDescriptor, RegionRef
from kv.copying import copy_spans
from kv.memory import SlottedMemory
from kv.transport.base import Span, StillMoving
from kv.transport.regions import ReadPlan, RegionBook
from kv.waiting import heed, outlast


class Switchboard:
    """Who is reachable. `freeze` and `kill` do to a peer what SIGSTOP and SIGKILL do to a process."""

    def __init__(self) -> None:
        self._members: dict[str, InProcessTransport] = {}
        self._frozen: dict[str, asyncio.Event] = {}

    def join(self, member: InProcessTransport) -> None:
        """A newcomer takes the place of an earlier one of its name."""
        self._members[member.peer] = member

    def leave(self, member: InProcessTransport) -> None:
        if self._members.get(member.peer) is member:
            del self._members[member.peer]
            self.thaw(member.peer)

    def find(self, peer: str) -> InProcessTransport:
        """Raises PeerGone when nobody of that name is there."""
        member = self._members.get(peer)
        if member is None:
            raise PeerGone(f"{peer} is dead")
        return member

    def freeze(self, peer: str) -> None:
        self._frozen.setdefault(peer, asyncio.Event())

    def thaw(self, peer: str) -> None:
        thawed = self._frozen.pop(peer, None)
        if thawed is not None:
            thawed.set()

    def kill(self, peer: str) -> None:
        self._members.pop(peer, None)
        self.thaw(peer)

    async def until_thawed(self, peer: str) -> None:
        while peer in self._frozen:
            await self._frozen[peer].wait()


class MovingInProcess(StillMoving):
    """`copy` is the task that may still write."""

    def __init__(self, message: str, copy: asyncio.Task[None]) -> None:
        super().__init__(message)
        self._copy = copy

    def settled(self) -> bool:
        return self._copy.done()


class InProcessTransport:
    name = "inprocess"

    def __init__(self, board: Switchboard, peer: str, layout: bytes) -> None:
        self.peer = peer
        self._board = board
        self._book = RegionBook(peer, self.name, layout)
        self._members: dict[str, InProcessTransport] = {}
        self._copies: set[asyncio.Task[None]] = set()
        self._waiting: dict[asyncio.Task[None], str] = {}
        board.join(self)

    def register(self, region: str, memory: SlottedMemory, generation: int) -> RegionRef:
        self._book.add(region, memory, generation)
        return RegionRef(self.peer, region, generation)

    def describe(self) -> PeerDescriptor:
        return self._book.describe(b"")

    def connect(self, peer: PeerDescriptor) -> None:
        member = self._board.find(peer.peer)
        self._book.learn(peer)
        self._members[peer.peer] = member

    async def read(
        self,
        source: RegionRef,
        source_slots: Sequence[int],
        into: RegionRef,
        into_slots: Sequence[int],
        *,
        timeout_s: float,
        source_span: Span | None = None,
        into_span: Span | None = None,
    ) -> None:
        plan = self._book.plan(source, source_slots, into, into_slots, source_span, into_span)
        self._origin(source)
        copy = asyncio.get_running_loop().create_task(self._copy(source, plan), name=f"read from {source.peer}")
        self._copies.add(copy)
        copy.add_done_callback(self._copies.discard)
        copy.add_done_callback(heed)
        cancelled = await outlast(copy, timeout_s)
        if not copy.done():
            raise MovingInProcess(f"a read from {source.peer} has not ended after {timeout_s} s", copy)
        if cancelled:
            raise asyncio.CancelledError
        copy.result()

    def disconnect(self, peer: str) -> None:
        self._book.forget(peer)
        self._members.pop(peer, None)
        for copy in [copy for copy, source in self._waiting.items() if source == peer]:
            copy.cancel()

    def close(self) -> None:
        self._board.leave(self)
        self._book.drop_own()
        for peer in list(self._members):
            self.disconnect(peer)

    def _origin(self, source: RegionRef) -> SlottedMemory:
        """The memory to read from, as it is at this moment."""
        member = self._members.get(source.peer)
        if member is None or self._board.find(source.peer) is not member:
            raise PeerGone(f"{source.peer} is gone")
        return member._book.own(source).memory

    async def _copy(self, source: RegionRef, plan: ReadPlan) -> None:
        await self._turn(source.peer)
        memory = self._origin(source)
        await asyncio.to_thread(
            copy_spans, memory, plan.source_slots, plan.source_span, plan.into.memory, plan.into_slots, plan.into_span
        )

    async def _turn(self, peer: str) -> None:
        """Wait while the peer is frozen. Only here may a copy be cancelled: nothing moves yet."""
        task = asyncio.current_task()
        assert task is not None
        self._waiting[task] = peer
        try:
            await self._board.until_thawed(peer)
        except asyncio.CancelledError as error:
            raise PeerGone(f"{peer} was disconnected") from error
        finally:
            del self._waiting[task]

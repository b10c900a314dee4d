"""NIXL as a transport: one-sided reads over UCX (shared memory, TCP, RDMA), from and into registered memory.

The one file that knows NIXL's API. Owns the agent, registrations and prepared descriptor lists; not the memory.
Invariant: only the mover's thread touches the agent, and nothing that a moving transfer needs is given up before it has ended: NIXL
would accept the release of an active handle, or the removal of its peer, and the late bytes would still land.

NIXL's own progress thread spins, a core for each agent; here the mover's thread drives progress, now and then when idle.
On one host `transfer()` copies before it returns; over TCP and RDMA it is asynchronous and polled. Neighbouring slots that stand together
are merged by NIXL itself (`RegionBook` sorts them so).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NotYet
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from nixl import _bindings as nixlBind
from nixl._api import nixl_agent, nixl_agent_config

from cpd_ray.clock import Clock, SystemClock
from cpd_ray.errors import PeerGone, TransferFailed
from cpd_ray.messages import PeerDescriptor, RegionDescriptor, RegionRef
from kv.memory import SlottedMemory
from kv.transport.base import Span, StillMoving
from kv.transport.mover import Mover, Part, Read
from kv.transport.regions import ReadPlan, RegionBook
from kv.waiting import heed, outlast

PART_BYTES = 64 << 20
"""A read is posted in parts of about this size, in turn with other reads: a short one waits milliseconds behind a long one, and a late
one stops at the end of a part."""
ACKNOWLEDGE_S = 0.05
"""How long a late read may take to say that it has stopped, before its destination counts as still being written."""
CONNECT_S = 5.0
SCRATCH_BYTES = 64

_ERRORS = tuple(kind for kind in vars(nixlBind).values() if isinstance(kind, type) and issubclass(kind, Exception))


class State(Enum):
    """What NIXL says of a transfer."""

    DONE = "DONE"
    MOVING = "PROC"
    FAILED = "ERR"


class NixlMoving(StillMoving):
    """A read whose posted parts have not ended."""

    def __init__(self, message: str, read: Read) -> None:
        super().__init__(message)
        self._read = read

    def settled(self) -> bool:
        return self._read.over


class _Side:
    """One end of transfers: a peer's agent or a region of ours, and the descriptor lists prepared on it. Once retired, `end` is called as
    soon as no transfer needs it any more."""

    def __init__(self, name: str, end: Callable[[], None]) -> None:
        self.name = name
        self.lost = False
        self.retired = False
        self.ended = False
        self._end = end
        self._lists: dict[tuple[RegionRef, Span], Any] = {}
        self._moving = 0

    def prepared(self, ref: RegionRef, span: Span, make: Callable[[], Any]) -> Any:
        handle = self._lists.get((ref, span))
        if handle is None:
            handle = self._lists[ref, span] = make()
        return handle

    def hold(self) -> None:
        self._moving += 1

    def let_go(self) -> None:
        self._moving -= 1
        if self.retired:
            self.retire()

    def retire(self) -> None:
        self.retired = True
        if not self._moving and not self.ended:
            self.ended = True
            self.drop_lists()
            self._end()

    def revive(self) -> None:
        assert not self.ended
        self.retired = False

    def drop_lists(self) -> None:
        for handle in self._lists.values():
            handle.release()
        self._lists.clear()


class _Transfer:
    """One posted NIXL transfer: a `Part`."""

    def __init__(self, agent: Any, handle: Any, peer: _Side, own: _Side) -> None:
        self._agent = agent
        self._handle = handle
        self._sides = (peer, own)
        for side in self._sides:
            side.hold()

    def post(self) -> bool:
        return self._ask(self._agent.transfer)

    def poll(self) -> bool:
        return self._ask(self._agent.check_xfer_state)

    def release(self) -> None:
        self._handle.release()
        self._agent = self._handle = None
        for side in self._sides:
            side.let_go()

    def _ask(self, ask: Callable[[Any], str]) -> bool:
        try:
            state = State(ask(self._handle))
        except nixlBind.nixlRemoteDisconnectError as error:
            self._sides[0].lost = True
            raise PeerGone(f"{self._sides[0].name} has disconnected") from error
        except _ERRORS as error:
            raise TransferFailed(f"a transfer from {self._sides[0].name} failed") from error
        if state is State.FAILED:
            raise TransferFailed(f"a transfer from {self._sides[0].name} failed")
        return state is State.DONE


PROGRESS_REST_US = 1000
"""How long NIXL's progress thread rests when nothing moves. Its Python face leaves it at 0: a core spins in each idle process."""
_starting = threading.Lock()


class _RestingConfig(nixlBind.nixlAgentConfig):
    """NIXL's agent configuration, whose progress thread rests whatever its Python face sets."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, PROGRESS_REST_US if name == "pthrDelay" else value)


@contextlib.contextmanager
def _resting_progress_thread() -> Iterator[None]:
    """Agents started inside take `_RestingConfig`."""
    with _starting:
        usual = nixlBind.nixlAgentConfig
        nixlBind.nixlAgentConfig = _RestingConfig
        try:
            yield
        finally:
            nixlBind.nixlAgentConfig = usual


class NixlTransport:
    """`peer`: this process's name for others; its agent's name differs in each life. `layout`: see `kv.layout`.

    `connect`, `register`, `disconnect` and `close` block (a connection takes up to 0.1 s the first time): from a loop that serves, call
    them in a thread."""

    name = "nixl"

    def __init__(
        self, peer: str, layout: bytes, *, backends: Sequence[str] = ("UCX",), concurrent_reads: int = 8, clock: Clock | None = None
    ) -> None:
        self.peer = peer
        self._book = RegionBook(peer, self.name, layout)
        self._agent: Any = None
        self._mover = Mover(
            f"nixl-{peer}", concurrent_reads=concurrent_reads, clock=clock or SystemClock(), progress=self._progress
        )
        self._own: dict[str, _Side] = {}
        self._agents: dict[str, _Side] = {}  # by agent name, also those that have yet to end
        self._peers: dict[str, str] = {}  # peer -> name of its present agent
        self._agent_name = f"{peer}-{secrets.token_hex(6)}"
        self._scratch = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
        self._mover.call(lambda: self._start(list(backends)))

    def register(self, region: str, memory: SlottedMemory, generation: int) -> RegionRef:
        self._book.add(region, memory, generation)
        self._mover.call(lambda: self._register(region, memory))
        return RegionRef(self.peer, region, generation)

    def describe(self) -> PeerDescriptor:
        blob = self._mover.call(lambda: bytes(self._agent.get_agent_metadata()))
        return self._book.describe(msgspec.msgpack.encode((self._agent_name, blob)))

    def connect(self, peer: PeerDescriptor) -> None:
        """Learn a peer and read a few bytes from it. Raises LayoutMismatch, PeerGone when it does not answer, TransferFailed."""
        self._book.learn(peer)
        try:
            self._mover.call(lambda: self._meet(peer.peer, peer.metadata))
            for region in peer.regions[:1]:
                self._try_out(peer.peer, self._mover.submit(self._warm_up(peer.peer, region)))
        except Exception:
            self.disconnect(peer.peer)
            raise

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
        if not len(plan.source_slots):
            return
        read = self._mover.submit(self._parts(plan))
        ended = asyncio.wrap_future(read.done)
        ended.add_done_callback(heed)
        cancelled = await outlast(ended, timeout_s, on_cancel=read.stop)
        if not ended.done():
            read.stop()
            cancelled = await outlast(ended, ACKNOWLEDGE_S) or cancelled
        if not ended.done():
            raise NixlMoving(f"a read from {source.peer} has not ended after {timeout_s} s", read)
        if cancelled:
            raise asyncio.CancelledError
        ended.result()

    def disconnect(self, peer: str) -> None:
        self._book.forget(peer)
        self._mover.call(lambda: self._part_from(peer))

    def close(self) -> None:
        self._book.drop_own()
        self._mover.close(self._teardown)

    def _try_out(self, peer: str, read: Read) -> None:
        try:
            read.done.result(CONNECT_S)
        except NotYet as late:
            read.stop()
            raise PeerGone(f"{peer} does not answer") from late

    # -- on the mover's thread ---------------------------------------------------------------------------------------

    def _start(self, backends: list[str]) -> None:
        with _resting_progress_thread():
            self._agent = nixl_agent(self._agent_name, nixl_agent_config(enable_prog_thread=False, backends=backends))
        self._agent.register_memory([(self._scratch.ctypes.data, SCRATCH_BYTES, 0, "")], "DRAM")

    def _progress(self) -> None:
        """UCX needs our turn to answer others: to connect, and over TCP for each byte that they read. Asking for notifications gives it one."""
        if self._agent is not None:
            with contextlib.suppress(*_ERRORS):  # a peer's end is told by the reads that it concerns
                self._agent.get_new_notifs()

    def _register(self, region: str, memory: SlottedMemory) -> None:
        pieces = [(e.address, e.nbytes, e.device or 0, "") for e in memory.extents]
        registered = self._agent.register_memory(pieces, _memory_kind(memory.extents[0].device))
        old = self._own.get(region)
        self._own[region] = _Side(region, lambda: self._agent.deregister_memory(registered))
        if old is not None:
            old.retire()

    def _meet(self, peer: str, metadata: bytes) -> None:
        try:
            name, blob = msgspec.msgpack.decode(metadata, type=tuple[str, bytes])
        except msgspec.MsgspecError as error:
            raise TransferFailed(f"what {peer} says of itself can't be read") from error
        side = self._agents.get(name)
        if side is not None and side.lost:
            side.retire()
            if not side.ended:
                raise PeerGone(f"earlier reads from {peer} have not ended")
            side = None
        try:
            told = self._agent.add_remote_agent(blob)
        except _ERRORS as error:
            raise TransferFailed(f"what {peer} says of itself makes no sense to NIXL") from error
        if told.decode() != name:
            raise TransferFailed(f"{peer} says that it is another")
        if side is None:
            self._agents[name] = _Side(name, lambda: self._forget_agent(name))
        else:
            side.revive()
        if self._peers.get(peer, name) != name:
            self._part_from(peer)
        self._peers[peer] = name

    def _part_from(self, peer: str) -> None:
        name = self._peers.pop(peer, None)
        if name in self._agents:
            self._agents[name].retire()

    def _forget_agent(self, name: str) -> None:
        del self._agents[name]
        self._agent.remove_remote_agent(name)

    def _warm_up(self, peer: str, region: RegionDescriptor) -> Iterator[Part]:
        side = self._side_of(peer)
        nbytes = min(SCRATCH_BYTES, region.slot_bytes)
        into = self._agent.get_xfer_descs([(self._scratch.ctypes.data, nbytes, 0)], "DRAM")
        source = self._agent.get_xfer_descs([(region.extent_addresses[0], nbytes, region.device or 0)], _memory_kind(region.device))
        yield self._transfer(side, _Side("scratch", _nothing), lambda: self._agent.initialize_xfer("READ", into, source, side.name))

    def _parts(self, plan: ReadPlan) -> Iterator[Part]:
        """Draws up the transfers of a read, one when it is asked for."""
        peer = self._side_of(plan.source.ref.peer)
        own = self._own[plan.into.ref.region]
        source, into = plan.source, plan.into.memory
        remote = peer.prepared(source.ref, plan.source_span, partial(self._prepare_remote, peer.name, source, plan.source_span))
        local = own.prepared(plan.into.ref, plan.into_span, partial(self._prepare_own, into, plan.into_span))
        step = max(1, PART_BYTES // plan.source_span.nbytes)
        for at in range(0, len(plan.source_slots), step):
            if peer.lost or peer.retired:
                raise PeerGone(f"{plan.source.ref.peer} was disconnected")
            take = plan.source_slots[at : at + step].astype(np.int32)
            put = plan.into_slots[at : at + step].astype(np.int32)
            yield self._transfer(peer, own, partial(self._agent.make_prepped_xfer, "READ", local, put, remote, take))

    def _side_of(self, peer: str) -> _Side:
        side = self._agents.get(self._peers.get(peer, ""))
        if side is None or side.lost:
            raise PeerGone(f"{peer} is not connected")
        return side

    def _transfer(self, peer: _Side, own: _Side, make: Callable[[], Any]) -> _Transfer:
        try:
            return _Transfer(self._agent, make(), peer, own)
        except _ERRORS as error:
            raise TransferFailed(f"NIXL refused a transfer from {peer.name}") from error

    def _prepare_remote(self, agent: str, region: RegionDescriptor, span: Span) -> Any:
        rows = _strided(region.extent_addresses, region.extent_slots, region.slot_bytes, span, region.device)
        return self._prepare(agent, rows, region.device)

    def _prepare_own(self, memory: SlottedMemory, span: Span) -> Any:
        device = memory.extents[0].device
        rows = _strided([e.address for e in memory.extents], memory.extent_slots, memory.slot_bytes, span, device)
        return self._prepare("NIXL_INIT_AGENT", rows, device)

    def _prepare(self, agent: str, rows: npt.NDArray[np.uint64], device: int | None) -> Any:
        try:
            return self._agent.prep_xfer_dlist(agent, rows, _memory_kind(device))
        except _ERRORS as error:
            raise TransferFailed(f"NIXL does not know the memory that {agent} described") from error

    def _teardown(self) -> None:
        """Ends the agent, which ends all that moves."""
        for side in (*self._agents.values(), *self._own.values()):
            side.drop_lists()
        self._agents.clear()
        self._own.clear()
        self._agent = None


def _memory_kind(device: int | None) -> str:
    return "DRAM" if device is None else "VRAM"


def _strided(
    addresses: Sequence[int], slots: Sequence[int], slot_bytes: int, span: Span, device: int | None
) -> npt.NDArray[np.uint64]:
    """One row an extent: (address, length, device, stride, count), which NIXL expands to a descriptor a slot."""
    return np.array(
        [
            (address + span.offset, span.nbytes, device or 0, slot_bytes, count)
            for address, count in zip(addresses, slots, strict=True)
        ],
        dtype=np.uint64,
    )


def _nothing() -> None:
    """The scratch buffer stays registered for the transport's life."""

"""The far ends that the transport contract reads from: one in this process, one in a process of its own over NIXL.

Both hold `SLOTS` slots of `SLOT_BYTES` bytes in two extents under region "slab"; slot i starts as `pattern(i)`.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from cpd_ray.messages import PeerDescriptor
from kv.memory import SlottedMemory
from kv.transport.base import Transport
from kv.transport.inprocess import InProcessTransport, Switchboard
from kv.transport.nixl import NixlTransport

SLOT_BYTES = 4096
EXTENT_SLOTS = (40, 24)
SLOTS = sum(EXTENT_SLOTS)
LAYOUT = b"layout of the contract"
Rows = npt.NDArray[np.uint8]


def pattern(slot: int, seed: int = 0) -> Rows:
    return np.random.default_rng((seed, slot)).integers(0, 256, SLOT_BYTES, dtype=np.uint8)


def patterned(slot_bytes_of: Sequence[int], seed: int) -> list[Rows]:
    buffers, first = [], 0
    for count in slot_bytes_of:
        buffers.append(np.concatenate([pattern(first + i, seed) for i in range(count)]))
        first += count
    return buffers


class Far(Protocol):
    """What a test may do to the peer it reads from. `freezes`: a frozen peer's reads stand still (else they go on without it)."""

    freezes: bool

    def describe(self) -> PeerDescriptor: ...

    def register_anew(self, seed: int, generation: int) -> None: ...

    def freeze(self) -> None: ...

    def thaw(self) -> None: ...

    def run_on(self) -> None:
        """Thaw, and return once the peer has done something since; or has died of what it missed, as UCX does over TCP when a reader has
        left while it was frozen."""
        ...

    def kill(self) -> None: ...

    def restart(self, seed: int, generation: int) -> None: ...

    def close(self) -> None: ...


class NearAndFar(Protocol):
    def near(self, layout: bytes = LAYOUT) -> Transport: ...

    def lend_far(self) -> Far: ...

    def take_back(self, far: Far) -> None: ...


class FarInProcess:
    freezes = True

    def __init__(self, board: Switchboard) -> None:
        self._board = board
        self.restart(0, 1)

    def describe(self) -> PeerDescriptor:
        return self._transport.describe()

    def register_anew(self, seed: int, generation: int) -> None:
        self._transport.register("slab", SlottedMemory.over(patterned(EXTENT_SLOTS, seed), SLOT_BYTES), generation)

    def freeze(self) -> None:
        self._board.freeze("far")

    def thaw(self) -> None:
        self._board.thaw("far")

    def run_on(self) -> None:
        self.thaw()

    def kill(self) -> None:
        self._board.kill("far")

    def restart(self, seed: int, generation: int) -> None:
        self._transport = InProcessTransport(self._board, "far", LAYOUT)
        self.register_anew(seed, generation)

    def close(self) -> None:
        self._transport.close()


def _serve(pipe: Connection) -> None:
    """The far process: does what it is told, one answer a command."""
    transport = NixlTransport("far", LAYOUT)
    while True:
        try:
            what, *args = pipe.recv()
        except EOFError:
            break
        if what == "register":
            seed, generation = args
            transport.register("slab", SlottedMemory.over(patterned(EXTENT_SLOTS, seed), SLOT_BYTES), generation)
            pipe.send(None)
        elif what == "describe":
            pipe.send(transport.describe())
    transport.close()


class FarOverNixl:
    """`fresh`: as at its start, so that another test may read from it too."""

    def __init__(self, *, freezes: bool) -> None:
        self.freezes = freezes
        self.restart(0, 1)
        self.fresh = True

    def describe(self) -> PeerDescriptor:
        described: PeerDescriptor = self._tell("describe")
        return described

    def register_anew(self, seed: int, generation: int) -> None:
        self.fresh = False
        self._tell("register", seed, generation)

    def freeze(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def thaw(self) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def run_on(self) -> None:
        self.fresh = False
        self.thaw()
        with contextlib.suppress(EOFError, ConnectionError):
            self.describe()

    def kill(self) -> None:
        self.fresh = False
        self._process.kill()
        self._process.join()

    def restart(self, seed: int, generation: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.register_anew(seed, generation)

    def close(self) -> None:
        self._pipe.close()
        if self._process.is_alive():
            self.thaw()
        self._process.join(20)
        assert not self._process.is_alive(), "the far process does not end"

    def _tell(self, *command: Any) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()


class InOneProcess:
    def __init__(self) -> None:
        self._board = Switchboard()

    def near(self, layout: bytes = LAYOUT) -> Transport:
        return InProcessTransport(self._board, "near", layout)

    def lend_far(self) -> Far:
        return FarInProcess(self._board)

    def take_back(self, far: Far) -> None:
        far.close()


class OverNixl:
    """`tcp`: the environment keeps UCX from shared memory, so that reads need the far process to run. A far process that no test has
    spoiled is lent again."""

    _spare: ClassVar[dict[bool, FarOverNixl]] = {}

    def __init__(self, *, tcp: bool) -> None:
        self._tcp = tcp

    def near(self, layout: bytes = LAYOUT) -> Transport:
        return NixlTransport("near", layout)

    def lend_far(self) -> Far:
        return self._spare.pop(self._tcp, None) or FarOverNixl(freezes=self._tcp)

    def take_back(self, far: Far) -> None:
        assert isinstance(far, FarOverNixl)
        if far.fresh:
            self._spare[self._tcp] = far
        else:
            far.close()

    @classmethod
    def close_spare(cls) -> None:
        while cls._spare:
            cls._spare.popitem()[1].close()

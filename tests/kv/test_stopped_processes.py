"""A worker in another process is stopped or killed at each step of writing and reading, over a really shared slab and real NIXL.

Nobody may ever read bytes that are not the key's, and everything comes back once the worker is heard of again or known dead.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from typing import Any

import pytest

from actors.kv_cache import KvCacheNode
from cpd_ray.ids import BlockKey, NodeId, SourceId, join_keys
from cpd_ray.messages import CommitBlocks, ReserveBlocks
from kv import shared
from kv.events import EventLog
from kv.eviction import DEFAULT_POLICY, new_policy
from kv.memory import SlottedMemory
from kv.slab import Slab
from kv.slab_types import SlabLimits
from kv.transport.nixl import NixlTransport
from tests.kv.other_process import BLOCKS, SharedClock, Task, main
from tests.kv.tier_world import LAYOUT, SLOT_BYTES, bytes_of, chain_of

pytestmark = pytest.mark.slow

SLOTS = 2 * BLOCKS
OTHERS = 7
"""The chain that others write while the worker is stopped."""


class NodeProcess:
    """This process: the node's slab, books and bytes; and the other process's requests."""

    def __init__(self) -> None:
        self.time = multiprocessing.get_context("spawn").Value("d", 0.0)
        self.shared, self.memory = shared.create(SLOT_BYTES, SLOTS, 1, 5)
        clock = SharedClock(self.time)
        log = EventLog(SourceId("slab:n0"), NodeId("n0"), 1)
        limits = SlabLimits(SLOTS, SLOT_BYTES, writer_slots=SLOTS, pin_slots=0)
        self.slab = Slab(limits, new_policy(DEFAULT_POLICY, SLOTS), epoch=1, clock=clock, events=log)
        self.transport = NixlTransport("slab-n0", LAYOUT)
        self.cache = KvCacheNode(self.slab, self.memory, log, self.transport, clock=clock)

    def bytes_at(self, slot: int) -> bytes:
        return bytes(rows_of(self.memory)[slot])

    async def write(self, keys: list[BlockKey]) -> int:
        """Write as another worker of the node would; how many found room."""
        reservation = await self.cache.reserve(ReserveBlocks("local", join_keys(keys)))
        written = []
        for key, slot in zip(keys, reservation.slots, strict=True):
            if slot is not None:
                rows_of(self.memory)[slot][:] = bytes_of(key).tobytes()
                written.append(key)
        if written:
            await self.cache.commit(CommitBlocks(reservation.reservation_id, 1, join_keys(written)))
        return len(written)

    def check(self) -> None:
        """Every key that is said to be here has its bytes."""
        self.slab.check()
        for chain in (0, OTHERS):
            for key in chain_of(chain, BLOCKS):
                leased = self.slab.lease("look", [key])
                assert all(self.bytes_at(slot) == bytes_of(key).tobytes() for slot in leased.slots)
        self.slab.holder_gone("look")

    def start(self, task: Task) -> Other:
        return Other(self, task)

    def close(self) -> None:
        self.transport.close()


def rows_of(memory: SlottedMemory) -> list[memoryview]:
    rows = []
    for extent in memory.extents:
        view = memoryview(extent.keep[0]).cast("B")
        rows += [view[at : at + SLOT_BYTES] for at in range(0, extent.nbytes, SLOT_BYTES)]
    return rows


class Other:
    """The other process, as seen from here."""

    def __init__(self, node: NodeProcess, task: Task) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._node = node
        self._process = context.Process(target=main, args=(theirs, node.shared, 1, node.time, task), daemon=True)
        self._process.start()
        theirs.close()
        self._serving = asyncio.ensure_future(self._serve())

    async def until_stopped(self) -> None:
        assert self._process.pid is not None
        await asyncio.to_thread(os.waitid, os.P_PID, self._process.pid, os.WSTOPPED)

    async def go_on(self) -> tuple[int, bool]:
        """Continue; what it reports at its end."""
        assert self._process.pid is not None
        os.kill(self._process.pid, signal.SIGCONT)
        result: tuple[int, bool] = await self._serving
        await asyncio.to_thread(self._process.join)
        return result

    async def kill(self) -> None:
        self._process.kill()
        await asyncio.to_thread(self._process.join)
        with pytest.raises((EOFError, ConnectionError)):
            await self._serving

    async def _serve(self) -> Any:
        while True:
            name, args = await asyncio.to_thread(self._pipe.recv)
            if name == "done":
                return args[0]
            try:
                answer: Any = await getattr(self._node.cache, name)(*args)
            except Exception as error:  # travels to whoever asked
                answer = error
            self._pipe.send(answer)


@pytest.fixture
def node() -> Any:
    made = NodeProcess()
    yield made
    made.close()


WRITE_STEPS = ["before reserve", "after reserve", "amid copy", "before commit", "after commit"]


@pytest.mark.parametrize("step", WRITE_STEPS)
async def test_a_writer_that_stops_and_goes_on(node: NodeProcess, step: str) -> None:
    other = node.start(Task("write", 0, step))
    await other.until_stopped()
    node.time.value = 100.0
    node.cache.tick()
    held = BLOCKS if step in ("after reserve", "amid copy", "before commit") else 0
    assert node.slab.counts().quarantined == held
    assert await node.write(chain_of(OTHERS, BLOCKS)) == BLOCKS
    node.check()
    written, free = await other.go_on()
    assert free, "its pool got every reference back"
    assert written == BLOCKS
    node.check()
    assert node.slab.match(chain_of(0, BLOCKS)) == BLOCKS
    assert node.slab.match(chain_of(OTHERS, BLOCKS)) == BLOCKS
    assert node.slab.counts().quarantined == node.slab.counts().reserved == 0


@pytest.mark.parametrize("step", WRITE_STEPS)
async def test_a_writer_that_stops_and_dies(node: NodeProcess, step: str) -> None:
    other = node.start(Task("write", 0, step))
    await other.until_stopped()
    node.time.value = 100.0
    node.cache.tick()
    await node.write(chain_of(OTHERS, BLOCKS))
    await other.kill()
    await node.cache.writer_gone("other")
    node.check()
    counts = node.slab.counts()
    assert counts.quarantined == counts.reserved == 0
    assert counts.committed == (2 if step == "after commit" else 1) * BLOCKS
    assert await node.write(chain_of(0, BLOCKS)) == (0 if step == "after commit" else BLOCKS)
    node.check()


async def test_keys_of_a_stopped_writer_can_be_written_by_another(node: NodeProcess) -> None:
    other = node.start(Task("write", 0, "amid copy"))
    await other.until_stopped()
    node.time.value = 100.0
    node.cache.tick()
    assert await node.write(chain_of(0, BLOCKS)) == BLOCKS
    node.check()
    written, free = await other.go_on()
    assert (written, free) == (BLOCKS, True), "it wrote, though the node had no use for it"
    node.check()
    counts = node.slab.counts()
    assert (counts.committed, counts.quarantined, counts.free) == (BLOCKS, 0, BLOCKS)


@pytest.mark.parametrize("from_own", [True, False], ids=["own slab", "nixl"])
@pytest.mark.parametrize("step", ["before lease", "after lease", "before release"])
async def test_a_reader_that_stops_and_goes_on(node: NodeProcess, step: str, from_own: bool) -> None:
    await node.write(chain_of(0, BLOCKS))
    other = node.start(Task("read", 0, step, from_own))
    await other.until_stopped()
    node.time.value = 100.0
    node.cache.tick()
    assert node.slab.counts().leases == 0, "it lapsed"
    for chain in (OTHERS, OTHERS + 1):  # the whole slab is written anew
        assert await node.write(chain_of(chain, BLOCKS)) == BLOCKS
    landed, right = await other.go_on()
    assert right
    assert landed == (BLOCKS if step == "before release" else 0)
    node.check()


async def test_a_reader_that_dies_holds_nothing_for_long(node: NodeProcess) -> None:
    await node.write(chain_of(0, BLOCKS))
    other = node.start(Task("read", 0, "after lease"))
    await other.until_stopped()
    await other.kill()
    assert node.slab.counts().leases == 1
    await node.cache.writer_gone("other")
    assert node.slab.counts().leases == 0
    node.check()

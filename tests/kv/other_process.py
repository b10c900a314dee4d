"""A worker in a process of its own, which stops itself (SIGSTOP) at a named step: what a hung, swapped or debugged worker looks like.

It maps the node's slab, speaks to the node over a pipe, and reads by NIXL. Time is one number in shared memory, so that the test says
when a lease has lapsed, for both processes.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import kv.write_down
from cpd_ray.ids import NodeId
from cpd_ray.messages import NodeRun
from kv import shared
from kv.memory import SlottedMemory
from kv.sides import SlabSide
from kv.tiers import TierSettings
from kv.transport.nixl import NixlTransport
from tests.kv.tier_world import LAYOUT, Worker, chain_of

BLOCKS = 8
SETTINGS = TierSettings(answer_s=60.0, timeout_s=60.0)


class SharedClock:
    """Monotonic seconds that another process moves."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def now_s(self) -> float:
        return float(self._value.value)


@dataclass(frozen=True, slots=True)
class Task:
    """What to do (`write` or `read` a chain, the latter `from_own` slab or by NIXL) and the step to stop at."""

    what: str
    chain: int
    step: str
    from_own: bool = True


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


class PipeNode:
    """The node's actor at the other end of a pipe. Stops after the answer to `stop_after`, or before asking `stop_before`."""

    def __init__(self, pipe: Connection, step: str) -> None:
        self.node = NodeId("n0")
        self._pipe = pipe
        self._step = step

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def ask(*args: Any) -> Any:
            if self._step == f"before {name}":
                stop_here()
            self._pipe.send((name, args))
            answer = self._pipe.recv()
            if isinstance(answer, Exception):
                raise answer
            if self._step == f"after {name}":
                stop_here()
            return answer

        return ask


def stop_amid_copies() -> None:
    """Copies into the slab stop after their first half."""
    whole = kv.write_down.copy_slots

    def halting(source: SlottedMemory, source_slots: Any, into: SlottedMemory, into_slots: Any) -> int:
        half = len(source_slots) // 2
        done = whole(source, source_slots[:half], into, into_slots[:half])
        stop_here()
        return done + whole(source, source_slots[half:], into, into_slots[half:])

    kv.write_down.copy_slots = halting


def main(pipe: Connection, slab: shared.SharedSlab, epoch: int, time_s: Any, task: Task) -> None:
    asyncio.run(_run(pipe, slab, epoch, SharedClock(time_s), task))


async def _run(pipe: Connection, slab: shared.SharedSlab, epoch: int, clock: SharedClock, task: Task) -> None:
    node: Any = PipeNode(pipe, task.step)
    transport = NixlTransport("pool-other", LAYOUT)
    own = SlabSide(node, shared.attach(slab), epoch) if task.from_own else None
    worker = Worker("other", own, {} if task.from_own else {node.node: node}, transport, clock, settings=SETTINGS)
    keys = chain_of(task.chain, BLOCKS)
    if task.what == "write":
        if task.step == "amid copy":
            stop_amid_copies()
        await worker.write_down(keys)
        result: Any = (worker.tiers.written.written, worker.all_free())
    else:
        blocks = worker.pool.allocate(BLOCKS)
        fetched = await worker.tiers.fetch(keys, blocks, (NodeRun(node.node, BLOCKS),))
        right = worker.holds(blocks[: len(fetched.landed)], keys[: len(fetched.landed)])
        worker.pool.release(blocks)
        await worker.tiers.drain()
        result = (len(fetched.landed), right)
    pipe.send(("done", (result,)))
    transport.close()

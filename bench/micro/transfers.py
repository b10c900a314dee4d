"""How fast KV moves: a worker's pool to and from its node's slab, and from another node's slab over NIXL, beside what the machine can do.

`python -m bench.micro.transfers` prints a table and ends with one JSON line. Everything is measured through `TieredKv`, bookkeeping, leases
and threads included; the yardsticks are a memcpy of the same bytes between the same (touched) memories, and NIXL alone with the same
descriptors. Invariant: each round measures figure and yardstick in turn, so that a ratio compares neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import cast

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from actors.kv_cache import KvCacheNode
from bench.micro.kv_index import environment
from cpd_ray.clock import SystemClock
from cpd_ray.ids import KEY_BYTES, BlockId, BlockKey, LeaseId, NodeId, slab_source, split_keys
from cpd_ray.messages import LeaseBlocks, LeaseGrant, NodeRun, PeerDescriptor
from kv import shared
from kv.events import EventLog
from kv.eviction import DEFAULT_POLICY, new_policy
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.pool import BlockPool
from kv.sides import PoolSide, SlabSide
from kv.slab import Slab
from kv.slab_types import SlabLimits
from kv.tiers import TieredKv
from kv.transport.base import Transport
from kv.transport.inprocess import InProcessTransport, Switchboard
from kv.transport.nixl import NixlTransport, State

BLOCK_BYTES = 64 * 30 * 3 * 64 * 2 * 2
"""64 tokens of SmolLM2-135M in bf16: 30 layers, 3 KV heads of 64, K and V."""
SIZES = {"94MB": 64, "1GB": 728}
LAYOUT = b"bench"
SEED = 3


def keys_of(count: int, chain: int) -> list[BlockKey]:
    return [BlockKey((chain << 32 | i).to_bytes(KEY_BYTES, "big")) for i in range(count)]


def make_slab(name: str, blocks: int) -> tuple[Slab, EventLog]:
    limits = SlabLimits(blocks, BLOCK_BYTES, writer_slots=blocks, pin_slots=0)
    log = EventLog(slab_source(NodeId(name)), NodeId(name), 1)
    return Slab(limits, new_policy(DEFAULT_POLICY, blocks), epoch=1, clock=SystemClock(), events=log), log


def slab_memory(blocks: int) -> SlottedMemory:
    """Shared memory, touched, in extents of 256 MB."""
    return shared.create(BLOCK_BYTES, blocks, 1, (256 << 20) // BLOCK_BYTES)[1]


@dataclass(frozen=True, slots=True)
class Bench:
    """A worker with everything touched, and its pool's free blocks in random order."""

    tiers: TieredKv
    pool: BlockPool
    memory: SlottedMemory
    blocks: tuple[BlockId, ...]


def make_worker(transport: Transport, blocks: int, own: SlabSide | None, others: dict[NodeId, KvNode]) -> Bench:
    rows = np.ones(blocks * BLOCK_BYTES, dtype=np.uint8)
    memory = SlottedMemory.over([rows], BLOCK_BYTES)
    pool = BlockPool(blocks, clock=SystemClock())
    side = PoolSide(pool, memory, transport.register("pool", memory, 1))
    tiers = TieredKv("bench", side, own, others, transport, clock=SystemClock())
    taken = pool.allocate(blocks)
    np.random.default_rng(SEED).shuffle(taken)
    return Bench(tiers, pool, memory, tuple(taken))


async def in_turn(rounds: int, figure: Callable[[], Awaitable[None]], yardstick: Callable[[], None]) -> tuple[float, float, float]:
    """The best round's seconds of both, and their ratio (1: as fast as the yardstick): what the machine can do when it is left alone."""
    spent: list[tuple[float, float]] = []
    for _ in range(rounds + 1):
        begun_s = time.perf_counter()
        await figure()
        between_s = time.perf_counter()
        yardstick()
        spent.append((between_s - begun_s, time.perf_counter() - between_s))
    spent = spent[1:]  # the first round touches, connects and prepares
    figures, limits = zip(*spent, strict=True)
    return min(figures), min(limits), min(limits) / min(figures)


# -- own slab --------------------------------------------------------------------------------------------------------


async def own_slab(count: int, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Reading and writing `count` blocks, against memcpy."""
    board = Switchboard()
    memory = slab_memory(count)
    slab, log = make_slab("n", count)
    node = KvCacheNode(slab, memory, log, InProcessTransport(board, "slab", LAYOUT), clock=SystemClock())
    transport = InProcessTransport(board, "pool", LAYOUT)
    worker = make_worker(transport, count, SlabSide(node, memory, 1), {})
    chains = iter(range(1, rounds + 3))
    keys = keys_of(count, 0)

    async def write() -> None:
        nonlocal keys
        keys = keys_of(count, next(chains))
        worker.tiers.store(None, keys, worker.blocks)
        await worker.tiers.drain()

    async def read() -> None:
        fetched = await worker.tiers.fetch(keys, worker.blocks, ())
        assert len(fetched.landed) == count
        await worker.tiers.drain()

    at_start = worker.memory.extents[0].address

    def copy(into_slab: bool) -> None:
        at = at_start
        for extent in memory.extents:
            ctypes.memmove(*((extent.address, at) if into_slab else (at, extent.address)), extent.nbytes)
            at += extent.nbytes

    worker.tiers._writer._most_waiting = count  # the whole pool at once, for the measurement's sake
    written = await in_turn(rounds, write, lambda: copy(True))
    result = {"slab_write_vs_memcpy": written, "slab_read_vs_memcpy": await in_turn(rounds, read, lambda: copy(False))}
    assert worker.tiers.written.dropped == 0
    await worker.tiers.close()
    return result


# -- another node's slab over NIXL -----------------------------------------------------------------------------------


def _far(pipe: Connection, count: int) -> None:
    """The other node's process: holds the bytes."""
    transport = NixlTransport("far", LAYOUT)
    transport.register("slab", slab_memory(count), 1)
    pipe.send(transport.describe())
    pipe.recv()
    transport.close()


class FarBooks:
    """The far node's actor, whose books are kept here: what is measured is the transfer, not a socket."""

    def __init__(self, slab: Slab, described: PeerDescriptor) -> None:
        self.node = NodeId("far")
        self._slab = slab
        self._described = described

    async def describe(self) -> PeerDescriptor:
        return self._described

    async def lease(self, request: LeaseBlocks) -> LeaseGrant:
        leased = self._slab.lease(request.holder, split_keys(request.keys))
        return LeaseGrant(leased.lease_id, self._slab.epoch, leased.ttl_s, leased.slots, self._described.regions[0].ref)

    async def release(self, lease_id: LeaseId, epoch: int) -> None:
        self._slab.release(lease_id, epoch)


class RawNixl:
    """NIXL by itself: one prepared read of the same descriptors, posted and polled without pause."""

    def __init__(self, far: PeerDescriptor, into: SlottedMemory, pairs: list[tuple[int, int]]) -> None:
        name, blob = msgspec.msgpack.decode(far.metadata, type=tuple[str, bytes])
        self._agent = nixl_agent("raw", nixl_agent_config(enable_prog_thread=False))  # as ours: a spinning thread would take a core
        self._agent.register_memory([(e.address, e.nbytes, 0, "") for e in into.extents], "DRAM")
        self._agent.add_remote_agent(blob)
        region = far.regions[0]
        addresses = np.concatenate(
            [a + np.arange(n) * BLOCK_BYTES for a, n in zip(region.extent_addresses, region.extent_slots, strict=True)]
        )
        theirs, ours = addresses[[a for a, _ in pairs]], into.addresses([b for _, b in pairs])
        sides = [
            np.stack([side, np.full(len(side), BLOCK_BYTES), np.zeros(len(side))], axis=1).astype(np.uint64)
            for side in (ours, theirs)
        ]
        self._local = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", sides[0], "DRAM")
        self._remote = self._agent.prep_xfer_dlist(name, sides[1], "DRAM")
        self._all = np.arange(len(pairs), dtype=np.int32)

    def read(self) -> None:
        handle = self._agent.make_prepped_xfer("READ", self._local, self._all, self._remote, self._all)
        state = State(self._agent.transfer(handle))
        while state is State.MOVING:
            state = State(self._agent.check_xfer_state(handle))
        assert state is State.DONE
        handle.release()


async def over_nixl(count: int, rounds: int) -> tuple[float, float, float]:
    """Fetching `count` blocks in shuffled slots, against NIXL alone."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_far, args=(theirs, count), daemon=True)
    process.start()
    described = pipe.recv()
    slab, _ = make_slab("far", count)
    keys, slots = keys_of(count, 0), np.random.default_rng(SEED + 1).permutation(count).tolist()
    far = cast(KvNode, FarBooks(slab, described))
    transport = NixlTransport("near", LAYOUT)
    worker = make_worker(transport, count, None, {far.node: far})
    granted = slab.reserve("w", keys)
    slab.commit(granted.reservation_id, 1, keys)
    order = [keys[slot] for slot in slots]  # leased in this order, the slots are shuffled
    raw = RawNixl(described, worker.memory, list(zip(slots, worker.blocks, strict=True)))

    async def fetch() -> None:
        fetched = await worker.tiers.fetch(order, worker.blocks, (NodeRun(far.node, count),))
        assert len(fetched.landed) == count

    result = await in_turn(rounds, fetch, raw.read)
    await worker.tiers.close()
    transport.close()
    pipe.send(None)
    process.join()
    return result


async def measure(rounds: int) -> dict[str, dict[str, float]]:
    figures: dict[str, dict[str, float]] = {}
    for size, count in SIZES.items():
        results = await own_slab(count, rounds)
        results["nixl_fetch_vs_raw"] = await over_nixl(count, rounds)
        for name, (took_s, limit_s, ratio) in results.items():
            gigabytes = count * BLOCK_BYTES / 1e9
            print(
                f"{name:<22}{size:>5}  {gigabytes / took_s:6.2f} GB/s   limit {gigabytes / limit_s:6.2f} GB/s   ratio {ratio:.3f}",
                flush=True,
            )
            figures.setdefault(name, {})[size] = round(ratio, 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    figures = asyncio.run(measure(options.rounds))
    print(json.dumps({**figures, **environment()}))


if __name__ == "__main__":
    main()

"""Slabs as Ray objects: one memory for all processes of a node, none for other nodes, and never a file on disk."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import ray
from ray import serve
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors import ray_store
from actors.ray_handles import ReplicaCaller, replicas
from actors.ray_store import StoreSlab
from cpd_ray.errors import NotSharedMemory, PeerGone
from kv.memory import SlottedMemory
from tests.ray.conftest import STORE_BYTES, RayCluster
from tests.ray.echo import targeted, until

SLOT_BYTES = 4096
SLOTS, EXTENT_SLOTS = 20, 8
LARGE = (2**20, STORE_BYTES * 5 // 8 // 2**20, 16)
"""Slots of 1 MiB: a slab that fits into a node's store once, not twice."""


class Holder:
    """A process that makes slabs or maps those of others."""

    def __init__(self) -> None:
        self._memory: SlottedMemory | None = None
        self._slab: StoreSlab | None = None

    def make(self, slot_bytes: int, slots: int, extent_slots: int) -> StoreSlab:
        self._slab, self._memory = ray_store.create(slot_bytes, slots, extent_slots)
        return self._slab

    async def make_after(self, within_s: float) -> None:
        self._slab, self._memory = await ray_store.create_after_predecessor(*LARGE, within_s=within_s)

    def attach(self, slab: StoreSlab) -> tuple[int, ...]:
        self._memory = ray_store.attach(slab)
        return self._memory.extent_slots

    def write(self, slot: int, value: int) -> None:
        self._slot(slot)[:] = value

    def read(self, slot: int) -> set[int]:
        return {int(v) for v in np.unique(self._slot(slot))}

    def _slot(self, slot: int) -> Any:
        assert self._memory is not None
        (extent,), (offset,) = self._memory.locate([slot])
        return self._memory.extents[extent].keep[2][offset : offset + self._memory.slot_bytes]

    async def slab(self) -> StoreSlab:
        """As a Serve replica's method: off the loop, and by reference."""
        if self._slab is None:
            await asyncio.to_thread(self.make, SLOT_BYTES, SLOTS, EXTENT_SLOTS)
        assert self._slab is not None
        return self._slab

    def pid(self) -> int:
        return os.getpid()


class SlabHost(Protocol):
    async def slab(self) -> StoreSlab: ...


@pytest.fixture
def holder(cluster: RayCluster) -> Iterator[Callable[[int], Any]]:
    """`holder(n)`: a process on node n."""
    started = []

    def start(node: int) -> Any:
        where = NodeAffinitySchedulingStrategy(cluster.nodes[node], soft=False)
        started.append(ray.remote(Holder).options(scheduling_strategy=where, num_cpus=0).remote())
        return started[-1]

    yield start
    for actor in started:
        ray.kill(actor)


def test_what_one_process_writes_all_of_the_node_read(holder: Callable[[int], Any]) -> None:
    owner, first, second = holder(1), holder(1), holder(1)
    slab = ray.get(owner.make.remote(SLOT_BYTES, SLOTS, EXTENT_SLOTS))
    assert ray.get([first.attach.remote(slab), second.attach.remote(slab)]) == [(8, 8, 4)] * 2
    for slot, (writer, readers) in enumerate([(first, (owner, second)), (second, (owner, first)), (owner, (first, second))] * 6):
        ray.get(writer.write.remote(slot, slot + 1))
        assert ray.get([r.read.remote(slot) for r in readers]) == [{slot + 1}] * 2
    assert ray.get(owner.read.remote(SLOTS - 1)) == {0}


def test_no_other_node_maps_a_slab(holder: Callable[[int], Any]) -> None:
    slab = ray.get(holder(1).make.remote(SLOT_BYTES, SLOTS, EXTENT_SLOTS))
    with pytest.raises(NotSharedMemory, match="over a transport"):
        ray_store.attach(slab)


def test_a_slab_that_would_lie_on_disk_is_refused_and_leaves_its_room(holder: Callable[[int], Any]) -> None:
    owner = holder(1)
    slot_bytes, slots, extent_slots = LARGE
    with pytest.raises(NotSharedMemory, match="on disk"):
        ray.get(owner.make.remote(slot_bytes, 2 * slots, extent_slots))
    asyncio.run(until(lambda: _made(owner)))


def test_a_dead_owners_slab_stays_for_as_long_as_someone_maps_it(holder: Callable[[int], Any]) -> None:
    owner, worker, late = holder(1), holder(1), holder(1)
    slab = ray.get(owner.make.remote(*LARGE))
    ray.get(worker.attach.remote(slab))
    ray.get(worker.write.remote(3, 7))
    os.kill(ray.get(owner.pid.remote()), signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(owner.read.remote(0))
    assert ray.get(worker.read.remote(3)) == {7}
    successor = holder(1)
    with pytest.raises(NotSharedMemory):
        ray.get(successor.make.remote(*LARGE))
    patient, impatient = successor.make_after.remote(30), holder(1).make_after.remote(0)
    with pytest.raises(NotSharedMemory):
        ray.get(impatient)
    ray.kill(worker)
    ray.get(patient)
    with pytest.raises(PeerGone):
        ray.get(late.attach.remote(slab))


def _made(owner: Any) -> bool:
    try:
        return bool(ray.get(owner.make.remote(*LARGE)))
    except NotSharedMemory:
        return False  # the store frees what was dropped a moment later


async def test_a_replicas_slab_travels_by_reference(
    cluster: RayCluster, deploy: Callable[..., Any], holder: Callable[[int], Any]
) -> None:
    handle = deploy(targeted(serve.deployment(Holder), 2, max_replicas_per_node=1).bind(), "slabs")
    there = await until(lambda: found if len(found := replicas(handle)) == 2 else None)
    for node, node_id in enumerate(cluster.nodes):
        (replica_id,) = (r.replica_id.unique_id for r in there if r.node_id == node_id)
        slab = await ReplicaCaller(handle, replica_id, PeerGone, by_reference=True).client(SlabHost).slab()
        assert slab.node == node_id
        worker = holder(node)
        await worker.attach.remote(slab)
        await worker.write.remote(SLOTS - 1, 9)
        assert await ReplicaCaller(handle, replica_id, PeerGone).client(Reader).read(SLOTS - 1) == {9}


class Reader(Protocol):
    async def read(self, slot: int) -> set[int]: ...


SHM, DISK = "/dev/shm/plasmaX (deleted)", "/tmp/ray/session/plasmaX (deleted)"


@pytest.mark.parametrize(
    ("regions", "expected"),
    [
        ([(0, 0x4000, SHM)], True),
        ([(0, 0x1000, SHM)], False),
        ([(0, 0x2000, SHM), (0x2000, 0x4000, SHM)], True),
        ([(0, 0x2000, SHM), (0x2000, 0x4000, DISK)], False),
        ([(0, 0x1800, SHM), (0x2000, 0x4000, SHM)], False),
        ([(0, 0x4000, DISK)], False),
        ([(0, 0x4000, None)], False),
        ([(0x8000, 0x9000, SHM)], False),
    ],
)
def test_where_memory_lies(tmp_path: Path, regions: list[tuple[int, int, str | None]], expected: bool) -> None:
    lines = [f"{start:08x}-{end:08x} rw-s 00000000 00:1b 136 {path or ''}" for start, end, path in regions]
    maps = tmp_path / "maps"
    maps.write_text("\n".join(lines) + "\n")
    assert ray_store.lies_in_shared_memory(0x1000, 0x1000 + 1, maps) is expected

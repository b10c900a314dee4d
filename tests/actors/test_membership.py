"""The view of who is there and what is cached: true after each round, whatever the others did meanwhile."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from actors.fleet import Client, Fleet
from actors.local.fakes import FakeShape, FakeWorker
from actors.membership import Membership, Roster, SourceFeed
from cpd_ray.clock import ManualClock
from cpd_ray.errors import BadMessage, CPDError
from cpd_ray.ids import BlockKey, NodeId, WorkerId, pool_source
from cpd_ray.messages import WorkerState
from cpd_ray.types import Role
from kv.directory import Directory
from kv.node import KvNode


@dataclass
class World:
    """Workers that come, die and go; what the membership knows of them is in `fleet` and `directory`."""

    clock: ManualClock = field(default_factory=ManualClock)
    members: dict[WorkerId, FakeWorker] = field(default_factory=dict)
    log_batches: int = 4096

    def __post_init__(self) -> None:
        self.fleet = Fleet("r", self.clock, bytes_per_token=1, stale_after_s=5.0)
        self.directory = Directory(clock=self.clock)
        self.membership = Membership(self, self.fleet, SourceFeed(self.directory, timeout_s=0.05), interval_s=0.001, timeout_s=0.05)

    def workers(self) -> Mapping[WorkerId, Client]:
        return self.members

    def nodes(self) -> Mapping[NodeId, KvNode]:
        return {}

    def add(self, name: str, epoch: int = 1) -> FakeWorker:
        shape = FakeShape(WorkerId(name), Role.PREFILL, NodeId("n"), epoch=epoch)
        worker = self.members[shape.worker] = FakeWorker(shape, self.clock)
        return worker

    def held(self, worker: FakeWorker) -> int:
        """How many leading keys the directory thinks that it holds."""
        keys = list(worker.log.keys())
        return self.directory.match(keys).blocks.get(pool_source(worker.shape.worker), 0) if keys else 0


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


@pytest.fixture
def world() -> World:
    return World()


async def test_who_comes_dies_leaves_and_comes_back(world: World) -> None:
    a, _ = world.add("a"), world.add("b")
    await world.membership.refresh()
    assert sorted(world.fleet.workers()) == ["a", "b"]
    a.dead = True
    await world.membership.refresh()
    assert world.fleet.members() == ["b"]
    del world.members[WorkerId("b")]
    await world.membership.refresh()
    assert world.fleet.members() == []
    world.add("a", epoch=2)
    await world.membership.refresh()
    assert world.fleet.workers() == ["a"]


async def test_a_death_that_a_caller_found_holds_until_it_is_heard_again(world: World) -> None:
    changes: list[int] = []
    world.add("a")
    await world.membership.refresh()
    world.membership.on_change = lambda: changes.append(len(world.fleet.members()))
    world.membership.worker_died(WorkerId("a"))
    assert changes == [0]
    await world.membership.refresh()
    assert changes == [0, 1]


async def test_a_frozen_worker_stays_until_it_is_stale_and_holds_up_nobody(world: World) -> None:
    frozen, _ = world.add("frozen"), world.add("well")
    await world.membership.refresh()
    frozen.rest = lambda point: 10**9  # never through within the time to answer
    await world.membership.refresh()
    assert sorted(world.fleet.workers()) == ["frozen", "well"], "silent for one round only"
    world.clock.advance(5.1)
    await world.membership.refresh()
    assert world.fleet.workers() == ["well"]
    assert world.fleet.members() == ["frozen", "well"]
    frozen.rest = lambda point: 0
    await world.membership.refresh()
    assert sorted(world.fleet.workers()) == ["frozen", "well"]


@pytest.mark.parametrize("error", [BadMessage("x"), CPDError("x")])
async def test_an_odd_answer_changes_nothing_for_the_others(world: World, error: CPDError) -> None:
    odd, well = world.add("odd"), world.add("well")
    odd.log.stored(key(1))
    well.log.stored(key(2))
    odd.fault = lambda point: error
    await world.membership.refresh()
    assert world.fleet.workers() == ["well"]
    assert (world.held(odd), world.held(well)) == (0, 1)
    odd.fault = lambda point: None
    await world.membership.refresh()
    assert (world.held(odd), world.held(well)) == (1, 1)


async def test_a_restarted_worker_is_no_ghost_in_the_directory(world: World) -> None:
    first = world.add("a")
    for i in range(5):
        first.log.stored(key(i))
    await world.membership.refresh()
    assert world.held(first) == 5
    second = world.add("a", epoch=2)
    second.log.stored(key(0))
    await world.membership.refresh()
    assert world.held(first) == world.held(second) == 1
    second.dead = True
    await world.membership.refresh()
    assert world.held(second) == 0
    assert not world.directory.sources()


async def test_rounds_go_on_after_one_that_fails(world: World) -> None:
    worker = world.add("a")
    await world.membership.start()
    failed = asyncio.Event()

    def broken() -> None:
        failed.set()
        raise RuntimeError("a bug in whoever listens")

    world.membership.on_change = broken
    await failed.wait()
    heard = asyncio.Event()
    world.membership.on_change = heard.set
    worker.state = WorkerState.DRAINING
    await heard.wait()
    assert world.fleet.reports()[0].state is WorkerState.DRAINING
    await world.membership.stop()
    await world.membership.stop()


async def test_settled_waits_for_what_is_to_be_written(world: World) -> None:
    worker = world.add("a")
    rounds = 3

    class Slow(FakeWorker):
        async def report(self):  # type: ignore[no-untyped-def]
            nonlocal rounds
            rounds -= 1
            return replace(await super().report(), unwritten_blocks=max(0, rounds))

    world.members[worker.shape.worker] = Slow(worker.shape, world.clock)
    await world.membership.settled()
    assert rounds <= 0


@pytest.mark.parametrize("seed", range(2))
async def test_after_each_round_the_directory_is_what_the_workers_hold(seed: int) -> None:
    rng, world = random.Random(seed), World()
    keys = [key(i) for i in range(40)]
    epoch = 1
    roster: Roster = world
    for _ in range(200):
        chance = rng.random()
        if chance < 0.1 or not world.members:
            epoch += 1
            world.add(rng.choice("abc"), epoch)
        worker = rng.choice(list(world.members.values()))
        if chance < 0.15:
            worker.dead = True
        elif chance < 0.2:
            del world.members[worker.shape.worker]
        for _ in range(rng.randrange(12)):
            (worker.log.stored if rng.random() < 0.6 else worker.log.removed)(rng.choice(keys))
        silent = rng.random() < 0.3
        for each in world.members.values():
            lost = silent and rng.random() < 0.5
            each.fault = lambda point, lost=lost: CPDError("lost") if lost and point == "events" else None  # type: ignore[misc]
        await world.membership.refresh()
        world.directory.check()
        for each in world.members.values():
            each.fault = lambda point: None
        await world.membership.refresh()
        world.directory.check()
        living = {name: each for name, each in roster.workers().items() if isinstance(each, FakeWorker) and not each.dead}
        assert set(world.fleet.members()) == set(living)
        logs = {name: each.log.keys() for name, each in living.items()}
        for one in keys:
            holders = {source for source, count in world.directory.match([one]).blocks.items() if count}
            assert holders == {pool_source(name) for name, held in logs.items() if one in held}

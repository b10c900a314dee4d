"""The router over workers without tensors: whatever fails, no token is lost, doubled or changed, and nothing stays counted."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from actors.fleet import Client, Fleet
from actors.local.fakes import VOCABULARY, FakeShape, FakeWorker, answer
from actors.membership import Membership, SourceFeed
from actors.router import MAX_ATTEMPTS, Router, Surroundings
from actors.served_model import ServedModel
from cpd_ray import tokens as token_buffers
from cpd_ray.clock import ManualClock
from cpd_ray.config import RuntimeConfig
from cpd_ray.errors import (
    CacheMissed,
    ContextLengthExceeded,
    CPDError,
    DuplicateRequest,
    InvalidRequest,
    Overloaded,
    PoolExhausted,
    Unavailable,
    WorkerGone,
)
from cpd_ray.ids import NodeId, RequestId, WorkerId
from cpd_ray.messages import WorkerState
from cpd_ray.types import FinishReason, GenerateRequest, Role, SamplingParams
from kv.directory import Directory
from kv.node import KvNode

BLOCK = 4
LONGEST = 200
MODEL = ServedModel("fake", "fake", None, "float32", BLOCK, 64, VOCABULARY, LONGEST)
HANDOVER_S = 32.0


@dataclass
class World:
    """One router over fake workers; `shapes` by name, the living ones in `members`."""

    shapes: dict[str, FakeShape]
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    clock: ManualClock = field(default_factory=ManualClock)
    fault: Callable[[str], CPDError | None] = lambda point: None
    rest: Callable[[str], int] = lambda point: 0

    def __post_init__(self) -> None:
        self.all = {WorkerId(name): self._new(shape) for name, shape in self.shapes.items()}
        self.fleet = Fleet("r", self.clock, bytes_per_token=64)
        self.directory = Directory(clock=self.clock)
        membership = Membership(self, self.fleet, SourceFeed(self.directory, timeout_s=0.05), timeout_s=0.05)
        around = Surroundings(membership, self.fleet, self.directory, self.clock)
        self.router = Router(MODEL, around, self.runtime, seeds=random.Random(0))
        self.count = 0

    def _new(self, shape: FakeShape) -> FakeWorker:
        return FakeWorker(shape, self.clock, lambda point: self.fault(point), lambda point: self.rest(point))

    def workers(self) -> Mapping[WorkerId, Client]:
        return self.all

    def nodes(self) -> Mapping[NodeId, KvNode]:
        return {}

    async def refresh(self) -> None:
        await self.router.membership.refresh()

    def restart(self, name: WorkerId) -> None:
        old = self.all[name].shape
        self.all[name] = self._new(replace(old, epoch=old.epoch + 1))

    def request(self, prompt: list[int], name: str = "", **sampling: Any) -> GenerateRequest:
        self.count += 1
        params = SamplingParams(**{"max_tokens": 8, "seed": 1, **sampling})
        return GenerateRequest(RequestId(name or f"q{self.count}"), token_buffers.pack(prompt), params)

    async def ask(self, request: GenerateRequest, into: list[int] | None = None) -> list[int]:
        """All tokens; asserts that chunks follow each other and the last one's usage is true."""
        tokens = [] if into is None else into
        chunk = None
        async for chunk in self.router.generate(request):
            assert chunk.index == len(tokens)
            assert chunk.usage is not None or (chunk.index > 0 and chunk.finish_reason is None)
            tokens += chunk.tokens
        assert chunk is not None and chunk.usage is not None and chunk.trace is not None
        assert chunk.finish_reason is FinishReason.LENGTH
        assert chunk.usage.completion_tokens == len(tokens)
        return tokens

    def check(self) -> None:
        self.router.check()
        self.directory.check()
        for worker in self.all.values():
            worker.check()

    async def assert_nothing_left(self) -> None:
        await self.router.close()
        self.check()
        counts = self.router.counts
        assert (counts.in_flight, counts.queued) == (0, 0)
        for worker in self.all.values():
            assert not worker.active, f"{worker.shape.worker} still works"
            assert worker.dead or worker.leases.keys() == worker.lost, "a handover that came was not ended"


def shape(name: str, role: Role, **changes: Any) -> FakeShape:
    return FakeShape(WorkerId(name), role, NodeId("n"), **{"block_tokens": BLOCK, **changes})


def usual(**decode: Any) -> dict[str, FakeShape]:
    shapes = [
        shape("pre", Role.PRE_PREFILL),
        shape("p1", Role.PREFILL),
        shape("p2", Role.PREFILL),
        shape("d1", Role.DECODE, **decode),
        shape("d2", Role.DECODE, **decode),
    ]
    return {s.worker: s for s in shapes}


async def ready(shapes: dict[str, FakeShape] | None = None, **settings: Any) -> World:
    world = World(shapes or usual(), **settings)
    await world.refresh()
    return world


def once(point: str, error: CPDError, skip: int = 0) -> Callable[[str], CPDError | None]:
    """Fails at `point` once, after passing it `skip` times."""
    left = [skip]

    def fault(at: str) -> CPDError | None:
        if at != point:
            return None
        left[0] -= 1
        return error if left[0] == -1 else None

    return fault


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


# -- one fault at a time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [1, 2, 9])
async def test_an_undisturbed_answer(max_tokens: int) -> None:
    world = await ready()
    assert await world.ask(world.request([1, 2, 3], max_tokens=max_tokens)) == answer([1, 2, 3], max_tokens, 1)
    await world.assert_nothing_left()


@pytest.mark.parametrize(
    ("point", "error", "skip"),
    [
        ("prefill", WorkerGone("x"), 0),
        ("prefill", CacheMissed("x", cached_tokens=4), 0),
        ("prefill", PoolExhausted("x"), 0),
        ("prefilled", WorkerGone("x"), 0),
        ("decode", WorkerGone("x"), 0),
        ("decode", PoolExhausted("x"), 0),
        ("chunk", WorkerGone("x"), 0),
        ("chunk", WorkerGone("x"), 3),
        ("chunk", PoolExhausted("x"), 6),
    ],
)
async def test_one_failure_at_each_point_is_not_seen_by_the_client(point: str, error: CPDError, skip: int) -> None:
    world = await ready()
    world.fault = once(point, error, skip)
    prompt = list(range(1, 11))
    assert await world.ask(world.request(prompt)) == answer(prompt, 8, 1)
    await world.assert_nothing_left()


@pytest.mark.parametrize("point", ["prefill", "prefilled", "decode", "chunk"])
async def test_an_error_of_the_request_itself_is_not_retried(point: str) -> None:
    world = await ready()
    world.fault = once(point, InvalidRequest("not like this"))
    with pytest.raises(InvalidRequest, match="not like this"):
        await world.ask(world.request([1, 2, 3]))
    assert world.fault(point) is None
    assert sum(w.prefills for w in world.all.values()) <= 1
    await world.assert_nothing_left()
    assert await world.ask(world.request([1, 2, 3])) == answer([1, 2, 3], 8, 1)


async def test_after_enough_failures_the_client_hears() -> None:
    world = await ready()
    tries = []
    world.fault = lambda point: tries.append(point) or PoolExhausted("x") if point == "prefill" else None  # type: ignore[func-returns-value]
    with pytest.raises(Unavailable):
        await world.ask(world.request([1, 2, 3]))
    assert len(tries) == MAX_ATTEMPTS
    await world.assert_nothing_left()


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_with_no_worker_of_a_kind_left_it_is_unavailable(role: Role) -> None:
    world = await ready()
    for worker in world.all.values():
        worker.dead = (worker.shape.role is Role.DECODE) == (role is Role.DECODE)
    with pytest.raises(Unavailable):
        await world.ask(world.request([1, 2, 3]))
    await world.assert_nothing_left()


async def test_an_answer_resumed_elsewhere_tells_its_attempts_and_workers() -> None:
    world = await ready()
    world.fault = once("chunk", WorkerGone("x"), 3)
    chunks = [chunk async for chunk in world.router.generate(world.request([5] * 9))]
    trace = chunks[-1].trace
    assert trace is not None
    assert trace.attempts == 2
    assert {w[0] for w in trace.workers} == {"p", "d"}
    assert len({w for w in trace.workers if w.startswith("d")}) == 2


async def test_draining_workers_are_passed_over_and_stay_members() -> None:
    world = await ready()
    world.all[WorkerId("d1")].state = world.all[WorkerId("p1")].state = WorkerState.DRAINING
    for i in range(6):  # the router learns of it from the refusals
        prompt = [i + 1] * 9
        assert await world.ask(world.request(prompt)) == answer(prompt, 8, 1)
    assert WorkerId("d1") in world.fleet.members()
    await world.assert_nothing_left()


@pytest.mark.parametrize(("point", "role"), [("prefill", Role.PREFILL), ("decode", Role.DECODE), ("chunk", Role.DECODE)])
async def test_nobody_waits_for_a_frozen_worker(point: str, role: Role) -> None:
    world = await ready()
    asking = asyncio.create_task(world.ask(world.request([5] * 9)))
    thawed = asyncio.Event()

    def freeze(at: str) -> int:
        if at == point:  # whoever gets there first stays there
            world.rest = lambda point: 0
            for worker in world.all.values():
                if worker.active and worker.shape.role is role:
                    worker.rest = lambda point: 0 if thawed.is_set() else 10**9
                    return 10**9
        return 0

    world.rest = freeze
    await turns(30)
    assert not asking.done()
    world.clock.advance(19.0)
    await world.refresh()
    assert not asking.done(), "it may still answer"
    world.clock.advance(2.0)
    await world.refresh()
    assert await asking == answer([5] * 9, 8, 1)
    thawed.set()
    await world.refresh()
    await world.assert_nothing_left()


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "sampling", "kind", "param"),
    [
        ([VOCABULARY], {}, InvalidRequest, "prompt"),
        ([1], {"stop_token_ids": (VOCABULARY,)}, InvalidRequest, "stop_token_ids"),
        ([1], {"logit_bias": ((VOCABULARY, 1.0),)}, InvalidRequest, "logit_bias"),
        ([1] * LONGEST, {"max_tokens": 1}, ContextLengthExceeded, "prompt"),
        ([1], {"max_tokens": 2**70}, ContextLengthExceeded, "prompt"),
    ],
)
async def test_what_no_worker_could_answer_is_refused_before_any_work(
    prompt: list[int], sampling: dict[str, Any], kind: type[CPDError], param: str
) -> None:
    world = await ready()
    with pytest.raises(kind) as caught:
        await world.ask(world.request(prompt, **sampling))
    assert caught.value.param == param
    assert not any(w.prefills for w in world.all.values())
    await world.assert_nothing_left()


async def test_the_longest_request_is_answered() -> None:
    world = await ready()
    prompt = [3] * (LONGEST - 1)
    assert await world.ask(world.request(prompt, max_tokens=1)) == answer(prompt, 1, 1)


async def test_an_id_in_flight_is_refused_and_free_again_after_its_end() -> None:
    world = await ready(rest=lambda point: 3)
    first = world.router.generate(world.request([1, 2], "same"))
    await anext(first)
    with pytest.raises(DuplicateRequest):
        await world.ask(world.request([1, 2], "same"))
    await first.aclose()
    assert await world.ask(world.request([1, 2], "same")) == answer([1, 2], 8, 1)
    await world.assert_nothing_left()


async def test_an_id_is_free_at_once_although_a_worker_has_not_heard_of_the_abort() -> None:
    """Between processes an abort takes its time; who left and came back with the same id must not be turned away by a worker."""
    world = await ready({n: s for n, s in usual().items() if n in ("p1", "d1")})
    first = world.router.generate(world.request([1, 2], "same"))
    await anext(first)
    await anext(first)
    slow = dict(world.all[WorkerId("d1")].active)
    assert len(slow) == 1
    await first.aclose()
    world.all[WorkerId("d1")].active |= slow
    assert await world.ask(world.request([1, 2], "same")) == answer([1, 2], 8, 1)


async def test_a_full_queue_says_when_to_come_back() -> None:
    runtime = RuntimeConfig.model_validate({"admission": {"max_in_flight": 1, "max_queued": 1}})
    world = await ready(runtime=runtime, rest=lambda point: 50)
    tasks = [asyncio.create_task(world.ask(world.request([i + 1] * 5))) for i in range(3)]
    done = await asyncio.gather(*tasks, return_exceptions=True)
    refused = [d for d in done if isinstance(d, Overloaded)]
    assert len(refused) == 1 and refused[0].retry_after_s > 0
    assert [d for d in done if isinstance(d, list)] == [answer([i + 1] * 5, 8, 1) for i in range(3) if isinstance(done[i], list)]
    await world.assert_nothing_left()


# -- promises and turns ----------------------------------------------------------------------------------------------


async def test_who_failed_gives_its_promise_of_room_back_before_it_queues_again() -> None:
    """Else it holds the room that the one in front of it waits for, and both wait for ever."""
    runtime = RuntimeConfig.model_validate({"admission": {"max_in_flight": 2}})
    shapes = {str(s.worker): s for s in (shape("p1", Role.PREFILL), shape("p2", Role.PREFILL), shape("d1", Role.DECODE, blocks=20))}
    world = await ready(shapes, runtime=runtime, rest=lambda point: 5 if point == "prefill" else 0)
    world.fault = once("prefill", WorkerGone("x"))
    long, short = [7] * 60, [8] * 30
    tasks = [asyncio.create_task(world.ask(world.request(prompt))) for prompt in (long, short)]
    async with asyncio.timeout(5):
        got = await asyncio.gather(*tasks)
    assert got == [answer(long, 8, 1), answer(short, 8, 1)]
    await world.assert_nothing_left()


async def test_an_answer_that_ran_long_may_wait_for_its_turn_when_resumed() -> None:
    """The longest wait counts from when a request began to wait, not from when it came."""
    runtime = RuntimeConfig.model_validate({"admission": {"max_in_flight": 1, "max_wait_s": 5.0}})
    world = await ready(runtime=runtime)
    stream = world.router.generate(world.request([4] * 6))
    tokens = [t for _ in range(3) for t in (await anext(stream)).tokens]
    world.clock.advance(60.0)
    world.rest = lambda point: 20
    other = asyncio.create_task(world.ask(world.request([9] * 6)))
    await turns(3)
    world.fault = once("chunk", WorkerGone("x"))

    async def rest_of_it() -> None:
        async for chunk in stream:
            tokens.extend(chunk.tokens)

    resumed = asyncio.create_task(rest_of_it())
    for _ in range(40):
        world.router._look_again()
        await asyncio.sleep(0)
    await resumed
    assert tokens == answer([4] * 6, 8, 1)
    assert await other == answer([9] * 6, 8, 1)
    await world.assert_nothing_left()


# -- warming ---------------------------------------------------------------------------------------------------------


async def test_warming_survives_a_miss_and_a_death_as_an_answer_does() -> None:
    for error in (CacheMissed("x"), WorkerGone("x"), PoolExhausted("x")):
        world = await ready()
        world.fault = once("prefill", error)
        with pytest.raises(Unavailable, match="cache of the worker's node"):  # computed; there is no slab here to pin it in
            await world.router.warm(world.request([6] * 12), 1.0)
        assert sum(w.prefills for w in world.all.values()) == 1
        await world.assert_nothing_left()


async def test_warming_whose_worker_dies_after_it_is_unavailable() -> None:
    world = await ready()
    world.fault = lambda point: world.fleet.gone(WorkerId("pre")) if point == "prefilled" else None
    with pytest.raises(Unavailable):
        await world.router.warm(world.request([6] * 12), 1.0)
    await world.assert_nothing_left()


# -- all of it together ----------------------------------------------------------------------------------------------


@dataclass
class Asked:
    prompt: list[int]
    max_tokens: int
    seed: int
    task: asyncio.Task[Any]
    got: list[int]
    cancelled: bool = False

    def check(self) -> None:
        wanted = answer(self.prompt, self.max_tokens, self.seed)
        assert self.got == wanted[: len(self.got)], "a token was lost, doubled or changed"
        if not self.task.done() or self.task.cancelled():
            return
        error = self.task.exception()
        assert error is None or isinstance(error, (Unavailable, Overloaded)), error
        assert error is not None or self.got == wanted, "an answer ended early"


class Walk:
    """Random arrivals, aborts, deaths, restarts, refusals and lost replies."""

    def __init__(self, world: World, rng: random.Random, failures: float) -> None:
        self.world, self.rng = world, rng
        self.asked: list[Asked] = []
        world.rest = lambda point: rng.randrange(4)
        world.fault = lambda point: self._fault(point) if rng.random() < failures else None

    def _fault(self, point: str) -> CPDError | None:
        if point == "report":
            return None
        kinds = [WorkerGone("walk"), PoolExhausted("walk")]
        if point == "prefill":
            kinds.append(CacheMissed("walk", cached_tokens=self.rng.randrange(3) * BLOCK))
        return self.rng.choice(kinds)

    def ask(self) -> None:
        rng = self.rng
        prompt = [rng.randrange(3)] * rng.randrange(0, 40) + [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 20))]
        most, seed = rng.randrange(1, 12), rng.randrange(4)
        got: list[int] = []
        request = self.world.request(prompt, max_tokens=most, seed=seed)
        self.asked.append(Asked(prompt, most, seed, asyncio.create_task(self.world.ask(request, got)), got))

    def leave(self) -> None:
        running = [a for a in self.asked if not a.task.done()]
        if running:
            chosen = self.rng.choice(running)
            chosen.cancelled = True
            chosen.task.cancel()

    def die(self) -> None:
        worker = self.rng.choice(list(self.world.all.values()))
        worker.dead = True

    def come_back(self) -> None:
        for name, worker in list(self.world.all.items()):
            if worker.dead:
                self.world.restart(name)

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.35:
            self.ask()
        elif chance < 0.45:
            self.leave()
        elif chance < 0.47:
            self.die()
        elif chance < 0.55:
            self.come_back()

    def check(self) -> None:
        self.world.check()
        for asked in self.asked:
            asked.check()


@pytest.mark.parametrize("policy", ["cost", "threshold", "affinity_shared"])
@pytest.mark.parametrize("seed", range(2))
async def test_random_failures_lose_no_token_and_leave_no_count(seed: int, policy: str) -> None:
    runtime = RuntimeConfig.model_validate(
        {
            "routing": {"policy": policy, "cold_min_uncached_tokens": 16},
            "admission": {"max_in_flight": 3, "max_queued": 6, "max_wait_s": 30.0},
        }
    )
    world = await ready(usual(blocks=24), runtime=runtime)
    walk = Walk(world, random.Random(seed), failures=0.02)
    for _ in range(400):
        walk.step()
        if walk.rng.random() < 0.3:
            await world.refresh()
        world.clock.advance(walk.rng.random() * 0.1)
        await asyncio.sleep(0)
        walk.check()
        walk.asked = [a for a in walk.asked if not a.task.done()] + walk.asked[-3:]
    world.fault = lambda point: None
    walk.come_back()
    async with asyncio.timeout(20):
        while any(not a.task.done() for a in walk.asked):
            await world.refresh()
            await asyncio.sleep(0)
    walk.check()
    await world.assert_nothing_left()
    world.clock.advance(HANDOVER_S)
    for worker in world.all.values():
        worker.expire()
        assert not worker.leases
    prompt = [1] * 30
    await world.refresh()
    assert await world.ask(world.request(prompt)) == answer(prompt, 8, 1)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*(a.task for a in walk.asked), return_exceptions=True)

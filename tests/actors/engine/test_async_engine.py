"""The engine's loop: streams that end whatever happens, one step at a time off the event loop, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from actors.engine.engine import AsyncEngine
from actors.engine.fakes import FakePort, oracle
from actors.engine.interface import Engine, EngineOutput, FetchPlan, FetchResult
from actors.engine.output_stream import Mailbox
from actors.engine.plan import StepPlan, StepResult
from cpd_ray.config import EngineConfig
from cpd_ray.errors import ContextLengthExceeded, DuplicateRequest, EngineFault, InvalidRequest, WorkerGone
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens, FinishReason
from tests.actors.engine.rig import VOCAB, Rig

TOKENS = list(range(1, 42))


class Gate:
    """A runner that waits before each step until it is let through: the test decides what happens meanwhile."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.arrived = threading.Semaphore(0)
        self.open = threading.Semaphore(0)
        self.threads: set[str] = set()

    def run(self, plan: StepPlan) -> StepResult:
        self.threads.add(threading.current_thread().name)
        self.arrived.release()
        assert self.open.acquire(timeout=30)
        return self.rig.runner.run(plan)

    async def reached(self) -> None:
        """A step is under way, held at the gate."""
        assert await asyncio.to_thread(self.arrived.acquire, True, 30)

    def release(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.open.release()


class SlowPort(FakePort):
    """A fetch that lasts until the test says so."""

    def __init__(self, rig: Rig) -> None:
        super().__init__(rig.runner)
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()

    async def fetch(self, plan: FetchPlan) -> FetchResult:
        self.begun.set()
        await self.go_on.wait()
        return self.deliver(plan)


@asynccontextmanager
async def serving(rig: Rig, gate: Gate | None = None, port: FakePort | None = None) -> AsyncIterator[AsyncEngine]:
    engine = AsyncEngine(rig.scheduler, gate or rig.runner, port or rig.port)
    await engine.start()
    try:
        yield engine
    finally:
        if gate is not None:
            gate.release(10_000)
        await engine.stop()
    rig.scheduler.check()
    rig.assert_nothing_held()
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith(("engine", "fetch"))]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("engine-step")]


async def collect(stream: AsyncIterator[EngineOutput]) -> list[EngineOutput]:
    return [output async for output in stream]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.tokens]


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 - what holds is the engine's state, which signals nobody
            await asyncio.sleep(0)


async def test_it_is_an_engine_and_answers_many_at_once() -> None:
    rig = Rig(blocks=200)
    async with serving(rig) as engine:
        as_interface: Engine = engine
        assert (as_interface.block_size, as_interface.vocab_size, as_interface.max_model_len) == (4, VOCAB, 4096)
        prompts = [list(range(i, i + 9 + i)) for i in range(12)]
        answers = await asyncio.gather(*(collect(engine.generate(rig.request(f"r{i}", p, 7))) for i, p in enumerate(prompts)))
    assert [tokens_of(a) for a in answers] == [oracle(p, 7, VOCAB) for p in prompts]
    assert all([o.finish_reason for o in a if o.finish_reason] == [FinishReason.LENGTH] for a in answers)


async def test_refusals_are_raised_at_once() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 2))
        for request, error in [
            (rig.request("a", TOKENS, 2), DuplicateRequest),
            (rig.request("b", [VOCAB], 2), InvalidRequest),
            (rig.request("c", TOKENS, 10_000), ContextLengthExceeded),
        ]:
            with pytest.raises(error):
                engine.generate(request)
        gate.release(100)
        assert tokens_of(await collect(stream)) == oracle(TOKENS, 2, VOCAB)


async def test_steps_run_one_at_a_time_on_one_thread_beside_the_loop() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        streams = [engine.generate(rig.request(name, TOKENS[i:], 3)) for i, name in enumerate("abc")]
        await gate.reached()
        await asyncio.sleep(0)
        assert not gate.arrived.acquire(blocking=False), "a second step began before the first ended"
        gate.release(100)
        await asyncio.gather(*map(collect, streams))
    assert len(gate.threads) == 1
    assert threading.current_thread().name not in gate.threads


async def test_what_became_ready_meanwhile_is_delivered_together() -> None:
    rig = Rig()
    async with serving(rig) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 9))
        await until(lambda: not rig.scheduler.live)
        (output,) = await collect(stream)
    assert output.tokens == tuple(oracle(TOKENS, 9, VOCAB))
    assert output.finish_reason is FinishReason.LENGTH
    assert output.cached == CachedTokens()
    assert output.phases_s is not None


# -- leaving ---------------------------------------------------------------------------------------------------------


async def test_closing_during_a_step_keeps_the_blocks_until_it_ends() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 50))
        await gate.reached()
        await stream.aclose()
        assert rig.pool.counts().active == 11, "the step still writes there"
        assert not rig.scheduler.live
        gate.release()
        await until(lambda: rig.scheduler.idle)
        assert rig.pool.counts().active == 0
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()


async def test_a_cancelled_consumer_aborts_its_request_only() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        doomed = asyncio.create_task(collect(engine.generate(rig.request("doomed", TOKENS, 50))))
        other = asyncio.create_task(collect(engine.generate(rig.request("other", TOKENS[5:], 3))))
        await gate.reached()
        doomed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await doomed
        assert rig.scheduler.live == (RequestId("other"),)
        gate.release(100)
        assert tokens_of(await other) == oracle(TOKENS[5:], 3, VOCAB)


async def test_a_forgotten_stream_aborts() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        engine.generate(rig.request("a", TOKENS, 50))  # never iterated, never closed
        gc.collect()
        await until(lambda: not rig.scheduler.live)


async def test_closing_during_a_fetch_waits_for_the_transfer() -> None:
    rig = Rig()
    port = SlowPort(rig)
    async with serving(rig, port=port) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 3, may_fetch_blocks=10))
        await port.begun.wait()
        await stream.aclose()
        assert rig.pool.counts().active == 11, "the transfer still writes there"
        port.go_on.set()
        await until(lambda: rig.scheduler.idle)
        assert rig.pool.counts().active == 0


async def test_others_compute_during_a_fetch_and_the_fetch_wakes_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.engine.engine.BLOCKED_POLL_S", 1000.0)
    rig = Rig()
    port = SlowPort(rig)
    async with serving(rig, port=port) as engine:
        slow = engine.generate(rig.request("slow", TOKENS, 3, may_fetch_blocks=10))
        await port.begun.wait()
        quick = await collect(engine.generate(rig.request("quick", TOKENS[7:], 3)))
        assert tokens_of(quick) == oracle(TOKENS[7:], 3, VOCAB)
        port.go_on.set()
        assert tokens_of(await collect(slow)) == oracle(TOKENS, 3, VOCAB)


async def test_held_blocks_that_nobody_takes_are_given_back() -> None:
    rig = Rig()
    async with serving(rig) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 1, hold=True))
        await until(lambda: not rig.scheduler.live)
        assert rig.pool.counts().active == 11
        await stream.aclose()
        assert rig.pool.counts().active == 0
        taken = [o async for o in engine.generate(rig.request("b", TOKENS, 1, hold=True))]
        assert rig.pool.counts().active == 11, "these are the taker's"
        rig.pool.release(taken[-1].held_blocks)


async def test_held_blocks_of_a_step_that_outlives_its_consumer_are_given_back() -> None:
    given: list[tuple[int, ...]] = []
    mailbox = Mailbox(lambda _: None, given.append)  # type: ignore[arg-type]
    mailbox.close()
    mailbox.put(EngineOutput(RequestId("a"), finish_reason=FinishReason.LENGTH, held_blocks=(1, 2)))  # type: ignore[arg-type]
    assert given == [(1, 2)]


# -- faults ----------------------------------------------------------------------------------------------------------


async def test_a_step_that_raises_ends_its_requests_and_the_engine_goes_on() -> None:
    rig = Rig(config=EngineConfig(step_tokens=64, chunk_tokens=16))
    crashes = [RuntimeError("CUDA said no")]

    def crash(plan: StepPlan) -> None:
        if crashes:
            raise crashes.pop()

    rig.runner.crash = crash
    async with serving(rig) as engine:
        (output,) = await collect(engine.generate(rig.request("a", TOKENS, 3)))
        assert isinstance(output.error, EngineFault)
        assert "CUDA" not in output.error.message, "no exception text reaches a client"
        assert tokens_of(await collect(engine.generate(rig.request("a", TOKENS, 3)))) == oracle(TOKENS, 3, VOCAB)


async def test_a_fault_of_one_sequence_is_its_own() -> None:
    rig = Rig()
    rig.runner.fault = lambda step: EngineFault("NaN logits") if step.request_id == "bad" and step.output_index == 2 else None
    async with serving(rig) as engine:
        bad, good = await asyncio.gather(
            collect(engine.generate(rig.request("bad", TOKENS, 5))), collect(engine.generate(rig.request("good", TOKENS[3:], 5)))
        )
    assert tokens_of(bad) == oracle(TOKENS, 2, VOCAB)
    assert isinstance(bad[-1].error, EngineFault)
    assert tokens_of(good) == oracle(TOKENS[3:], 5, VOCAB)


async def test_a_port_that_raises_costs_one_request() -> None:
    rig = Rig()

    class Broken(FakePort):
        async def fetch(self, plan: FetchPlan) -> FetchResult:
            raise RuntimeError("bug")

    async with serving(rig, port=Broken(rig.runner)) as engine:
        (output,) = await collect(engine.generate(rig.request("a", TOKENS, 3, may_fetch_blocks=2)))
        assert isinstance(output.error, EngineFault)
        assert tokens_of(await collect(engine.generate(rig.request("b", TOKENS, 3)))) == oracle(TOKENS, 3, VOCAB)


async def test_when_the_loop_itself_fails_nobody_waits_for_ever() -> None:
    rig = Rig()

    class Lying:
        def run(self, plan: StepPlan) -> StepResult:
            return StepResult((), 1.0)

    engine = AsyncEngine(rig.scheduler, Lying(), rig.port)
    await engine.start()
    (output,) = await collect(engine.generate(rig.request("a", TOKENS[:3], 3)))
    assert isinstance(output.error, EngineFault)
    await until(lambda: not engine.healthy)
    with pytest.raises(WorkerGone):
        engine.generate(rig.request("b", TOKENS, 3))
    await engine.stop()


async def test_stopping_ends_every_stream_as_aborted() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        consumer = asyncio.create_task(collect(engine.generate(rig.request("a", TOKENS, 50))))
        await gate.reached()
        gate.release(10_000)
        await engine.stop()
        outputs = await consumer
        assert outputs[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(WorkerGone):
            engine.generate(rig.request("b", TOKENS, 2))


async def test_knobs_change_while_requests_run() -> None:
    rig = Rig(blocks=200, config=EngineConfig(step_tokens=64, chunk_tokens=8, order="fcfs"))
    gate = Gate(rig)
    seen: list[int] = []
    rig.runner.crash = lambda plan: seen.append(plan.new_tokens)
    async with serving(rig, gate) as engine:
        streams = [engine.generate(rig.request(name, [i, *range(160)], 2)) for i, name in enumerate("ab")]
        await gate.reached()
        engine.reconfigure(EngineConfig(step_tokens=64, chunk_tokens=32))
        gate.release(1000)
        await asyncio.gather(*map(collect, streams))
    assert seen[:2] == [8, 32]


async def test_load_follows_what_is_accepted() -> None:
    rig = Rig()
    gate = Gate(rig)
    async with serving(rig, gate) as engine:
        stream = engine.generate(rig.request("a", TOKENS, 3))
        load = engine.load()
        assert (load.running + load.waiting, load.backlog_tokens) == (1, 41)
        assert load.backlog_s == pytest.approx(sum(load.queue_s))
        await stream.aclose()
        assert engine.load().backlog_tokens == 0

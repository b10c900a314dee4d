"""What wraps faces, workers, transports and applications: it counts and logs what passes, and changes nothing of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from actors.http.face import ModelCard
from actors.http.fake_face import FakeFace, Script
from actors.local.fakes import FakeShape, FakeWorker
from actors.models.tiny import TinySpec, write_tiny
from actors.observability import logs
from actors.observability.face import ObservedFace
from actors.observability.http import CountErrors
from actors.observability.metrics import MemoryMeter
from actors.observability.table import OTHER
from actors.observability.transport import ObservedTransport
from actors.observability.workers import ObservedDecode, ObservedPrefill, split_name
from actors.text.codec import TextCodec
from cpd_ray.clock import ManualClock
from cpd_ray.errors import CacheMissed, CPDError, EngineFault, Overloaded, PeerGone, Unavailable
from cpd_ray.ids import KEY_BYTES, LeaseId, NodeId, RequestId, WorkerId
from cpd_ray.messages import DecodeRequest, EventsAfter, PrefillRequest, WorkerState
from cpd_ray.tokens import pack
from cpd_ray.types import CachedTokens, FinishReason, GenerateRequest, RequestTrace, Role, SamplingParams, Tier, TokenChunk
from kv.memory import SlottedMemory
from kv.transport.inprocess import InProcessTransport, Switchboard

STEP_S = 0.25
PROMPT = tuple(range(40, 80))


class Slow(FakeFace):
    """Each chunk takes STEP_S; `trace`: what the traces say instead of the fake's own."""

    def __init__(self, codec: TextCodec, script: Script, clock: ManualClock, trace: RequestTrace | None) -> None:
        super().__init__(codec, (ModelCard("fake", 4096, 300),), script)
        self._clock = clock
        self._trace = trace

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                self._clock.advance(STEP_S)
                yield replace(chunk, trace=self._trace) if chunk.trace is not None and self._trace is not None else chunk


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TextCodec]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_tiny(TinySpec(), folder)
    codec = TextCodec.load(folder)
    yield codec
    codec.close()


@pytest.fixture
def lines() -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """What our loggers have written so far, parsed: one object a line, or it fails."""
    written = io.StringIO()
    before = {name: (logging.getLogger(name).level, logging.getLogger(name).propagate) for name in logs.OURS}
    logs.configure({"role": "test"}, stream=written)
    yield lambda: [json.loads(line) for line in written.getvalue().splitlines()]
    for name, (level, propagate) in before.items():
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(level)
        logger.propagate = propagate


class Watched:
    """A slow face behind an observed one. `roles`: the workers that are there."""

    def __init__(self, codec: TextCodec, script: Script | None = None, trace: RequestTrace | None = None) -> None:
        self.clock, self.meter = ManualClock(5.0), MemoryMeter()
        self.within = Slow(codec, script or Script(), self.clock, trace)
        self.roles = {WorkerId("prefill-0"): Role.PREFILL, WorkerId("pre-0"): Role.PRE_PREFILL, WorkerId("decode-0"): Role.DECODE}
        self.face = ObservedFace(self.within, self.meter, self.clock, lambda: self.roles)

    async def ask(self, max_tokens: int = 6, request_id: str = "r1", tokens: tuple[int, ...] = PROMPT) -> list[TokenChunk]:
        return [chunk async for chunk in self.face.generate(ask(max_tokens, request_id, tokens))]


def ask(max_tokens: int = 6, request_id: str = "r1", tokens: tuple[int, ...] = PROMPT) -> GenerateRequest:
    return GenerateRequest(RequestId(request_id), pack(tokens), SamplingParams(max_tokens=max_tokens), salt="pepper", tenant="acme")


async def turns() -> None:
    """Time for everything that can go on to come to where it waits."""
    for _ in range(50):
        await asyncio.sleep(0)


# -- the face --------------------------------------------------------------------------------------------------------


async def test_an_answer_is_measured_and_logged_once_and_passes_unchanged(codec: TextCodec, lines: Callable[[], list[Any]]) -> None:
    watched = Watched(codec, Script(group=2))
    plain = [chunk async for chunk in FakeFace(codec, watched.within.models(), Script(group=2)).generate(ask())]
    assert await watched.ask() == plain
    meter = watched.meter
    assert meter.observed("time_to_first_token_seconds") == {(): [STEP_S]}
    assert meter.observed("inter_token_latency_seconds") == {(): [STEP_S / 2] * 4}, "one a token after the first chunk's"
    assert meter.observed("e2e_request_latency_seconds") == {(): [3 * STEP_S]}
    assert meter.read("request_success") == {("length",): 1}
    assert meter.read("request_errors") == {}
    assert (meter.read("prompt_tokens"), meter.read("generation_tokens")) == ({(): 40}, {(): 6})
    assert meter.read("prompt_tokens_by_source") == {("computed",): 40}
    (line,) = lines()
    assert line["request_id"] == "r1"
    assert line["event"] == "request"
    assert (line["status"], line["finish_reason"], line["tenant"]) == (200, "length", "acme")
    assert (line["prompt_tokens"], line["completion_tokens"], line["max_tokens"]) == (40, 6, 6)
    assert (line["ttft_s"], line["e2e_s"], line["predicted_ttft_s"]) == (STEP_S, 3 * STEP_S, 0.5)
    assert (line["route"], line["workers"], line["attempts"]) == ("cold", ["prefill-0"], 1)
    assert line["phases_s"] == {"compute": 0.25}
    assert line["cached_tokens"] == {"pool": 0, "node": 0, "cluster": 0}
    assert "pepper" not in json.dumps(line)


async def test_prompt_tokens_are_told_apart_by_where_they_came_from(codec: TextCodec) -> None:
    watched = Watched(codec)
    await watched.ask()
    await watched.ask()
    assert watched.meter.read("prompt_tokens_by_source") == {("computed",): 40 + 8, ("pool",): 32}
    assert watched.meter.read("prompt_tokens") == {(): 80}


@pytest.mark.parametrize(
    ("fault", "status", "raised"),
    [
        (Overloaded("full"), "429", Overloaded),
        (Unavailable("gone"), "503", Unavailable),
        (RuntimeError("a bug"), "500", RuntimeError),
    ],
)
async def test_an_error_is_counted_by_its_status(
    codec: TextCodec, lines: Callable[[], list[Any]], fault: Exception, status: str, raised: type[Exception]
) -> None:
    watched = Watched(codec, Script(fail_with=fault, fail_after=2))
    with pytest.raises(raised):
        await watched.ask()
    assert watched.meter.read("request_errors") == {(status,): 1}
    assert watched.meter.read("request_success") == {}
    assert watched.meter.read("generation_tokens") == {(): 2}
    (line,) = lines()
    assert (line["status"], line["finish_reason"], line["completion_tokens"]) == (int(status), None, 2)
    watched.within.check()


async def test_a_client_that_leaves_is_an_abort_wherever_it_happens(codec: TextCodec) -> None:
    for hold_after in (0, 3):  # before the first token, and after some
        watched = Watched(codec, Script(hold_after=hold_after))
        task = asyncio.create_task(watched.ask())
        await watched.within.until(running=1)
        await turns()
        assert watched.meter.read("generation_tokens") == ({(): hold_after} if hold_after else {})
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert watched.meter.read("request_success") == {("abort",): 1}
        watched.within.check()


async def test_a_reader_cancelled_between_two_chunks_is_an_abort_too(codec: TextCodec) -> None:
    watched, reached = Watched(codec), asyncio.Event()

    async def read() -> None:
        async with contextlib.aclosing(watched.face.generate(ask())) as chunks:
            async for _ in chunks:
                reached.set()
                await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert watched.meter.read("request_success") == {("abort",): 1}
    watched.within.check()


async def test_a_reader_that_has_had_enough_is_a_stop(codec: TextCodec) -> None:
    watched = Watched(codec)
    async with contextlib.aclosing(watched.face.generate(ask())) as chunks:
        async for _ in chunks:
            break
    assert watched.meter.read("request_success") == {("stop",): 1}
    assert watched.meter.read("prompt_tokens") == {(): 40}
    watched.within.check()


async def test_a_reader_that_leaves_after_the_last_chunk_changes_nothing_of_the_end(codec: TextCodec) -> None:
    watched = Watched(codec)
    async with contextlib.aclosing(watched.face.generate(ask())) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason is not None:
                break
    assert watched.meter.read("request_success") == {("length",): 1}


def trace(
    route: str, *workers: str, attempts: int = 1, predicted_s: float = 1.0, phases_s: dict[str, float] | None = None
) -> RequestTrace:
    names = tuple(WorkerId(worker) for worker in workers)
    return RequestTrace(route, "because", names, CachedTokens(), phases_s or {}, predicted_s, 2.5, attempts)


@pytest.mark.parametrize(
    ("told", "gone", "labels"),
    [
        (trace("cold", "pre-0", "decode-0"), (), ("cold", "pre_prefill", "own_pool")),
        (trace("warm", "prefill-0"), (), ("warm", "prefill", "own_pool")),
        (trace("cold", "prefill-0"), (), ("cold", "prefill", "crossed")),
        (trace("cold", "prefill-0"), ("pre-0",), ("cold", "prefill", "own_pool_empty")),
        (trace("warm", "died-0"), (), ("warm", OTHER, OTHER)),
        (trace("warm"), (), ("warm", OTHER, OTHER)),
    ],
)
async def test_decisions_are_counted_by_route_pool_and_reason(
    codec: TextCodec, told: RequestTrace, gone: tuple[str, ...], labels: tuple[str, ...]
) -> None:
    watched = Watched(codec, trace=told)
    for worker in gone:
        del watched.roles[WorkerId(worker)]
    await watched.ask()
    assert watched.meter.read("cpd_decisions") == {labels: 1}


async def test_a_prediction_is_compared_with_what_came_after_admission(codec: TextCodec) -> None:
    watched = Watched(codec, trace=trace("warm", "prefill-0", phases_s={"admission": 0.5, "queue": 0.125}))
    await watched.ask()
    assert watched.meter.observed("cpd_ttft_prediction_ratio") == {("warm",): [0.5]}
    assert watched.meter.observed("cpd_ttft_prediction_error_seconds") == {("warm",): [1.0]}
    assert watched.meter.observed("request_queue_time_seconds") == {(): [0.625]}
    retried = Watched(codec, trace=trace("warm", "prefill-0", "prefill-0", attempts=3))
    await retried.ask()
    assert retried.meter.observed("cpd_ttft_prediction_ratio") == {}, "what was predicted was another attempt"
    assert retried.meter.read("cpd_retries") == {(): 2}


async def test_hostile_ids_stay_one_harmless_line(codec: TextCodec, lines: Callable[[], list[Any]]) -> None:
    watched = Watched(codec)
    hostile = 'a"}\n{"level":"ERROR",\x00\x1b[31m\u2028' + "x" * 5000
    await watched.ask(request_id=hostile)
    (line,) = lines()
    assert line["request_id"].startswith("a_____level_:_ERROR_")
    assert len(line["request_id"]) == logs.MAX_ID_CHARS
    assert line["level"] == "INFO"


async def test_what_is_logged_on_the_way_carries_the_requests_id(codec: TextCodec, lines: Callable[[], list[Any]]) -> None:
    class Noisy(FakeFace):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
            async with contextlib.aclosing(super().generate(request)) as chunks:
                async for chunk in chunks:
                    logging.getLogger("actors.router").warning("attempt %d", chunk.index)
                    yield chunk

    meter, clock = MemoryMeter(), ManualClock()
    face = ObservedFace(Noisy(codec, (ModelCard("fake", 4096, 300),)), meter, clock, dict)

    async def read(request_id: str) -> None:
        async for _ in face.generate(ask(3, request_id)):
            logging.getLogger("actors.http").warning("between")
            await asyncio.sleep(0)

    await asyncio.gather(read("r1"), read("r2"))
    logging.getLogger("actors.router").warning("after")
    by_id: dict[str, list[str]] = {}
    for line in lines():
        by_id.setdefault(line.get("request_id", ""), []).append(line["message"])
    assert by_id == {
        **{r: ["attempt 0", "attempt 1", "attempt 2", "request"] for r in ("r1", "r2")},
        "": ["between"] * 6 + ["after"],
    }


async def test_the_rest_of_the_face_is_the_face_withins(codec: TextCodec) -> None:
    watched = Watched(codec)
    assert watched.face.codec is codec
    assert watched.face.models() == watched.within.models()
    assert watched.face.healthy()
    watched.within.script.healthy = False
    assert not watched.face.healthy()
    assert await watched.face.plan(ask()) == await watched.within.plan(ask())
    assert (await watched.face.warm(ask(), 5.0)).blocks == 2
    assert await watched.face.status() == await watched.within.status()
    assert await watched.face.reset(frozenset(Tier)) == {Tier.POOL: 2, Tier.NODE: 0, Tier.CLUSTER: 0}


# -- workers ---------------------------------------------------------------------------------------------------------


def worker(role: Role = Role.PREFILL, **options: Any) -> FakeWorker:
    return FakeWorker(FakeShape(WorkerId("w"), role, NodeId("n")), ManualClock(), **options)


def prefill_of(tokens: int = 40, name: str = "c-1/7.2", max_tokens: int = 3) -> PrefillRequest:
    sampling = SamplingParams(max_tokens=max_tokens, seed=1)
    return PrefillRequest(RequestId(name), bytes(KEY_BYTES), pack(range(tokens)), tokens, sampling)


def decode_of(name: str = "c-1/7.2") -> DecodeRequest:
    return DecodeRequest(RequestId(name), bytes(KEY_BYTES), pack(range(9)), 8, SamplingParams(max_tokens=4, seed=1))


async def test_a_prefill_is_counted_and_logged_under_the_clients_id(lines: Callable[[], list[Any]]) -> None:
    meter, inner = MemoryMeter(), worker()
    client = ObservedPrefill(inner, meter, ManualClock())
    first = await client.prefill(prefill_of())
    again = await client.prefill(prefill_of())
    assert (first.cached.total, again.cached.total) == (0, 39)
    assert meter.read("prefix_cache_queries") == {(): 80}
    assert meter.read("prefix_cache_hits") == {(): 39}
    assert meter.read("cpd_worker_requests") == {("ok",): 2}
    assert [(line["request_id"], line["attempt"], line["event"], line["outcome"]) for line in lines()] == [
        ("c-1", "7.2", "prefill", "ok")
    ] * 2
    for result in (first, again):
        assert result.handover is not None
        await client.end_handover(result.handover.lease_id)
    assert not inner.leases


@pytest.mark.parametrize(
    ("fault", "outcome"),
    [(CacheMissed("less", cached_tokens=3), "bounced"), (EngineFault("NaN"), "failed")],
)
async def test_what_a_prefill_raises_is_counted_and_raised(lines: Callable[[], list[Any]], fault: CPDError, outcome: str) -> None:
    meter = MemoryMeter()
    client = ObservedPrefill(worker(fault=lambda point: fault if point == "prefill" else None), meter, ManualClock())
    with pytest.raises(type(fault)) as raised:
        await client.prefill(prefill_of())
    assert raised.value is fault
    assert meter.read("cpd_worker_requests") == {(outcome,): 1}
    assert meter.read("prefix_cache_queries") == {}
    (line,) = lines()
    assert line["outcome"] == outcome
    assert line.get("error") == (None if outcome == "bounced" else "EngineFault")


async def test_a_draining_worker_and_a_cancelled_prefill_are_told_apart() -> None:
    meter, inner = MemoryMeter(), worker(state=WorkerState.DRAINING)
    client = ObservedPrefill(inner, meter, ManualClock())
    with pytest.raises(CPDError, match="draining"):
        await client.prefill(prefill_of())
    inner.state, inner.rest = WorkerState.READY, lambda point: 1000
    task = asyncio.create_task(client.prefill(prefill_of()))
    await turns()
    assert inner.active
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert meter.read("cpd_worker_requests") == {("draining",): 1, ("aborted",): 1}
    assert not inner.active


async def test_a_decode_passes_unchanged_and_ends_ok_when_its_reader_leaves_after_the_last_chunk(
    lines: Callable[[], list[Any]],
) -> None:
    meter, inner = MemoryMeter(), worker(Role.DECODE)
    client = ObservedDecode(inner, meter, ManualClock())
    plain = [chunk async for chunk in worker(Role.DECODE).decode(decode_of())]
    assert [chunk async for chunk in client.decode(decode_of())] == plain
    async with contextlib.aclosing(client.decode(decode_of())) as chunks:
        async for chunk in chunks:
            if chunk.finish_reason is not None:
                break
    async with contextlib.aclosing(client.decode(decode_of())) as chunks:
        async for _ in chunks:
            break
    assert meter.read("cpd_worker_requests") == {("ok",): 2, ("aborted",): 1}
    assert [(line["tokens"], line["outcome"], line["request_id"]) for line in lines()] == [
        (3, "ok", "c-1"), (3, "ok", "c-1"), (1, "aborted", "c-1")
    ]  # fmt: skip
    assert not inner.active


async def test_the_rest_of_a_worker_is_the_worker_withins() -> None:
    inner = worker()
    client = ObservedPrefill(inner, MemoryMeter(), ManualClock())
    await client.prefill(prefill_of(max_tokens=1))
    after = EventsAfter(inner.log.source, 0, 0)
    assert await client.report() == await inner.report()
    assert await client.events(after) == await inner.events(after)
    assert await client.describe() == await inner.describe()
    await client.connect(await inner.describe())
    assert await client.clear_pool() == 10
    with pytest.raises(CPDError, match="no lease"):
        await client.end_handover(LeaseId("none"))


def test_attempts_are_told_from_the_requests_id() -> None:
    assert split_name(RequestId("cmpl-a/b-0/3.1")) == ("cmpl-a/b-0", "3.1")
    assert split_name(RequestId("plain")) == ("plain", "")


# -- transports and applications -------------------------------------------------------------------------------------


async def test_transfers_are_measured_and_failures_counted() -> None:
    board, meter, clock = Switchboard(), MemoryMeter(), ManualClock()
    source = InProcessTransport(board, "source", b"layout")
    reader = ObservedTransport(InProcessTransport(board, "reader", b"layout"), meter, clock)
    theirs, own = np.arange(128, dtype=np.uint8).reshape(8, 16), np.zeros((8, 16), np.uint8)
    region = source.register("pool", SlottedMemory.over([theirs], 16), 1)
    into = reader.register("pool", SlottedMemory.over([own], 16), 1)
    reader.connect(source.describe())
    assert reader.describe().peer == "reader"
    await reader.read(region, [1, 2, 5], into, [0, 3, 4], timeout_s=5)
    assert (own[[0, 3, 4]] == theirs[[1, 2, 5]]).all()
    assert meter.observed("nixl_bytes_transferred") == {(): [48.0]}
    assert meter.observed("nixl_xfer_time_seconds") == {(): [0.0]}
    board.kill("source")
    with pytest.raises(PeerGone):
        await reader.read(region, [1], into, [0], timeout_s=5)
    assert meter.read("nixl_num_failed_transfers") == {(): 1}
    assert meter.observed("nixl_bytes_transferred") == {(): [48.0]}
    reader.disconnect("source")
    reader.close()


async def test_http_errors_are_counted_by_status() -> None:
    meter = MemoryMeter()
    statuses = iter([200, 404, 429, 418, 204])

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("x", next(statuses))(scope, receive, send)

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    for _ in range(5):
        await CountErrors(app, meter)({"type": "http", "method": "GET", "path": "/"}, receive, send)
    assert [m["status"] for m in sent if m["type"] == "http.response.start"] == [200, 404, 429, 418, 204]
    assert meter.read("http_errors") == {("404",): 1, ("429",): 1, (OTHER,): 1}


# -- logs ------------------------------------------------------------------------------------------------------------


def test_an_exception_is_one_line_and_configuring_twice_writes_once(lines: Callable[[], list[Any]]) -> None:
    again = io.StringIO()
    log = logging.getLogger("kv.somewhere")
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("it failed: %s", "because")
    (line,) = lines()
    assert line["message"] == "it failed: because"
    assert "two\nlines" in line["exception"]
    logs.configure({"role": "other"}, stream=again)
    log.info("once", extra=logs.fields(answer=42))
    assert len(lines()) == 1
    (line,) = (json.loads(text) for text in again.getvalue().splitlines())
    assert (line["role"], line["answer"], line["level"], line["logger"]) == ("other", 42, "INFO", "kv.somewhere")


def test_finish_reasons_are_label_values() -> None:
    meter = MemoryMeter()
    for reason in FinishReason:
        meter.counter("request_success", finished_reason=reason).add()
    assert meter.read("request_success") == {(str(reason),): 1 for reason in FinishReason}

"""What can't be answered is refused by name, for that request alone; who leaves, leaves nothing behind, wherever the request was; and
requests that come together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from actors import build
from actors.clients import DecodeClient, PrefillClient
from actors.local.cluster import LocalCluster
from cpd_ray import tokens as token_buffers
from cpd_ray.config import load
from cpd_ray.errors import ContextLengthExceeded, CPDError, DuplicateRequest, InvalidRequest, Overloaded
from cpd_ray.ids import RequestId, WorkerId
from cpd_ray.messages import DecodeRequest, PrefillRequest
from cpd_ray.types import GenerateRequest, Role, SamplingParams
from tests.path.asking import Answer, ask, busy, collect, nothing_left, prompt, request, until
from tests.path.oracle import Oracle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

VOCABULARY = 260
MOST = 8192
HANDOVER_TTL_S, GRACE_S = 1.0, 2.0
RECLAIMED_S = HANDOVER_TTL_S + GRACE_S + 2.0
PREFILL = WorkerId("n1-prefill-0")
PRE_PREFILL = WorkerId("n0-pre-prefill-0")
DECODE = WorkerId("n1-decode-1")


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(tiny_cluster: LocalCluster) -> AsyncIterator[LocalCluster]:
    """Handovers lapse soon; after each test all is free again and the next request is answered."""
    tiny_cluster.router.reconfigure(tiny_cluster.config.runtime.model_copy(update={"handover_ttl_s": HANDOVER_TTL_S}))
    yield tiny_cluster
    tiny_cluster.router.reconfigure(tiny_cluster.config.runtime)
    await nothing_left(tiny_cluster, RECLAIMED_S)
    assert len((await ask(tiny_cluster, request([1, 2, 3]))).tokens) == 8


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle(build.model_folder(load({"model": {"id": "tiny"}})))


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "kind", "param"),
    [
        (lambda: request([]), InvalidRequest, "prompt"),
        (lambda: GenerateRequest(RequestId("x"), b"\1\0\0"), InvalidRequest, "prompt"),
        (lambda: GenerateRequest(RequestId(""), b"\1\0\0\0"), InvalidRequest, "request_id"),
        (lambda: request([1, VOCABULARY]), InvalidRequest, "prompt"),
        (lambda: request([2**32 - 1]), InvalidRequest, "prompt"),
        (lambda: request([2**32]), InvalidRequest, "prompt"),
        (lambda: request([-1]), InvalidRequest, "prompt"),
        (lambda: request([1], stop_token_ids=(VOCABULARY,)), InvalidRequest, "stop_token_ids"),
        (lambda: request([1], stop_token_ids=(-1,)), InvalidRequest, "stop_token_ids"),
        (lambda: request([1], logit_bias=((2**40, 1.0),)), InvalidRequest, "logit_bias"),
        (lambda: request([1], logit_bias=((1, float("nan")),)), InvalidRequest, "logit_bias"),
        (lambda: request([1] * MOST, 1), ContextLengthExceeded, "prompt"),
        (lambda: request([1], MOST), ContextLengthExceeded, "prompt"),
        (lambda: request([1] * 100_000, 1), ContextLengthExceeded, "prompt"),
        (lambda: request([1], 2**70), ContextLengthExceeded, "prompt"),
        (lambda: request([1], 0), InvalidRequest, "max_tokens"),
        (lambda: request([1], temperature=float("nan")), InvalidRequest, "temperature"),
        (lambda: request([1], temperature=-1.0), InvalidRequest, "temperature"),
        (lambda: request([1], top_p=0.0), InvalidRequest, "top_p"),
        (lambda: request([1], top_k=2**70), InvalidRequest, "top_k"),
        (lambda: request([1], seed=2**64), InvalidRequest, "seed"),
        (lambda: request([1], logprobs=10**6), InvalidRequest, "logprobs"),
    ],
)
async def test_a_typed_error_for_that_request_alone(
    cluster: LocalCluster, make: Callable[[], GenerateRequest], kind: type[CPDError], param: str
) -> None:
    beside = asyncio.create_task(ask(cluster, request(prompt(1, 150))))
    with pytest.raises(kind) as caught:
        await ask(cluster, make())
    assert type(caught.value) is kind
    assert caught.value.param == param
    assert len((await beside).tokens) == 8


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 100.0, "top_p": 1e-9},
        {"temperature": 1e-30},
        {"temperature": 1.0, "top_k": 2**31 - 1, "min_p": 1.0},
        {"repetition_penalty": 100.0, "presence_penalty": 2.0, "frequency_penalty": -2.0},
        {"repetition_penalty": 1e-30},
        {"logit_bias": tuple((i, -100.0) for i in range(VOCABULARY)), "temperature": 1.0},
        {"seed": -(2**63), "temperature": 1.0},
        {"seed": 2**64 - 1, "temperature": 1.0},
        {"stop_token_ids": tuple(range(VOCABULARY)), "min_tokens": 8},
        {"logprobs": 20, "temperature": 1.0},
    ],
)
async def test_extreme_sampling_is_answered(cluster: LocalCluster, sampling: dict[str, Any]) -> None:
    answer = await ask(cluster, request(prompt(2, 70), **{"seed": 5, **sampling}))
    assert len(answer.tokens) == 8
    assert all(0 <= token < VOCABULARY for token in answer.tokens)


@pytest.mark.parametrize(("length", "most"), [(1, 1), (MOST - 1, 1), (MOST - 40, 40), (63, 1), (64, 2)])
async def test_the_longest_and_the_shortest_are_answered(cluster: LocalCluster, oracle: Oracle, length: int, most: int) -> None:
    ids = prompt(length, length)
    answer = await ask(cluster, request(ids, most, ignore_eos=False))
    assert answer.tokens == await asyncio.to_thread(oracle.greedy, ids, most)


async def test_an_id_in_flight_is_a_duplicate_and_free_at_once_after_an_abort(cluster: LocalCluster) -> None:
    ids = prompt(3, 200)
    wanted = (await ask(cluster, request(ids, 100))).tokens
    for _ in range(5):
        first = cluster.router.generate(request(ids, 100, name="same"))
        await anext(first)
        await anext(first)
        with pytest.raises(DuplicateRequest):
            await ask(cluster, request(ids, name="same"))
        await first.aclose()
    assert (await ask(cluster, request(ids, 100, name="same"))).tokens == wanted


# -- a worker trusts nobody ------------------------------------------------------------------------------------------


def to_prefill(**changes: Any) -> PrefillRequest:
    usual: dict[str, Any] = {
        "request_id": RequestId("direct"), "root": bytes(16), "tokens": token_buffers.pack([1, 2, 3]), "prompt_tokens": 3,
        "sampling": SamplingParams(max_tokens=4, temperature=0.0, seed=0),
    }  # fmt: skip
    return PrefillRequest(**{**usual, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": b""},
        {"tokens": b"\1\0\0"},
        {"tokens": token_buffers.pack([VOCABULARY])},
        {"tokens": token_buffers.pack([1] * (MOST + 64)), "prompt_tokens": MOST + 64},
        {"prompt_tokens": 0},
        {"prompt_tokens": 4},
        {"root": b"short"},
        {"sampling": SamplingParams(max_tokens=4, stop_token_ids=(VOCABULARY,), seed=0)},
        {"sampling": SamplingParams(max_tokens=4, logit_bias=((VOCABULARY, 1.0),), seed=0)},
    ],
)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_worker_refuses_what_a_router_should_not_have_sent(
    cluster: LocalCluster, role: Role, changes: dict[str, Any]
) -> None:
    asked = to_prefill(**changes)
    client: Any = cluster.workers()[PREFILL if role is Role.PREFILL else DECODE]

    async def send() -> None:
        if role is Role.PREFILL:
            await client.prefill(asked)
        else:
            decode = DecodeRequest(RequestId("direct"), asked.root, asked.tokens, asked.prompt_tokens, asked.sampling)
            async with contextlib.aclosing(client.decode(decode)) as stream:
                await anext(stream)

    with pytest.raises(InvalidRequest):
        await send()


@pytest.mark.parametrize("method", ["PrefillClient/prefill", "PrefillClient/report", "DecodeClient/decode"])
async def test_bytes_that_are_no_message_are_refused_and_harm_nobody(cluster: LocalCluster, method: str) -> None:
    protocol, _ = method.split("/")
    name = PREFILL if protocol == PrefillClient.__name__ else DECODE
    spec = cluster._children[name].spec.worker
    assert spec is not None
    async with grpc.aio.insecure_channel(f"unix:{spec.socket}") as channel:

        async def send(junk: bytes) -> None:
            if protocol == DecodeClient.__name__:
                async for _ in channel.unary_stream(f"/{method}")(junk):
                    pass
            else:
                await channel.unary_unary(f"/{method}")(junk)

        for junk in (b"", b"\xc1", b"\x91\xff", b"\x93\x01\x02\x03", bytes(100_000)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await send(junk)
            assert caught.value.code() is grpc.StatusCode.ABORTED
            assert "BadMessage" in (caught.value.details() or "")


# -- leaving ---------------------------------------------------------------------------------------------------------


async def leave(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()


@pytest.mark.parametrize("cold", [True, False])
async def test_leaving_while_prefill_computes(cluster: LocalCluster, cold: bool) -> None:
    start = prompt(10, 2000)
    if not cold:
        await ask(cluster, request(start, 1))
        await cluster.router.membership.settled()
    ids = (prompt(11, 2000) if cold else start) + prompt(12, 6000)
    for _ in range(3):
        task = asyncio.create_task(ask(cluster, request(ids)))
        name = await busy(cluster, Role.PRE_PREFILL if cold else Role.PREFILL)
        assert name == (PRE_PREFILL if cold else PREFILL)
        await leave(task)


async def test_leaving_while_queued_behind_another_prompt(cluster: LocalCluster) -> None:
    ids = prompt(20, 8000)
    first = asyncio.create_task(ask(cluster, request(ids)))
    await busy(cluster, Role.PRE_PREFILL)
    tasks = [asyncio.create_task(ask(cluster, request(prompt(21 + i, 7000 - i)))) for i in range(3)]

    async def all_there() -> bool:
        report = await cluster.workers()[PRE_PREFILL].report()
        return report.running + report.waiting >= 4 or first.done()

    await until(all_there, "all are at the worker")
    for task in tasks:
        await leave(task)
    assert len((await first).tokens) == 8


@pytest.mark.parametrize("close", [True, False])
async def test_leaving_between_the_first_token_and_decode(cluster: LocalCluster, close: bool) -> None:
    for i in range(3):
        asked = request(prompt(30 + i, 700), 50)
        if close:
            stream = cluster.router.generate(asked)
            assert (await anext(stream)).tokens
            await stream.aclose()
            continue
        first = asyncio.Event()

        async def consume(asked: GenerateRequest = asked, first: asyncio.Event = first) -> None:
            async for _ in cluster.router.generate(asked):
                first.set()

        task = asyncio.create_task(consume())
        await first.wait()
        await leave(task)


@pytest.mark.parametrize("taken", [2, 5, 30])
async def test_leaving_while_it_decodes(cluster: LocalCluster, taken: int) -> None:
    stream = cluster.router.generate(request(prompt(40 + taken, 300), 2000))
    for _ in range(taken):
        await anext(stream)
    await stream.aclose()


async def test_leaving_the_queue_and_being_turned_away_from_it(cluster: LocalCluster) -> None:
    admission = cluster.config.runtime.admission.model_copy(update={"max_in_flight": 1, "max_queued": 2})
    cluster.router.reconfigure(cluster.config.runtime.model_copy(update={"admission": admission, "handover_ttl_s": HANDOVER_TTL_S}))
    ids = prompt(50, 8000)
    first = asyncio.create_task(ask(cluster, request(ids)))
    await busy(cluster, Role.PRE_PREFILL)
    queued = [asyncio.create_task(ask(cluster, request(prompt(51 + i, 100)))) for i in range(2)]
    await asyncio.sleep(0)
    assert (cluster.router.counts.in_flight, cluster.router.counts.queued) == (1, 2)
    with pytest.raises(Overloaded) as caught:
        await ask(cluster, request(prompt(53, 4000)))
    assert caught.value.retry_after_s > 0
    await leave(queued[0])
    assert cluster.router.counts.queued == 1
    assert [len(a.tokens) for a in await asyncio.gather(first, queued[1])] == [8, 8]


async def test_many_leave_at_once_in_all_phases_and_the_rest_is_right(cluster: LocalCluster, oracle: Oracle) -> None:
    prompts = [prompt(60 + i // 2, 65 + 130 * (i // 2)) for i in range(16)]
    wanted = {tuple(p): await asyncio.to_thread(oracle.greedy, p, 40) for p in prompts[::2]}
    got: list[list[int]] = [[] for _ in prompts]

    async def run(i: int) -> None:
        await collect(cluster.router.generate(request(prompts[i], 40, ignore_eos=False)), got[i])

    tasks = [asyncio.create_task(run(i)) for i in range(len(prompts))]
    for i in range(0, len(tasks), 2):
        await asyncio.sleep(0.02)
        tasks[i].cancel()
    done = await asyncio.gather(*tasks, return_exceptions=True)
    for i, outcome in enumerate(done):
        whole = wanted[tuple(prompts[i])]
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome
        assert got[i] == (whole if outcome is None else whole[: len(got[i])])
    assert all(outcome is None for outcome in done[1::2])


# -- together --------------------------------------------------------------------------------------------------------


async def test_sixteen_equal_cold_prompts_are_computed_once(cluster: LocalCluster, oracle: Oracle) -> None:
    ids = prompt(90, 1500)
    wanted = await asyncio.to_thread(oracle.greedy, ids, 8)
    answers: list[Answer] = await asyncio.gather(*(ask(cluster, request(ids, ignore_eos=False)) for _ in range(16)))
    assert [a.tokens for a in answers] == [wanted] * 16
    reusable = (len(ids) - 1) // 64 * 64
    cached = sorted(a.usage.cached.total for a in answers)
    assert cached == [0] + [reusable] * 15, "each block was to be computed by one and taken by the others"


async def test_warming_pins_all_that_it_computed(cluster: LocalCluster) -> None:
    """The last blocks are written down after the computing has ended."""
    for i in range(5):
        ids = prompt(95 + i, 1030)
        warmed = await cluster.router.warm(request(ids, 1), ttl_s=0.5)
        assert (warmed.tokens, warmed.blocks, warmed.pinned_blocks) == (1030, 16, 16)
        await cluster.router.membership.refresh()
        answer = await ask(cluster, request(ids))
        assert answer.trace.route == "warm"
        assert answer.usage.cached.total == 1024

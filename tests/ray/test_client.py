"""CPDClient against a running system: sync and async, streams, cancellation, errors by type; and from a program that has only `cpd_ray`."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from cpd_ray import CPDClient
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, Unavailable, UnknownModel
from cpd_ray.results import SystemStatus
from tests.ray.conftest import REPOSITORY, RayCluster
from tests.ray.system import BLOCK, System

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"max_tokens": 30_000, "ignore_eos": True, "temperature": 0}
"""An answer that takes minutes."""


@pytest.fixture(scope="module")
def client(system: System) -> CPDClient:
    return CPDClient(timeout_s=120)


def eventually(found: Callable[[], bool], timeout_s: float = 30) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline_s, "it never came about"


def idle(status: SystemStatus) -> bool:
    return status.in_flight == 0 and all(
        w.running == w.waiting == 0 and w.pool.active == w.pool.leased == 0 for w in status.workers
    )


def prompt(name: str, length: int = 200) -> str:
    return (f"{name}: " + "the quick brown fox jumps over the lazy dog. " * (length // 40 + 1))[:length]


def test_an_answer_tells_its_text_counts_tiers_and_way(client: CPDClient) -> None:
    text = prompt("counts")
    cold = client.generate(text, max_tokens=8, temperature=0, ignore_eos=True, request_id="mine")
    assert "mine" in cold.id
    assert cold.completion_tokens == 8
    assert (cold.usage.cached_tokens, cold.cached.total) == (0, 0)  # type: ignore[union-attr]
    assert cold.route == "cold"
    assert cold.reason
    assert 0 < cold.ttft_s < 60  # type: ignore[operator]
    expected = (cold.prompt_tokens - 1) // BLOCK * BLOCK
    eventually(lambda: client.plan(text).chosen.cached.total == expected)
    warm = client.generate(text, max_tokens=8, temperature=0, ignore_eos=True)
    assert warm.text == cold.text
    assert warm.prompt_tokens == cold.prompt_tokens
    assert warm.route == "warm"
    assert warm.usage.cached_tokens == warm.cached.total == expected  # type: ignore[union-attr]
    assert warm.raw["usage"]["prompt_tokens_details"]["cached_tokens"] == expected


async def test_streams_and_async_calls_give_the_same_text(client: CPDClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    text = prompt("same")
    whole = await client.agenerate(text, **fields)
    async with aclosing(client.astream(text, **fields)) as stream:
        pieces = [chunk async for chunk in stream]
    plain = await asyncio.to_thread(lambda: list(client.stream(text, **fields)))
    for chunks in (pieces, plain):
        assert "".join(c.text for c in chunks) == whole.text
        assert chunks[-2].finish_reason == whole.choices[0].finish_reason == "length"
        assert chunks[-1].usage.completion_tokens == 24  # type: ignore[union-attr]
        assert chunks[-1].trace.workers  # type: ignore[union-attr]
    both = await asyncio.gather(*(client.agenerate(text, **fields) for _ in range(4)))
    assert {answer.text for answer in both} == {whole.text}


def test_prompts_may_be_text_ids_buffers_or_messages(client: CPDClient) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}
    ids = [104, 105, 32, 116, 104, 101, 114, 101]
    of_ids = client.generate(ids, **fields)
    assert of_ids.prompt_tokens == len(ids)
    assert client.generate(token_buffers.pack(ids), **fields).text == of_ids.text
    two = client.generate([ids, ids[:4]], **fields)
    assert [c.index for c in two.choices] == [0, 1]
    assert two.text == of_ids.text
    messages = [{"role": "user", "content": "hello"}]
    chat = client.generate(messages=messages, **fields)
    assert chat.text == "".join(c.text for c in client.stream(messages=messages, **fields))
    assert client.generate(messages=messages, n=2, **fields).choices[1].text == chat.text


async def test_what_is_given_up_ends_in_the_system(client: CPDClient) -> None:
    def busy() -> bool:
        return client.status().in_flight == 1

    def all_idle() -> bool:
        return idle(client.status())

    stream = client.stream(prompt("closed"), **LONG)
    next(stream)
    assert busy()
    stream.close()
    eventually(all_idle)
    list_of_one = [client.stream(prompt("forgotten"), **LONG)]
    next(list_of_one[0])
    list_of_one.clear()
    eventually(all_idle)
    async with aclosing(client.astream(prompt("left"), **LONG)) as chunks:
        await anext(chunks)
        assert await asyncio.to_thread(busy)
    await asyncio.to_thread(eventually, all_idle)
    call = asyncio.create_task(client.agenerate(prompt("cancelled"), **LONG))
    await asyncio.to_thread(eventually, busy)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await asyncio.to_thread(eventually, all_idle)
    with pytest.raises(DeadlineExceeded):
        await client.agenerate(prompt("late"), timeout_s=1.5, **LONG)
    with pytest.raises(DeadlineExceeded):
        list(client.stream(prompt("late stream"), timeout_s=1.5, **LONG))
    await asyncio.to_thread(eventually, all_idle)
    assert client.generate("after all that", max_tokens=2).completion_tokens >= 1


def test_errors_arrive_by_type_with_their_fields(client: CPDClient) -> None:
    with pytest.raises(InvalidRequest) as wrong:
        client.generate("x", temprature=1)
    assert wrong.value.param == "temprature"
    assert type(wrong.value) is InvalidRequest
    with pytest.raises(InvalidRequest) as wrong:
        list(client.stream("x", temperature=-1))
    assert wrong.value.param == "temperature"
    with pytest.raises(UnknownModel):
        client.plan("x", model="other")
    with pytest.raises(ContextLengthExceeded):
        client.generate([5] * 50_000, max_tokens=1)
    with pytest.raises(Unavailable):
        CPDClient("nobody")


def test_messages_above_the_quick_ways_limit_get_through(client: CPDClient) -> None:
    large = "x" * 6 * 2**20
    with pytest.raises(InvalidRequest) as wrong:
        client.generate("x", user=large)
    assert wrong.value.param == "user"
    with pytest.raises(InvalidRequest) as wrong:
        next(client.stream("x", user=large))
    assert wrong.value.param == "user"


async def test_plan_warm_status_and_reset(client: CPDClient) -> None:
    text = prompt("warmed", 400)
    before = client.plan(text)
    assert before.chosen in before.considered
    assert before.chosen.cached.total == 0
    assert before.chosen.new_tokens == before.prompt_tokens
    warmed = await client.awarm(text, ttl_s=5)
    assert (warmed.prompt_tokens, warmed.blocks) == (before.prompt_tokens, before.prompt_tokens // BLOCK)
    expected = (warmed.prompt_tokens - 1) // BLOCK * BLOCK
    await asyncio.to_thread(eventually, lambda: client.plan(text).chosen.cached.total == expected)
    assert (await client.agenerate(text, max_tokens=1)).usage.cached_tokens == expected
    status = await client.astatus()
    assert {w.role for w in status.workers} == {"pre_prefill", "prefill", "decode"}
    assert status.directory_keys >= warmed.blocks
    assert sum(n.slab.used for n in status.nodes) >= warmed.blocks
    dropped = await client.areset(["pool"])
    assert set(dropped) == {"pool"}
    assert dropped["pool"] >= warmed.blocks
    assert set(client.reset()) >= {"pool", "node"}


def test_a_client_travels_to_another_process(client: CPDClient) -> None:
    copy = pickle.loads(pickle.dumps(client))
    assert copy.generate("x", max_tokens=1).completion_tokens == 1


@pytest.mark.parametrize("quick", ["0", "1"])
def test_a_program_with_packages_of_its_own_needs_only_cpd_ray(
    client: CPDClient, cluster: RayCluster, tmp_path: Path, quick: str
) -> None:
    program = tmp_path / "program"
    (program / "actors").mkdir(parents=True)
    (program / "actors" / "__init__.py").write_text("")
    (program / "actors" / "names.py").write_text("MINE = 'the other program'\n")
    (program / "main.py").write_text((Path(__file__).parent / "other_program.py").read_text())
    only = tmp_path / "only"
    only.mkdir()
    (only / "cpd_ray").symlink_to(REPOSITORY / "cpd_ray")
    env = {**os.environ, "PYTHONPATH": str(only), "RAY_SERVE_THROUGHPUT_OPTIMIZED": quick, "RAY_ADDRESS": cluster.address}
    done = subprocess.run(
        [sys.executable, "main.py", "cpd"], cwd=program, env=env, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["driver"] == {
        "torch": False, "ray_before": False, "ours_loaded": [], "mine": "the other program", "quick": quick == "1",
        "sync": told["expected"], "stream": told["expected"], "async": told["expected"], "twice": told["expected"], "param": "temprature",
    }  # fmt: skip
    # (in this cluster replicas see the paths of the test's own driver, who started Serve: whose `actors` they find says nothing)
    assert told["replica"] == {"answer": told["expected"], "param": "temprature"}


def test_the_examples_run(client: CPDClient, system: System, cluster: RayCluster) -> None:
    env = {**os.environ, "RAY_ADDRESS": cluster.address}
    told = {}
    for arguments in (
        ["openai_client.py", "Who are you?", "--url", f"{system.url}/v1", "--max-tokens=8"],
        ["warm_documents.py", "LICENSE", "--url", system.url, "--ttl-s=5"],
        ["handle_client.py"],
    ):
        command = [sys.executable, str(REPOSITORY / "examples" / arguments[0]), *arguments[1:]]
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False, timeout=200)
        assert done.returncode == 0, done.stderr[-3000:]
        told[arguments[0]] = done.stdout
    assert "prompt tokens cached" in told["openai_client.py"]
    assert "blocks pinned" in told["warm_documents.py"]
    assert "temprature" in told["handle_client.py"]
    assert told["handle_client.py"].count("prompt tokens cached") == 2

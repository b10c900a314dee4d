"""A client that leaves, in whichever phase, leaves nothing running. Over a real server, with real sockets."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from actors.http.app import HttpSettings
from actors.http.fake_face import Script
from actors.http.limits import HttpLimits
from actors.http.sse import merged, while_connected
from cpd_ray.errors import Aborted, DeadlineExceeded, Unavailable


async def send(address: str, body: dict[str, Any]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = address.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await writer.drain()
    return reader, writer


async def leave(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("hold_after", [0, 2])
async def test_leaving_aborts_the_answer(make_app: Any, stream: bool, n: int, hold_after: int) -> None:
    """Before the first token and after it (vllm#46283, #41269, #29906: stranded blocks)."""
    app = make_app(Script(hold_after=hold_after))
    async with app.served() as address:
        reader, writer = await send(address, {"prompt": "abcdef", "stream": stream, "n": n})
        await asyncio.wait_for(app.face.until(running=n), 30)
        if stream and hold_after:
            while b"data: " not in await reader.readline():
                pass
        await leave(writer)
        await asyncio.wait_for(app.face.until(running=0), 30)
        app.face.script.release.set()
        reader, writer = await send(address, {"prompt": "ab"})
        assert b"200" in await reader.readline()
        await leave(writer)


async def test_two_hundred_random_disconnects_leave_nothing(make_app: Any) -> None:
    """vllm-project/router#215: load counters leaked on each one."""
    app = make_app(Script())
    rng = random.Random(9)

    async def one(address: str) -> None:
        body = {
            "prompt": "abcdef" * 20,
            "stream": rng.random() < 0.7,
            "n": rng.randrange(1, 4),
            "ignore_eos": True,
            "max_tokens": 300,
        }
        reader, writer = await send(address, body)
        for _ in range(rng.randrange(6)):
            await reader.readline()
        await leave(writer)

    async with app.served() as address:
        for _ in range(20):
            await asyncio.gather(*(one(address) for _ in range(10)))
        await asyncio.wait_for(app.face.until(running=0), 60)
        reader, writer = await send(address, {"prompt": "ab"})
        assert b"200" in await reader.readline()
        await leave(writer)
    assert len(app.face.seen) > 200


async def test_a_slow_reader_slows_its_own_answer_only(make_app: Any) -> None:
    """What is not read is not generated without bound: the socket's buffers fill, then the generator is no longer asked."""
    app = make_app(Script())
    said = 0
    generate = app.face.generate

    async def counting(request: Any) -> Any:
        nonlocal said
        async for chunk in generate(request):
            said += request.prompt_tokens > 10
            yield chunk

    app.face.generate = counting
    async with app.served() as address:
        slow = [await send(address, {"prompt": "p" * 100, "stream": True, "ignore_eos": True, "max_tokens": 3996, "n": 16})]
        slow += [await send(address, {"prompt": "p" * 100, "stream": True, "ignore_eos": True, "max_tokens": 3996, "n": 16})]
        for _ in range(20):
            reader, writer = await send(address, {"prompt": "ab"})
            assert b"200" in await reader.readline()
            await leave(writer)
        for _, writer in slow:
            await leave(writer)
        await asyncio.wait_for(app.face.until(running=0), 60)
    assert said < 2 * 16 * 3996


async def test_leaving_or_dawdling_within_the_body_is_no_server_error(make_app: Any, caplog: pytest.LogCaptureFixture) -> None:
    app = make_app(settings=HttpSettings(limits=HttpLimits(body_timeout_s=0.1)))
    async with app.served() as address:
        host, port = address.removeprefix("http://").split(":")
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
        for stays in (False, True):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(head)
            await writer.drain()
            if stays:
                assert b" 400 " in await reader.readline()
            await leave(writer)
        reader, writer = await send(address, {"prompt": "ab"})
        assert b"200" in await reader.readline()
        await leave(writer)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -- the parts -------------------------------------------------------------------------------------------------------


class Client:
    """An ASGI receive: the client leaves when told to."""

    def __init__(self) -> None:
        self.left = asyncio.Event()

    async def receive(self) -> dict[str, str]:
        await self.left.wait()
        return {"type": "http.disconnect"}


async def test_work_ends_with_its_result_its_client_or_its_time() -> None:
    cleaned: list[str] = []

    async def work(name: str, forever: bool) -> str:
        try:
            if forever:
                await asyncio.Event().wait()
            return name
        finally:
            await asyncio.sleep(0)
            cleaned.append(name)

    client = Client()
    assert await while_connected(client.receive, work("done", False), timeout_s=5) == "done"
    with pytest.raises(DeadlineExceeded):
        await while_connected(client.receive, work("late", True), timeout_s=0.01)
    client.left.set()
    with pytest.raises(Aborted):
        await while_connected(client.receive, work("gone", True), timeout_s=5)
    outer = asyncio.ensure_future(while_connected(Client().receive, work("stopped", True), timeout_s=5))
    await asyncio.sleep(0.01)
    outer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await outer
    assert cleaned == ["done", "late", "gone", "stopped"]
    assert len(asyncio.all_tasks()) == 1


async def test_merged_streams_keep_each_stream_s_order_and_close_on_failure() -> None:
    closed: list[int] = []

    async def stream(number: int, length: int, fail: bool = False) -> Any:
        try:
            for i in range(length):
                await asyncio.sleep(0)
                yield i
            if fail:
                raise Unavailable("gone")
        finally:
            closed.append(number)

    got = [item async for item in merged([stream(i, 20 * i) for i in range(4)])]
    for number in range(4):
        assert [i for n, i in got if n == number] == list(range(20 * number))
    assert sorted(closed) == [0, 1, 2, 3]
    closed.clear()
    failing = merged([stream(0, 10**6), stream(1, 5, fail=True), stream(2, 10**6)])
    with pytest.raises(Unavailable):
        await anext(item async for item in failing if item[0] == 9)
    assert sorted(closed) == [0, 1, 2]
    closed.clear()
    left = merged([stream(0, 10**6), stream(1, 10**6)])
    await anext(left)
    await left.aclose()
    assert sorted(closed) == [0, 1]
    assert len(asyncio.all_tasks()) == 1

"""A deployment of no use but to be addressed: it says who it is, fails, waits and streams when asked to, and tells what became of its calls."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from ray import serve
from ray.serve.config import RequestRouterConfig

from actors.ray_handles import ReplicaCaller, end_call, replicas
from actors.targets import TARGET_ROUTER, session_for
from cpd_ray.errors import CacheMissed, WorkerGone


@dataclass(frozen=True)
class Who:
    replica_id: str
    pid: int


def own_id() -> str:
    return str(serve.get_replica_context().replica_id.unique_id)


class EchoClient(Protocol):
    """What Echo answers."""

    async def who(self) -> Who: ...

    async def bounce(self, cached_tokens: int) -> None: ...

    async def fault(self) -> None: ...

    async def wait(self, name: str) -> str: ...

    def count(self, name: str, numbers: int) -> AsyncGenerator[tuple[str, int], None]: ...

    def fail_after(self, items: int) -> AsyncGenerator[int, None]: ...

    async def give_up(self) -> None: ...

    async def size(self, blob: bytes) -> int: ...

    async def blob(self, nbytes: int) -> bytes: ...

    def sizes(self, blob: bytes) -> AsyncGenerator[int, None]: ...

    async def let_go(self) -> None: ...

    async def state(self) -> tuple[set[str], list[str]]: ...


class Echo:
    def __init__(self) -> None:
        self.cancelled: list[str] = []
        self.waiting: set[str] = set()
        self.release = asyncio.Event()

    async def who(self) -> Who:
        return Who(own_id(), os.getpid())

    async def bounce(self, cached_tokens: int) -> None:
        raise CacheMissed("less than believed", cached_tokens=cached_tokens)

    async def fault(self) -> None:
        raise ZeroDivisionError("an error that is none of ours")

    async def wait(self, name: str) -> str:
        self.waiting.add(name)
        try:
            await self.release.wait()
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        finally:
            self.waiting.discard(name)
        return own_id()

    async def count(self, name: str, numbers: int) -> AsyncGenerator[tuple[str, int], None]:
        """Numbers at once, and then nothing until released."""
        self.waiting.add(name)
        try:
            for number in range(numbers):
                yield own_id(), number
            await self.release.wait()
            yield own_id(), numbers
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.append(name)
            raise
        finally:
            self.waiting.discard(name)

    async def fail_after(self, items: int) -> AsyncGenerator[int, None]:
        for item in range(items):
            yield item
        raise CacheMissed("less than believed", cached_tokens=items)

    async def give_up(self) -> None:
        raise asyncio.CancelledError

    async def size(self, blob: bytes) -> int:
        return len(blob)

    async def blob(self, nbytes: int) -> bytes:
        return bytes(nbytes)

    async def sizes(self, blob: bytes) -> AsyncGenerator[int, None]:
        yield len(blob)

    async def let_go(self) -> None:
        self.release.set()

    async def state(self) -> tuple[set[str], list[str]]:
        return self.waiting, self.cancelled


class Caller:
    """Calls the echoes from within the cluster, where handles run in the replica's own loop."""

    def __init__(self, echo: Any) -> None:
        self._echo = echo
        self._kept: list[asyncio.Task[str]] = []

    async def _clients(self) -> dict[str, EchoClient]:
        return await echoes(self._echo)

    async def all(self, times: int) -> list[tuple[str, str]]:
        """(asked for, answered) of many calls at once within one request."""
        clients = await self._clients()
        asked = list(clients) * times
        answers = await asyncio.gather(*(clients[i].who() for i in asked))
        return [(i, a.replica_id) for i, a in zip(asked, answers, strict=True)]

    async def bounce(self, cached_tokens: int) -> None:
        for client in (await self._clients()).values():
            await client.bounce(cached_tokens)

    async def keep(self, name: str) -> None:
        """Start a call that others may need, then wait for ever."""
        for client in (await self._clients()).values():
            self._kept.append(asyncio.create_task(client.wait(name)))
        await asyncio.Event().wait()

    async def kept(self) -> list[str]:
        return list(await asyncio.gather(*self._kept))

    async def moments(self) -> None:
        (client, *_) = (await self._clients()).values()
        await cancel_at_moments(client)

    async def unasked(self, name: str) -> None:
        """Cancel a call that was assigned to a replica before anyone asked for its result."""
        (replica, *_) = await self._clients()
        counting = self._echo.options(method_name="count", stream=True, session_id=session_for(replica), _by_reference=False)
        response = counting.remote(name, 0)
        await until(response._replica_result_future.done)
        end_call(response)

    async def relay(self, name: str, numbers: int) -> AsyncGenerator[tuple[str, int], None]:
        (client, *_) = (await self._clients()).values()
        async with aclosing(client.count(name, numbers)) as items:
            async for item in items:
                yield item


async def cancel_at_moments(client: EchoClient) -> None:
    """Cancel calls and streams sooner and later after their start."""
    for turns in range(60):
        call = asyncio.create_task(client.wait(f"call{turns}"))
        stream = asyncio.create_task(anext(client.count(f"stream{turns}", 0)))
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in (call, stream):
            task.cancel()
        await asyncio.gather(call, stream, return_exceptions=True)


async def until(holds: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Wait for what another process will bring about."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = holds()
            if asyncio.iscoroutine(result):
                result = await result
            if result:
                return result
            await asyncio.sleep(0.02)


async def echoes(handle: Any, count: int = 1) -> dict[str, EchoClient]:
    """A client a replica, once there are `count` or more."""
    there = await until(lambda: found if len(found := replicas(handle)) >= count else None)
    ids = [r.replica_id.unique_id for r in there]
    return {i: ReplicaCaller(handle, i, WorkerGone).client(EchoClient) for i in ids}


def targeted(deployment: Any, count: int, **options: Any) -> Any:
    """`count` replicas of a deployment, each addressable."""
    return deployment.options(
        num_replicas=count,
        request_router_config=RequestRouterConfig(request_router_class=TARGET_ROUTER),
        ray_actor_options={"num_cpus": 0.1},
        **{"max_ongoing_requests": 100, "graceful_shutdown_wait_loop_s": 0.1, **options},
    )


def echo_deployment(count: int, **options: Any) -> Any:
    return targeted(serve.deployment(Echo), count, **options)


def caller_app(count: int) -> Any:
    """A Caller over `count` echoes."""
    return (
        serve.deployment(Caller)
        .options(ray_actor_options={"num_cpus": 0.1}, max_ongoing_requests=100, graceful_shutdown_wait_loop_s=0.1)
        .bind(echo_deployment(count).bind())
    )

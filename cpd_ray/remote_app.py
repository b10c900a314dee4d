"""Calls to a Serve application's ingress, from any thread or event loop, as plain data.

Owns all that the client knows of Ray: one event loop in a thread of its own, on which every call of this process runs (in Serve's quick mode a
handle works only on one running loop), the translation of Ray's errors, and the end of remote work that nobody waits for any more. Ray is
imported when an application is first opened. Invariant: whoever gives a call or a stream up, by timeout, cancellation or close, ends it at
the other end too; and only CPDErrors leave.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, TypeVar

from cpd_ray.errors import CPDError, DeadlineExceeded, Overloaded, Unavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

_starting = threading.RLock()  # re-entrant: collecting a stream asks for the loop too


@cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="cpd-ray-client", daemon=True).start()
    return loop


def _loop() -> asyncio.AbstractEventLoop:
    """The process's loop for calls. It ends with the process, for Serve's handles live on it."""
    with _starting:
        return _started_loop()


def _submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """In a context of its own: else Serve takes the call for a part of the request that the caller happens to serve."""
    return contextvars.Context().run(asyncio.run_coroutine_threadsafe, work, _loop())


def _wait(work: Coroutine[Any, Any, T]) -> T:
    """Block for the result; an interrupt ends the work."""
    future = _submit(work)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


class RemoteApp:
    """One application's ingress. Raises Unavailable when there is no Ray cluster, no Serve or no such application."""

    def __init__(self, name: str) -> None:
        import ray
        from ray import serve
        from ray.serve.exceptions import RayServeException

        self._name = name
        try:
            if not ray.is_initialized():
                ray.init(address="auto", log_to_driver=False, logging_level=logging.WARNING)
            handle = serve.get_app_handle(name)
        except ConnectionError as error:
            raise Unavailable("no Ray cluster is running here: start one, or set RAY_ADDRESS", code="no_cluster") from error
        except RayServeException as error:
            raise Unavailable(f"no application {name!r} runs on this Ray cluster", code="no_application") from error
        self._handle = _wait(_quick(handle))

    def call(self, method: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The method's result; blocks."""
        return _wait(self._call(method, arguments, timeout_s))

    async def acall(self, method: str, *arguments: Any, timeout_s: float | None) -> Any:
        """The method's result."""
        return await asyncio.wrap_future(_submit(self._call(method, arguments, timeout_s)))

    def stream(self, method: str, *arguments: Any, timeout_s: float | None) -> Generator[Any, None, None]:
        """The method's items; `next` blocks. `timeout_s` is for the whole stream."""
        items = _Items(self._ways(method, stream=True), arguments, self._errors, timeout_s)
        try:
            while (item := _wait(items.next())) is not _END:
                yield item
        finally:
            items.end_soon()

    async def astream(self, method: str, *arguments: Any, timeout_s: float | None) -> AsyncGenerator[Any, None]:
        """The method's items. `timeout_s` is for the whole stream."""
        items = _Items(self._ways(method, stream=True), arguments, self._errors, timeout_s)
        try:
            while (item := await asyncio.wrap_future(_submit(items.next()))) is not _END:
                yield item
        finally:
            items.end_soon()

    async def _call(self, method: str, arguments: tuple[Any, ...], timeout_s: float | None) -> Any:
        with self._errors():
            async with asyncio.timeout(timeout_s):
                direct, by_reference = self._ways(method, stream=False)
                try:
                    return await _answer(direct, arguments)
                except Exception as error:
                    if not _too_large(error):
                        raise
                return await _answer(by_reference, arguments)

    def _ways(self, method: str, *, stream: bool) -> tuple[Any, Any]:
        """The quick way, and the one for messages above the quick one's size limit."""
        direct = self._handle.options(method_name=method, stream=stream)
        return direct, direct.options(_by_reference=True)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError as error:
            raise DeadlineExceeded("the answer did not come in time") from error
        except asyncio.CancelledError as error:
            if _given_up():
                raise
            # the other end was cancelled, not we: Serve hands its CancelledError on as if it were ours
            raise Unavailable(f"the application {self._name!r} gave up the call") from error
        except Exception as error:
            if _given_up():  # Serve may have answered the end of the call before the cancellation came through
                raise asyncio.CancelledError from error
            raise self._translated(error) from error

    def _translated(self, error: Exception) -> CPDError:
        import grpc
        from ray.exceptions import RayError, RayTaskError
        from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, CPDError):
            return cause
        if isinstance(cause, BackPressureError):
            return Overloaded("the application takes no more calls now")
        gone = isinstance(cause, grpc.aio.AioRpcError) and cause.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        if (
            gone
            or isinstance(cause, (DeploymentUnavailableError, RayServeException))
            or (isinstance(cause, RayError) and cause is error)
        ):
            return Unavailable(f"the application {self._name!r} can't be reached")
        log.error("a call of the application %s failed", self._name, exc_info=error)
        return CPDError("the application failed to answer this call")


def _given_up() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


_END = object()


class _Items:
    """A stream, item by item, each awaited by a task of its own on the loop. Invariant: after `end_soon` nothing goes on at the other end."""

    def __init__(
        self,
        ways: tuple[Any, Any],
        arguments: tuple[Any, ...],
        errors: Callable[[], AbstractContextManager[None]],
        timeout_s: float | None,
    ) -> None:
        self._ways = ways
        self._arguments = arguments
        self._errors = errors
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._response: Any = None
        self._over = False

    async def next(self) -> Any:
        """The next item, or _END."""
        with self._errors():
            first = self._response is None
            if first:
                self._deadline_s = None if self._timeout_s is None else _loop().time() + self._timeout_s
                self._response = self._ways[0].remote(*self._arguments)
            async with asyncio.timeout_at(self._deadline_s):
                try:
                    return await self._item()
                except Exception as error:
                    if not first or not _too_large(error):
                        raise
                self._response = self._ways[1].remote(*self._arguments)
                return await self._item()

    async def _item(self) -> Any:
        try:
            return await anext(self._response)
        except StopAsyncIteration:
            self._over = True
            return _END

    def end_soon(self) -> None:
        """End the remote work, if there is any left. Does not block: a generator may be collected in any thread, the loop's too."""
        _loop().call_soon_threadsafe(self._end)

    def _end(self) -> None:
        if self._response is not None and not self._over:
            self._over = True
            _end_call(self._response)


async def _quick(handle: Any) -> Any:
    """The handle, its router made on this loop."""
    return handle.options(_by_reference=False)


async def _answer(handle: Any, arguments: tuple[Any, ...]) -> Any:
    response = handle.remote(*arguments)
    try:
        return await response
    except asyncio.CancelledError:
        _end_call(response)
        raise


def _end_call(response: Any) -> None:
    """Also when the call had been assigned and its result not yet asked for: Serve's own cancel overlooks that where handles run in the
    caller's loop."""
    response.cancel()
    assigned = response._replica_result_future
    if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()


def _too_large(error: Exception) -> bool:
    import grpc

    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

"""Workers and KV-cache nodes as Serve replicas: clients that call one replica each, and the roster of who is there now.

Owns all that this project knows of Serve handles and Ray's errors. Decides nothing, keeps no load figures. Invariant: a call raises `gone` when
its replica is dead, draining or unreachable, the very CPDError that the other end raised, or a CPDError without detail; its work ends with it.

It leans on two internals of Ray 2.60 that `tests/ray/test_handles.py` pins: where a handle keeps its request router, and where a response
keeps the call that it stands for.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc
from ray import serve
from ray.exceptions import NodeDiedError, OwnerDiedError, RayActorError, RayTaskError, TaskCancelledError, WorkerCrashedError
from ray.serve._private.request_router import RunningReplica
from ray.serve.exceptions import DeploymentUnavailableError, ReplicaUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle

from actors.clients import DecodeClient, PrefillClient
from actors.targets import session_for
from cpd_ray.errors import CPDError, PeerGone, WorkerGone
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import Role
from kv.node import KvNode

log = logging.getLogger(__name__)

_GONE = (
    RayActorError, WorkerCrashedError, NodeDiedError, OwnerDiedError, TaskCancelledError, RequestCancelledError, DeploymentUnavailableError,
    ReplicaUnavailableError,
)  # fmt: skip
_GONE_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


def own_replica_id() -> str:
    """The unique id of the replica that this code runs in."""
    return str(serve.get_replica_context().replica_id.unique_id)


def own_worker_id() -> WorkerId:
    """The name by which routers know the worker that this replica is."""
    context = serve.get_replica_context()
    return _worker_id(context.deployment, own_replica_id())


def _worker_id(deployment: str, replica_id: str) -> WorkerId:
    return WorkerId(f"{deployment}-{replica_id}")


def handle_of(deployment: str, app: str) -> DeploymentHandle[Any]:
    """A handle of a deployment that need not be there yet, or any more."""
    return serve.get_deployment_handle(deployment, app, _check_exists=False)


def replicas(handle: DeploymentHandle[Any]) -> list[RunningReplica]:
    """Replicas of a deployment with the router of `actors.targeting` that take calls now, as far as this process knows; none before the first
    news came.

    Where handles run in the caller's loop (see `RAY_SERVE_THROUGHPUT_OPTIMIZED`), a handle's first use must be from one.
    """
    if not handle.is_initialized:
        handle._init()
    router = handle._router._asyncio_router.request_router
    return list(router.within_reach().values()) if router is not None else []


class ReplicaCaller:
    """Calls methods of one replica. `gone(message)`: the error when it can't be reached. `by_reference`: slower, but results may hold object
    references."""

    def __init__(self, handle: DeploymentHandle[Any], replica_id: str, gone: type[CPDError], *, by_reference: bool = False) -> None:
        self._handle = handle.options(session_id=session_for(replica_id), _by_reference=by_reference)
        self._gone = gone
        self._who = f"{handle.deployment_name} {replica_id}"

    def client(self, protocol: Any, **attributes: Any) -> Any:
        """An object with the methods of `protocol` (a class), each a call; `attributes` are set on it as they are."""
        members: dict[str, Any] = {
            name: self._unary(name) if inspect.iscoroutinefunction(function) else self._stream(name)
            for name, function in inspect.getmembers(protocol, inspect.isfunction)
            if not name.startswith("_")
        }
        return type(f"{protocol.__name__}Replica", (), {**attributes, **members})()

    def _unary(self, method: str) -> Callable[..., Any]:
        direct, by_reference = self._ways(method, stream=False)

        async def call(_: object, *arguments: Any) -> Any:
            with self._errors(method):
                try:
                    return await _answer(direct, arguments)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                return await _answer(by_reference, arguments)

        return call

    def _stream(self, method: str) -> Callable[..., AsyncGenerator[Any, None]]:
        direct, by_reference = self._ways(method, stream=True)

        async def items(_: object, *arguments: Any) -> AsyncGenerator[Any, None]:
            with self._errors(method):
                started = False
                try:
                    async for item in _items(direct, arguments):
                        started = True
                        yield item
                    return
                except grpc.aio.AioRpcError as error:
                    if started or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise
                async for item in _items(by_reference, arguments):
                    yield item

        return items

    def _ways(self, method: str, *, stream: bool) -> tuple[DeploymentHandle[Any], DeploymentHandle[Any]]:
        """The quick way, and the one for messages above the quick one's size limit (4 MiB unless Serve is told otherwise)."""
        direct = self._handle.options(method_name=method, stream=stream)
        return direct, direct.options(_by_reference=True)

    @contextmanager
    def _errors(self, method: str) -> Iterator[None]:
        try:
            yield
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # the other end was cancelled, not we: Serve hands its CancelledError on as if it were ours
            raise self._gone(f"{self._who} gave up the call") from error
        except Exception as error:
            raise self._translated(method, error) from error

    def _translated(self, method: str, error: Exception) -> CPDError:
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, WorkerGone) and not isinstance(cause, self._gone):
            return self._gone(cause.message)
        if isinstance(cause, CPDError):
            return cause
        if isinstance(cause, _GONE) or (isinstance(cause, grpc.aio.AioRpcError) and cause.code() in _GONE_CODES):
            return self._gone(f"{self._who} is gone")
        log.error("%s.%s failed", self._who, method, exc_info=error)
        return CPDError("a call between actors failed")


def _start(handle: DeploymentHandle[Any], arguments: tuple[Any, ...]) -> Any:
    """Send a call that belongs to no other: else Serve, when a client leaves, would cancel also what must outlive its request."""
    return contextvars.Context().run(handle.remote, *arguments)


async def _answer(handle: DeploymentHandle[Any], arguments: tuple[Any, ...]) -> Any:
    response = _start(handle, arguments)
    try:
        return await response
    except asyncio.CancelledError:
        end_call(response)
        raise


async def _items(handle: DeploymentHandle[Any], arguments: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
    response = _start(handle, arguments)
    ended = False
    try:
        async for item in response:
            yield item
        ended = True
    finally:
        if not ended:
            end_call(response)


def end_call(response: Any) -> None:
    """End the remote work of a Serve response, also when the call had been assigned and nobody had asked for its result yet: Serve's own cancel
    overlooks that where handles run in the caller's loop."""
    response.cancel()
    assigned = response._replica_result_future
    if assigned.done() and not assigned.cancelled() and assigned.exception() is None:
        assigned.result().cancel()


class ServeRoster:
    """Who is there now: the replicas of each role's deployment, and the KV-cache replica of each node (named by Ray's node id)."""

    def __init__(self, workers: Mapping[Role, DeploymentHandle[Any]], nodes: DeploymentHandle[Any] | None = None) -> None:
        self._worker_handles = dict(workers)
        self._node_handle = nodes
        self._workers: dict[WorkerId, PrefillClient | DecodeClient] = {}
        self._nodes: dict[tuple[NodeId, str], KvNode] = {}

    def workers(self) -> Mapping[WorkerId, PrefillClient | DecodeClient]:
        """A client a worker that takes calls; the same object for as long as it stays."""
        present: dict[WorkerId, PrefillClient | DecodeClient] = {}
        for role, handle in self._worker_handles.items():
            for replica in replicas(handle):
                replica_id = replica.replica_id.unique_id
                worker = _worker_id(handle.deployment_name, replica_id)
                present[worker] = self._workers.get(worker) or _worker_client(role, handle, replica_id)
        self._workers = present
        return dict(present)

    def nodes(self) -> Mapping[NodeId, KvNode]:
        """A client a node whose KV-cache replica takes calls; another one when that replica was replaced."""
        present: dict[tuple[NodeId, str], KvNode] = {}
        for replica in replicas(self._node_handle) if self._node_handle is not None else ():
            replica_id, node = replica.replica_id.unique_id, NodeId(replica.node_id)
            present[node, replica_id] = self._nodes.get((node, replica_id)) or node_client(self._node_handle, replica_id, node)
        self._nodes = present
        return {node: client for (node, _), client in present.items()}


def _worker_client(role: Role, handle: DeploymentHandle[Any], replica_id: str) -> PrefillClient | DecodeClient:
    caller = ReplicaCaller(handle, replica_id, WorkerGone)
    client: PrefillClient | DecodeClient = caller.client(DecodeClient if role is Role.DECODE else PrefillClient)
    return client


def node_client(handle: DeploymentHandle[Any], replica_id: str, node: NodeId) -> KvNode:
    """The KV-cache replica `replica_id` of `node`, as others see it."""
    client: KvNode = ReplicaCaller(handle, replica_id, PeerGone).client(KvNode, node=node)
    return client

"""Calls between the processes of a local cluster: gRPC on unix sockets, msgpack messages, one service a typed protocol.

Owns the mapping from a protocol's methods to calls and of errors to their own types. No pickle. Invariant: a call raises what the
method raised, by type, or `gone` when the other process can't be reached; cancelling a call cancels it at the other end.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args, get_type_hints

import grpc
import msgspec

from cpd_ray import errors
from cpd_ray.errors import BadMessage, CPDError

log = logging.getLogger(__name__)

P = TypeVar("P")

OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
_GONE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@dataclass(frozen=True, slots=True)
class _Method:
    """`takes`: the arguments as a tuple type; `gives`: the result's type, or a stream's item."""

    name: str
    takes: Any
    gives: Any
    streams: bool


def methods(protocol: type) -> list[_Method]:
    """The protocol's public methods, with their types."""
    found = []
    for name, function in inspect.getmembers(protocol, inspect.isfunction):
        if name.startswith("_"):
            continue
        hints = get_type_hints(function)
        gives = hints.pop("return", type(None))
        streams = getattr(gives, "__origin__", None) is AsyncGenerator
        found.append(_Method(name, tuple[tuple(hints.values())], get_args(gives)[0] if streams else gives, streams))  # type: ignore[misc]
    return found


def _pack_error(error: CPDError) -> str:
    return msgspec.json.encode({"kind": type(error).__name__, "message": error.message, "fields": error.__dict__}).decode()


def _unpack_error(details: str) -> CPDError | None:
    try:
        packed = msgspec.json.decode(details, type=dict[str, Any])
        kind = getattr(errors, packed["kind"])
    except (msgspec.MsgspecError, KeyError, AttributeError, TypeError):
        return None
    if not (isinstance(kind, type) and issubclass(kind, CPDError)):
        return None
    error = kind(str(packed["message"]))
    error.__dict__.update(packed.get("fields", {}))
    return error


async def serve(socket: str, services: dict[type, Any]) -> grpc.aio.Server:
    """Answer calls of each protocol (by its class name) with its object; returns the started server."""
    server = grpc.aio.server(options=OPTIONS)
    for protocol, target in services.items():
        handlers = {m.name: _handler(m, getattr(target, m.name)) for m in methods(protocol)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(protocol.__name__, handlers),))
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


def _handler(method: _Method, call: Callable[..., Any]) -> Any:
    def read(data: bytes) -> Any:
        try:
            return msgspec.msgpack.decode(data, type=method.takes)
        except (msgspec.MsgspecError, CPDError) as error:
            return error if isinstance(error, CPDError) else BadMessage(f"arguments of {method.name} that are none")

    async def unary(arguments: Any, context: Any) -> Any:
        try:
            if isinstance(arguments, CPDError):
                raise arguments
            result = call(*arguments)
            return await result if inspect.isawaitable(result) else result
        except CPDError as error:
            await context.abort(grpc.StatusCode.ABORTED, _pack_error(error))
        except Exception:
            log.exception("%s failed", method.name)
            await context.abort(grpc.StatusCode.INTERNAL, method.name)

    async def stream(arguments: Any, context: Any) -> Any:
        try:
            if isinstance(arguments, CPDError):
                raise arguments
            items = call(*arguments)
            try:
                async for item in items:
                    yield item
            finally:
                await items.aclose()
        except CPDError as error:
            await context.abort(grpc.StatusCode.ABORTED, _pack_error(error))
        except Exception:
            log.exception("%s failed", method.name)
            await context.abort(grpc.StatusCode.INTERNAL, method.name)

    make = grpc.unary_stream_rpc_method_handler if method.streams else grpc.unary_unary_rpc_method_handler
    return make(stream if method.streams else unary, request_deserializer=read, response_serializer=msgspec.msgpack.encode)


class Connection:
    """A channel to one process. `gone(message)`: the error for a process that can't be reached."""

    def __init__(self, socket: str, gone: Callable[[str], CPDError]) -> None:
        self._channel = grpc.aio.insecure_channel(f"unix:{socket}", options=OPTIONS)
        self._gone = gone

    def client(self, protocol: type[P], **attributes: Any) -> P:
        """An object with the protocol's methods, each a call; `attributes` are set on it as they are."""
        members: dict[str, Any] = {m.name: self._call(protocol.__name__, m) for m in methods(protocol)}
        stub = type(f"{protocol.__name__}Client", (), {**attributes, **members})()
        return cast(P, stub)

    async def ready(self) -> None:
        """Return once the other process answers."""
        await self._channel.channel_ready()

    async def close(self) -> None:
        await self._channel.close()

    def _call(self, service: str, method: _Method) -> Any:
        make = self._channel.unary_stream if method.streams else self._channel.unary_unary

        def read(data: bytes) -> Any:
            return msgspec.msgpack.decode(data, type=method.gives)

        remote = make(f"/{service}/{method.name}", request_serializer=msgspec.msgpack.encode, response_deserializer=read)

        async def unary(_: Any, *arguments: Any) -> Any:
            try:
                return await remote(arguments)
            except grpc.aio.AioRpcError as error:
                raise self._error(error) from error

        async def stream(_: Any, *arguments: Any) -> AsyncGenerator[Any, None]:
            call = remote(arguments)
            try:
                async for item in call:
                    yield item
            except grpc.aio.AioRpcError as error:
                raise self._error(error) from error
            finally:
                call.cancel()

        return stream if method.streams else unary

    def _error(self, error: grpc.aio.AioRpcError) -> CPDError:
        if error.code() in _GONE:
            return self._gone(f"the process does not answer ({error.code().name.lower()})")
        if error.code() is grpc.StatusCode.ABORTED and (ours := _unpack_error(error.details() or "")) is not None:
            return ours
        return CPDError("a call between processes failed")

"""`CPDClient`: the system as a Python object, from any Ray app or driver on the same cluster.

Owns the calls' shape; `cpd_ray.remote_app` carries them. Invariant: importing this imports neither Ray nor torch, and a client needs nothing of
the project but `cpd_ray`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import Any, TypeAlias

from cpd_ray import results, tokens
from cpd_ray.errors import InvalidRequest
from cpd_ray.remote_app import RemoteApp
from cpd_ray.types import Tier

Prompt: TypeAlias = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | bytes
"""Text, several texts, token ids, several lists of those, or a buffer of ids (`cpd_ray.tokens`)."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]

DEFAULT_TIMEOUT_S = 600.0


class CPDClient:
    """A system that runs as the Serve application `app_name` of the Ray cluster that this process belongs to (else of RAY_ADDRESS).

        client = CPDClient()
        answer = client.generate(messages=[{"role": "user", "content": "Capital of France?"}], max_tokens=16)
        print(answer.text, answer.cached, answer.ttft_s)
        for chunk in client.stream("Once upon a time", temperature=0):
            print(chunk.text, end="")

    Each call comes twice: plain (blocks), and with an `a` before its name (awaits); both work in any thread and any event loop. A request is a
    `prompt` or `messages`, and the fields of an OpenAI or vLLM request body as keyword arguments (`max_tokens`, `temperature`, `top_k`,
    `stop`, `seed`, `n`, `cache_salt`, ...); an unknown field is refused. `tenant`: whose request it is; tenants never share cached KV.
    `request_id` becomes part of the answer's id and of the logs. `timeout_s` is for the whole answer (when None the client's own, which may be
    None: for ever). Closing a stream, cancelling a call, or a timeout aborts the request in the system.

    Raises `cpd_ray.errors`: InvalidRequest (`param` names the field), Overloaded (`retry_after_s`), Unavailable, DeadlineExceeded, and kin.
    """

    def __init__(self, app_name: str = "cpd", *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        self._app_name = app_name
        self._timeout_s = timeout_s
        self._app = RemoteApp(app_name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _make, (self._app_name, self._timeout_s)

    def generate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> results.Generation:
        """The whole answer."""
        body = _body(prompt, messages, fields)
        return results.generation(self._app.call("generate", body, tenant, request_id, timeout_s=self._limit(timeout_s)))

    async def agenerate(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> results.Generation:
        """The whole answer."""
        body = _body(prompt, messages, fields)
        return results.generation(await self._app.acall("generate", body, tenant, request_id, timeout_s=self._limit(timeout_s)))

    def stream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> Generator[results.Chunk, None, None]:
        """The answer in pieces as they are computed; the last one has `usage` and `trace`. Close it (or leave it to the garbage collector) to
        abort the request."""
        body = _body(prompt, messages, fields)
        return self._chunks(body, tenant, request_id, self._limit(timeout_s))

    def astream(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        tenant: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> AsyncGenerator[results.Chunk, None]:
        """As `stream`, for `async for`; close it (`contextlib.aclosing`) to abort the request."""
        body = _body(prompt, messages, fields)
        return self._achunks(body, tenant, request_id, self._limit(timeout_s))

    def plan(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, tenant: str = "", **fields: Any
    ) -> results.Plan:
        """What would be decided for this request now, and why; runs nothing."""
        return results.plan(self._app.call("plan", _body(prompt, messages, fields), tenant, timeout_s=self._timeout_s))

    async def aplan(
        self, prompt: Prompt | None = None, *, messages: Messages | None = None, tenant: str = "", **fields: Any
    ) -> results.Plan:
        """As `plan`."""
        return results.plan(await self._app.acall("plan", _body(prompt, messages, fields), tenant, timeout_s=self._timeout_s))

    def warm(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        ttl_s: float = 600.0,
        tenant: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> results.Warmed:
        """Compute and commit the KV of a context that requests will begin with, and keep it for `ttl_s` within the pin budget."""
        body = _body(prompt, messages, {**fields, "ttl_s": ttl_s})
        return results.warmed(self._app.call("warm", body, tenant, timeout_s=self._limit(timeout_s)))

    async def awarm(
        self,
        prompt: Prompt | None = None,
        *,
        messages: Messages | None = None,
        ttl_s: float = 600.0,
        tenant: str = "",
        timeout_s: float | None = None,
        **fields: Any,
    ) -> results.Warmed:
        """As `warm`."""
        body = _body(prompt, messages, {**fields, "ttl_s": ttl_s})
        return results.warmed(await self._app.acall("warm", body, tenant, timeout_s=self._limit(timeout_s)))

    def status(self) -> results.SystemStatus:
        """Requests, workers, nodes and directory as of now."""
        return results.status(self._app.call("status", timeout_s=self._timeout_s))

    async def astatus(self) -> results.SystemStatus:
        """As `status`."""
        return results.status(await self._app.acall("status", timeout_s=self._timeout_s))

    def reset(self, tiers: Iterable[Tier | str] | None = None) -> dict[str, int]:
        """Drop what is cached in these tiers (all when None) and not in use; how many blocks were dropped, by tier."""
        dropped: dict[str, int] = self._app.call("reset", _tiers(tiers), timeout_s=self._timeout_s)
        return dropped

    async def areset(self, tiers: Iterable[Tier | str] | None = None) -> dict[str, int]:
        """As `reset`."""
        dropped: dict[str, int] = await self._app.acall("reset", _tiers(tiers), timeout_s=self._timeout_s)
        return dropped

    def _limit(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    def _chunks(
        self, body: dict[str, Any], tenant: str, request_id: str, timeout_s: float | None
    ) -> Generator[results.Chunk, None, None]:
        with closing(self._app.stream("stream", body, tenant, request_id, timeout_s=timeout_s)) as items:
            for item in items:
                yield results.chunk(item)

    async def _achunks(
        self, body: dict[str, Any], tenant: str, request_id: str, timeout_s: float | None
    ) -> AsyncGenerator[results.Chunk, None]:
        async with aclosing(self._app.astream("stream", body, tenant, request_id, timeout_s=timeout_s)) as items:
            async for item in items:
                yield results.chunk(item)


def _make(app_name: str, timeout_s: float | None) -> CPDClient:
    return CPDClient(app_name, timeout_s=timeout_s)


def _tiers(tiers: Iterable[Tier | str] | None) -> list[str] | None:
    return None if tiers is None else [str(tier) for tier in tiers]


def _body(prompt: Prompt | None, messages: Messages | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The request body; raises InvalidRequest unless there is one prompt or one list of messages."""
    if (prompt is None) == (messages is None):
        raise InvalidRequest("either prompt or messages must be given", param="prompt")
    if messages is not None:
        return {**fields, "messages": [dict(message) for message in messages]}
    return {**fields, "prompt": _plain_prompt(prompt)}


def _plain_prompt(prompt: Any) -> Any:
    """Text as it is; ids of any kind (buffers, numpy arrays, tuples) as lists."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, (bytes, bytearray, memoryview)):
        return tokens.unpack(bytes(prompt)).tolist()
    if hasattr(prompt, "tolist"):
        return prompt.tolist()
    return [item if isinstance(item, (str, int)) else _plain_prompt(item) for item in prompt]

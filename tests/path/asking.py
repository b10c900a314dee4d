"""Asking a local cluster, waiting for what its workers do, and finding that nothing of a request is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from actors.local.cluster import LocalCluster
from actors.router import RouterCounts
from cpd_ray import tokens as token_buffers
from cpd_ray.errors import PeerGone, WorkerGone
from cpd_ray.ids import RequestId, WorkerId
from cpd_ray.types import GenerateRequest, RequestTrace, Role, SamplingParams, TokenChunk, Usage

BYTES = 256
"""The tiny model's ordinary tokens."""
_names = itertools.count(1)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    usage: Usage
    trace: RequestTrace


def prompt(seed: int, tokens: int) -> list[int]:
    """A prompt that shares no block with another seed's."""
    rng = random.Random(seed)
    return [rng.randrange(BYTES) for _ in range(tokens)]


def request(ids: list[int], max_tokens: int = 8, *, name: str = "", **sampling: Any) -> GenerateRequest:
    """Greedy unless `sampling` says otherwise, and it goes on after an end token."""
    params = SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling})
    return GenerateRequest(RequestId(name or f"ask-{next(_names)}"), token_buffers.pack(ids), params)


async def collect(chunks: AsyncIterator[TokenChunk], tokens: list[int]) -> TokenChunk:
    """The rest of an answer, added to the `tokens` so far; returns its last chunk."""
    last = None
    async for last in chunks:
        assert last.index == len(tokens), "a token was lost or doubled"
        tokens += last.tokens
    assert last is not None
    return last


async def ask(cluster: LocalCluster, asked: GenerateRequest) -> Answer:
    tokens: list[int] = []
    last = await collect(cluster.router.generate(asked), tokens)
    assert last.usage is not None and last.trace is not None
    assert last.usage.completion_tokens == len(tokens)
    return Answer(tokens, last.usage, last.trace)


async def until(true: Callable[[], Awaitable[bool]], what: str, within_s: float = 30.0) -> None:
    """Ask again and again until it is so."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while True:
        if await true():
            return
        assert loop.time() < until_s, f"{what}: not within {within_s} s"
        await asyncio.sleep(0.002)


async def busy(cluster: LocalCluster, role: Role) -> WorkerId:
    """The name of a worker of this role that has a request, once there is one."""
    found: list[WorkerId] = []

    async def look() -> bool:
        for name, client in cluster.workers().items():
            try:
                report = await client.report()
            except WorkerGone:
                continue
            if report.role is role and report.running + report.waiting:
                found.append(name)
        return bool(found)

    await until(look, f"a {role} worker has a request")
    return found[0]


async def held(cluster: LocalCluster) -> list[str]:
    """What is held in the router and in whoever lives; nothing, when nobody asks for anything."""
    await cluster.router.membership.refresh()
    cluster.router.check()
    found = [f"router: {cluster.router.counts}"] if cluster.router.counts != RouterCounts(0, 0) else []
    for client in cluster.workers().values():
        with contextlib.suppress(WorkerGone):
            report = await client.report()
            busy = report.running + report.waiting + report.backlog_tokens + report.unwritten_blocks
            if busy or report.pool.free + report.pool.cached < report.pool.total:
                found.append(f"{report.worker}: {report}")
    for node in cluster.nodes().values():
        with contextlib.suppress(PeerGone):
            told = await node.report()
            slots = told.slots
            if slots.reserved or slots.quarantined or slots.leases or told.copying:
                found.append(f"{told.node}: {told}")
    return found


async def nothing_left(cluster: LocalCluster, within_s: float) -> None:
    """Everything is free or cached again within that time."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while True:
        found = await held(cluster)
        if not found:
            return
        assert loop.time() < until_s, found
        await asyncio.sleep(0.05)

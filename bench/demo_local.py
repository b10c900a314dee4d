"""The demo's cluster of plain processes: two nodes, three workers, NIXL between the slabs, no Ray."""

from __future__ import annotations

import asyncio
import uuid

from rich.console import Console

from actors import build
from actors.local.cluster import LocalCluster
from actors.text.codec import TextCodec
from bench.demo import Answer, report, story
from cpd_ray import tokens as token_buffers
from cpd_ray.config import load
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens, GenerateRequest, SamplingParams


class LocalStage:
    """`bench.demo.Stage` over a `LocalCluster`."""

    def __init__(self, cluster: LocalCluster, codec: TextCodec) -> None:
        self._cluster = cluster
        self._codec = codec

    async def ask(self, tokens: bytes, max_tokens: int) -> Answer:
        request = GenerateRequest(RequestId(uuid.uuid4().hex), tokens, SamplingParams(max_tokens=max_tokens, temperature=0.0))
        out: list[int] = []
        async for chunk in self._cluster.router.generate(request):
            out += chunk.tokens
        trace = chunk.trace
        assert trace is not None, "the last chunk carries the trace"
        text = await self._codec.decode(token_buffers.pack(out), skip_special_tokens=True)
        return Answer(
            text,
            trace.route,
            tuple(trace.workers),
            trace.actual_ttft_s,
            chunk.usage.cached if chunk.usage else CachedTokens(),
        )

    async def forget_pools(self) -> None:
        for client in self._cluster.workers().values():
            await client.clear_pool()
        await self._cluster.router.membership.refresh()

    async def settle(self) -> None:
        await self._cluster.router.membership.settled()


async def run_local(model: str, dtype: str, prompt_tokens: int, max_tokens: int, console: Console) -> int:
    """Start the cluster, tell the story, print the table; returns the exit status."""
    block = 64
    pool = -(-(prompt_tokens + 1024) // block) * block * 2
    config = load(
        {
            "model": {"id": model, "dtype": dtype},
            "cache": {"block_tokens": block, "pool_tokens": pool},
            "slab": {"gib": 0.5},
            "transfer": {"copy_after_reads": 1},
            "runtime": {"routing": {"policy": "threshold"}},
        }
    )
    console.print(
        "starting: two nodes, each with its KV cache; a pre-prefill worker on the first, prefill and decode on the second"
    )
    codec = TextCodec.load(await asyncio.to_thread(build.model_folder, config))
    async with LocalCluster(config) as cluster:
        rows = await story(LocalStage(cluster, codec), codec, prompt_tokens, max_tokens, console)
    return report(rows, console)

"""The whole path gives transformers' tokens, whichever tier the KV came from, and counts what was cached to the token."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from actors import build
from actors.local.cluster import LocalCluster
from actors.text.codec import TextCodec
from cpd_ray import tokens as token_buffers
from cpd_ray.ids import RequestId
from cpd_ray.types import CachedTokens, GenerateRequest, SamplingParams
from tests.path.oracle import DOCUMENT, Oracle

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 64
ANSWER = 12
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 191, 192, 193, 511, 512, 513, 575, 576, 577, 1023, 1024, 1025, 1087, 1088, 1089]


@dataclass(frozen=True)
class Got:
    tokens: list[int]
    route: str
    cached: CachedTokens
    ttft_s: float


class Asker:
    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self._count = 0

    async def ask(self, prompt: list[int], max_tokens: int = ANSWER) -> Got:
        self._count += 1
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = GenerateRequest(RequestId(f"{id(self)}-{self._count}"), token_buffers.pack(prompt), params)
        tokens: list[int] = []
        async for chunk in self.cluster.router.generate(request):
            assert chunk.index == len(tokens)
            tokens += chunk.tokens
        assert chunk.usage is not None
        assert chunk.trace is not None
        assert chunk.usage.completion_tokens == len(tokens)
        assert chunk.usage.prompt_tokens == len(prompt)
        return Got(tokens, chunk.trace.route, chunk.usage.cached, chunk.trace.actual_ttft_s)

    async def forget_pools(self) -> None:
        for client in self.cluster.workers().values():
            await client.clear_pool()
        await self.cluster.router.membership.refresh()

    async def settle(self) -> None:
        await self.cluster.router.membership.settled()


async def texts(cluster: LocalCluster, lengths: list[int], seed: int) -> list[list[int]]:
    """Pieces of real text of these lengths in tokens, no two with an equal first block."""
    codec = TextCodec.load(build.model_folder(cluster.config))
    ids = list(token_buffers.unpack(await codec.encode(DOCUMENT.read_text(), add_special_tokens=False)))
    rng = random.Random(seed)
    prompts = []
    for length in lengths:
        start = rng.randrange(max(1, len(ids) - length))
        prompts.append(ids[start : start + length])
    return prompts


async def every_tier(cluster: LocalCluster, oracle: Oracle, prompt: list[int]) -> list[Got]:
    """Cold, from the other slab, the own slab, the pool, then a follow-up turn; each equal to the oracle, each count exact."""
    asker = Asker(cluster)
    wanted = await asyncio.to_thread(oracle.greedy, prompt, ANSWER)
    reusable = (len(prompt) - 1) // BLOCK * BLOCK
    cold = await asker.ask(prompt)
    await asker.settle()
    far = await asker.ask(prompt)
    await asker.settle()
    await asker.forget_pools()
    near = await asker.ask(prompt)
    own = await asker.ask(prompt)
    await asker.settle()
    for got, name in ((cold, "cold"), (far, "far"), (near, "near"), (own, "own")):
        assert got.tokens == wanted, f"{name}: {len(prompt)} tokens"
    assert (cold.route, cold.cached) == ("cold", CachedTokens())
    if reusable:
        assert (far.route, far.cached) == ("warm", CachedTokens(cluster=reusable))
        assert (near.route, near.cached) == ("warm", CachedTokens(node=reusable))
        assert (own.route, own.cached) == ("warm", CachedTokens(pool=reusable))
    more = prompt + wanted + prompt[:70]
    turn = await asker.ask(more)
    assert turn.tokens == await asyncio.to_thread(oracle.greedy, more, ANSWER), f"follow-up after {len(prompt)} tokens"
    written = (len(prompt) + len(wanted) - 1) // BLOCK * BLOCK
    assert turn.cached.total == min(written, (len(more) - 1) // BLOCK * BLOCK)
    return [cold, far, near, own]


async def test_thirty_prompts_from_every_tier(tiny_cluster: LocalCluster) -> None:
    oracle = Oracle(build.model_folder(tiny_cluster.config))
    rng = random.Random(3)
    lengths = LENGTHS + [rng.randrange(1, 3000) for _ in range(6)] + [3000]
    assert len(lengths) == 30
    for prompt in await texts(tiny_cluster, lengths, seed=1):
        await every_tier(tiny_cluster, oracle, prompt)


@pytest.mark.model
async def test_smollm2_from_every_tier(smollm2_cluster: LocalCluster) -> None:
    oracle = Oracle(build.model_folder(smollm2_cluster.config))
    for prompt in await texts(smollm2_cluster, [17, 64, 129, 700, 1025], seed=2):
        await every_tier(smollm2_cluster, oracle, prompt)
    (long,) = await texts(smollm2_cluster, [3000], seed=4)
    await every_tier(smollm2_cluster, oracle, long)

"""What the engine's loop costs and promises: its share of a step, warm prompts among cold ones, predicted first tokens.

Drives the production engine, scheduler, pool and fitted cost model over a loaded model. Invariant: nothing leaks: the pool is back
at its baseline after each measurement.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch

from actors.engine.assemble import TorchParts
from actors.engine.attention.base import AttentionBackend
from actors.engine.batch import StepBatch
from actors.engine.decoder import Decoder
from actors.engine.engine import AsyncEngine
from actors.engine.interface import EngineRequest, FetchPlan, FetchResult
from actors.engine.plan import StepPlan, StepResult, StepRunner
from actors.engine.scheduler import Scheduler
from actors.engine.validation import EngineShape
from cpd_ray.clock import SystemClock
from cpd_ray.config import EngineConfig
from cpd_ray.ids import BlockId, BlockKey, RequestId
from cpd_ray.tokens import pack
from cpd_ray.types import SamplingParams
from kv.keys import block_keys, root_key
from kv.pool import BlockPool
from placement.cost_fit import StepCostFit
from placement.cost_model import prefill_s

SEED = 20
CONFIG = EngineConfig(step_tokens=512, chunk_tokens=512)
CONTEXT, BATCH = 512, 16
WARM_TOKENS, COLD_TOKENS, REMAINDER_TOKENS = 4096, 8000, 64
MIXED_REQUESTS = 24


class NoTiers:
    """A port to nothing: every block is computed."""

    async def fetch(self, plan: FetchPlan) -> FetchResult:
        return FetchResult()

    def committed(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        pass


class TimedDecoder:
    """The production decoder; keeps each forward's start and length."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._calls: list[tuple[float, float]] = []

    def logits(self, batch: StepBatch, backend: AttentionBackend) -> torch.Tensor:
        began_s = time.perf_counter()
        result = self._decoder.logits(batch, backend)
        self._calls.append((began_s, time.perf_counter() - began_s))
        return result

    def seconds_of(self, from_s: float, to_s: float) -> float:
        """Seconds of the forwards that began within."""
        return sum(seconds for began_s, seconds in self._calls if from_s <= began_s < to_s)


class WatchedRunner:
    """The production runner; keeps each step's plan, start and end."""

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.steps: list[tuple[StepPlan, float, float]] = []

    def run(self, plan: StepPlan) -> StepResult:
        began_s = time.perf_counter()
        result = self._runner.run(plan)
        self.steps.append((plan, began_s, time.perf_counter()))
        return result


class Loop:
    """An engine over the parts, with an empty pool."""

    def __init__(self, parts: TorchParts, block_size: int) -> None:
        facts, clock = parts.facts, SystemClock()
        self.runner = WatchedRunner(parts.runner)
        self.cost = StepCostFit()
        self.pool = BlockPool(parts.memory.blocks, clock=clock)
        shape = EngineShape(block_size, facts.vocab_size, facts.max_position, frozenset(facts.eos_token_ids))
        self.engine = AsyncEngine(
            Scheduler(self.pool, shape, CONFIG, clock, self.cost, NoTiers().committed), self.runner, NoTiers()
        )
        self._root = root_key(model="bench", revision=None, dtype="bfloat16", block_size=block_size)
        self._serial = itertools.count()
        self._random = np.random.default_rng(SEED)

    def prompt(self, length: int) -> bytes:
        return pack(self._random.integers(3, 250, length).tolist())

    def request(self, tokens: bytes, new_tokens: int, sampling: SamplingParams | None = None) -> EngineRequest:
        chosen = sampling or SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        keys = tuple(block_keys(self._root, tokens, self.engine.block_size))
        name = RequestId(f"bench-{next(self._serial)}")
        return EngineRequest(name, tokens, len(tokens) // 4, self._root, keys, chosen, new_tokens)

    async def first_token_s(self, request: EngineRequest) -> float:
        """Seconds to the first token; the rest is awaited too."""
        began_s, first_s = time.perf_counter(), 0.0
        async for output in self.engine.generate(request):
            assert output.error is None, output.error
            first_s = first_s or (time.perf_counter() - began_s if output.tokens else 0.0)
        return first_s


@asynccontextmanager
async def running(parts: TorchParts, block_size: int) -> AsyncIterator[Loop]:
    loop = Loop(parts, block_size)
    await loop.engine.start()
    yield loop
    await loop.engine.stop()
    loop.engine.check()
    assert loop.pool.available() == loop.pool.total_blocks, "blocks are still held"


async def overhead_share(parts: TorchParts, decoder: TimedDecoder, block_size: int, sampled: int, answer_tokens: int) -> float:
    """With BATCH requests decoding, `sampled` of them on top-p: the share of a step, from one step's start to the next one's, that is not the
    model's forward."""
    async with running(parts, block_size) as loop:
        requests = []
        for i in range(BATCH):
            sampling = SamplingParams(
                temperature=1.0 if i < sampled else 0.0, top_p=0.9, seed=i, max_tokens=answer_tokens, ignore_eos=True
            )
            requests.append(loop.request(loop.prompt(CONTEXT), answer_tokens, sampling))
        await asyncio.gather(*(loop.first_token_s(r) for r in requests))
        steps = loop.runner.steps
    whole = [i for i, (plan, _, _) in enumerate(steps) if len(plan.sequences) == plan.new_tokens == BATCH]
    pairs = [(steps[i], steps[i + 1]) for i in whole if i + 1 in whole]
    assert pairs, "no two steps in a row had the whole batch"
    return statistics.median(
        1 - decoder.seconds_of(began_s, end_s) / (next_s - began_s) for (_, began_s, end_s), (_, next_s, _) in pairs
    )


async def warm_over_decode(parts: TorchParts, block_size: int, answer_tokens: int) -> float:
    """First token of a wholly cached prompt over a decode step of a batch of one at CONTEXT."""
    async with running(parts, block_size) as loop:
        prompt = loop.prompt(WARM_TOKENS)
        await loop.first_token_s(loop.request(prompt, 1))
        await loop.first_token_s(loop.request(loop.prompt(CONTEXT), answer_tokens))
        steps = [end_s - began_s for plan, began_s, end_s in loop.runner.steps if plan.new_tokens == 1]
        warm = [await loop.first_token_s(loop.request(prompt, 1)) for _ in range(5)]
        return statistics.median(warm) / statistics.median(steps)


async def warm_wait_chunks(parts: TorchParts, block_size: int) -> float:
    """A prompt with REMAINDER_TOKENS to compute, arriving while a cold one computes: its added wait, in chunks of the cold one."""
    async with running(parts, block_size) as loop:
        prefix = loop.prompt(WARM_TOKENS // 4)
        await loop.first_token_s(loop.request(prefix, 1))
        alone = [await loop.first_token_s(loop.request(prefix + loop.prompt(REMAINDER_TOKENS), 1)) for _ in range(3)]
        waits = []
        for _ in range(2):
            cold = asyncio.create_task(loop.first_token_s(loop.request(loop.prompt(COLD_TOKENS), 1)))
            done = len(loop.runner.steps)
            while not cold.done():
                if len(loop.runner.steps) > done:  # a chunk has just ended: the next one begins
                    done = len(loop.runner.steps) + 2
                    waits.append(await loop.first_token_s(loop.request(prefix + loop.prompt(REMAINDER_TOKENS), 1)))
                await asyncio.sleep(0.005)
            await cold
        chunks = [end_s - began_s for plan, began_s, end_s in loop.runner.steps if plan.new_tokens >= CONFIG.chunk_tokens]
        return (statistics.median(waits) - statistics.median(alone)) / statistics.median(chunks)


async def ttft_prediction_error(parts: TorchParts, block_size: int) -> float:
    """Median |predicted - actual| / actual over a mixed run, the predictions made from the load and fitted cost at arrival."""
    async with running(parts, block_size) as loop:
        rng = np.random.default_rng(SEED)
        prefix = loop.prompt(1024)
        for length in (512, 64, 1500):
            await loop.first_token_s(loop.request(loop.prompt(length), 8))
        await loop.first_token_s(loop.request(prefix, 8))

        async def one() -> float:
            warm = rng.random() < 0.5
            new = int(rng.integers(64, 300) if warm else rng.integers(256, 2500))
            request = loop.request((prefix if warm else b"") + loop.prompt(new), int(rng.integers(2, 12)))
            load = loop.engine.load()
            own_s = prefill_s(load.step_cost, 1024 if warm else 0, new, CONFIG.chunk_tokens)
            # decodes share each step with the prompt's chunks
            predicted_s = load.backlog_s + own_s
            actual_s = await loop.first_token_s(request)
            return abs(predicted_s - actual_s) / actual_s

        errors: list[float] = []
        while len(errors) < MIXED_REQUESTS:
            errors += await asyncio.gather(*(one() for _ in range(int(rng.integers(1, 3)))))
        return statistics.median(errors)


async def measure(parts: TorchParts, decoder: TimedDecoder, block_size: int, *, answer_tokens: int = 60) -> dict[str, Any]:
    """`decoder` is the one in `parts.runner`. `step_overhead_share` is with half the requests on top-p, the other one's with none."""
    return {
        "step_overhead_share": await overhead_share(parts, decoder, block_size, BATCH // 2, answer_tokens),
        "step_overhead_share_greedy": await overhead_share(parts, decoder, block_size, 0, answer_tokens),
        "warm_over_decode_step": await warm_over_decode(parts, block_size, answer_tokens),
        "warm_wait_chunks": await warm_wait_chunks(parts, block_size),
        "ttft_prediction_error": await ttft_prediction_error(parts, block_size),
    }

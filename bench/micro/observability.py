"""What metrics and logs cost: CPU a token and a request, over a face that answers at once, with Ray's metrics and real JSON lines.

Run it as a program for a table and one JSON line. Needs no cluster: Ray's metrics record without one. The agent of the node, another process,
works once more on each observation; `agent_us_per_observation` is its own library doing so here. Invariant: what is measured is the
difference between the face with and without its wrapper, in turns, as CPU time of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import ray

from actors.http.face import Face
from actors.observability import logs
from actors.observability.face import ObservedFace
from actors.observability.ray_meter import RayMeter
from actors.observability.table import TOKEN_SECONDS, Side
from cpd_ray.clock import SystemClock
from cpd_ray.ids import RequestId, WorkerId
from cpd_ray.tokens import pack
from cpd_ray.types import CachedTokens, FinishReason, GenerateRequest, RequestTrace, Role, SamplingParams, TokenChunk, Usage

TOKENS = 400
REQUESTS = 20
ROUNDS = 7
MOST_US_PER_TOKEN = 20.0
MOST_MS_PER_REQUEST = 0.5
WORKER = WorkerId("prefill-0")
PHASES = {"admission": 0.01, "queue": 0.02, "fetch": 0.03, "compute": 0.4, "handover": 0.01, "decode": 2.0}


class Instant:
    """Answers at once, a token a chunk, with usage and trace as a router gives them."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        cached = CachedTokens(64, 32, 16)
        for index in range(request.sampling.max_tokens):
            last = index + 1 == request.sampling.max_tokens
            told = last or not index
            usage = Usage(request.prompt_tokens, index + 1, cached) if told else None
            reason = "warm with 112 of 128 tokens cached: stays in the prefill pool, first token predicted in 400 ms"
            trace = RequestTrace("warm", reason, (WORKER, WorkerId("d-0")), cached, PHASES, 0.4, 0.5) if told else None
            yield TokenChunk(request.request_id, index, (index,), (), FinishReason.LENGTH if last else None, usage, trace)


async def cpu_s(face: Face, requests: int, tokens: int) -> float:
    """CPU seconds of the process for reading so many answers."""
    prompt = pack(range(128))
    begun_s = time.process_time()
    for number in range(requests):
        request = GenerateRequest(RequestId(f"cmpl-{number}-0"), prompt, SamplingParams(max_tokens=tokens))
        async with contextlib.aclosing(face.generate(request)) as chunks:
            async for _ in chunks:
                pass
    return time.process_time() - begun_s


async def measure() -> dict[str, float]:
    """All figures. Logs are wherever they were configured to be."""
    bare = cast(Face, Instant())
    meter = RayMeter(Side.ROUTER, app="cpd", model="bench", role="router")
    observed = ObservedFace(bare, meter, SystemClock(), lambda: {WORKER: Role.PREFILL})
    per_token, per_request = [], []
    for _ in range(ROUNDS):
        added_s = {}
        for tokens in (1, TOKENS):
            added_s[tokens] = (await cpu_s(observed, REQUESTS, tokens) - await cpu_s(bare, REQUESTS, tokens)) / REQUESTS
        token_s = (added_s[TOKENS] - added_s[1]) / (TOKENS - 1)
        per_token.append(token_s)
        per_request.append(added_s[1] - token_s)
    return {
        "us_per_token": 1e6 * statistics.median(per_token),
        "ms_per_request": 1e3 * statistics.median(per_request),
        "agent_us_per_observation": 1e6 * agent_s(),
    }


def agent_s() -> float:
    """CPU seconds of one observation in the library that Ray's agent counts with."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    provider = MeterProvider([InMemoryMetricReader()])
    histogram: Any = provider.get_meter("bench").create_histogram("h", explicit_bucket_boundaries_advisory=list(TOKEN_SECONDS))
    tags = {"app": "cpd", "model": "bench", "role": "router", "WorkerId": "0" * 56, "NodeAddress": "10.0.0.1"}
    count = 20_000
    begun_s = time.process_time()
    for _ in range(count):
        histogram.record(0.025, attributes=tags)
    return (time.process_time() - begun_s) / count


def main() -> None:
    """Print a table, then one JSON line."""
    with open(os.devnull, "w") as nowhere:
        logs.configure({"app": "cpd", "role": "router", "actor": "bench"}, stream=nowhere)
        figures = asyncio.run(measure())
    for name, limit in (("us_per_token", MOST_US_PER_TOKEN), ("ms_per_request", MOST_MS_PER_REQUEST)):
        verdict = "ok" if figures[name] <= limit else "MISSED"
        print(f"{name:<26}{figures[name]:>10.3f}   at most {limit:g}   {verdict}")
    print(f"{'agent_us_per_observation':<26}{figures['agent_us_per_observation']:>10.3f}   (another process)")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    about = {"commit": commit.stdout.strip() or "unknown", "python": platform.python_version(), "ray": ray.__version__}
    rounded = {f"observability_{name}": round(figure, 4) for name, figure in figures.items()}
    print(json.dumps({**rounded, "seed": None, **about}))


if __name__ == "__main__":
    main()

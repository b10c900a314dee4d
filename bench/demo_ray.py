"""The demo's cluster on Ray: two nodes (raylets) on this machine, pre-prefill on one, prefill and decode on the other, asked over HTTP.

Owns the start, the questions and the end. Invariant: when it returns, nothing that it started is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from rich.console import Console

from actors import build
from actors.text.codec import TextCodec
from bench.demo import Answer, report, story
from cpd_ray import tokens as token_buffers
from cpd_ray.config import load
from cpd_ray.types import CachedTokens

START_S = 300.0
SETTLE_S = 60.0
NODE_LABEL = "cpd/node"


def applications(model: str, dtype: str, pool_tokens: int) -> dict[str, Any]:
    """The two applications, as `serve deploy` takes them."""
    shared = {
        "model": {"id": model, "dtype": dtype},
        "cache": {"block_tokens": 64, "pool_tokens": pool_tokens},
        "transfer": {"copy_after_reads": 1},
    }

    def role(node: str) -> dict[str, Any]:
        return {"replicas": 1, "cpus_per_rank": 0.2, "labels": {NODE_LABEL: node}}

    cpd = {**shared, "router_cpus": 0.1, "roles": {"pre_prefill": role("n0"), "prefill": role("n1"), "decode": role("n1")}}
    # the paper's fixed rule, so that which worker answers does not hang on how fast each happened to start
    runtime = {"routing": {"policy": "threshold"}, "engine": {"step_tokens": 1024, "chunk_tokens": 512}}
    deployments = [{"name": name, "user_config": runtime} for name in ("router", "pre-prefill", "prefill", "decode")]
    kv = {**shared, "slab": {"gib": 0.5, "extent_mib": 128, "cpus": 0.1}}
    return {
        "applications": [
            {"name": "cpd-kv", "import_path": "serve_app:build_kv", "route_prefix": None, "args": kv},
            {"name": "cpd", "import_path": "serve_app:build", "route_prefix": "/", "args": cpd, "deployments": deployments},
        ]
    }


class HttpStage:
    """`bench.demo.Stage` over the system's own HTTP face."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, tokens: bytes, max_tokens: int) -> Answer:
        body = {"prompt": list(token_buffers.unpack(tokens)), "max_tokens": max_tokens, "temperature": 0}
        answer = await self._post("/v1/completions", body)
        trace = answer["cpd"]
        return Answer(
            text=answer["choices"][0]["text"],
            route=trace["route"],
            workers=tuple(worker.rpartition("-")[0] for worker in trace["workers"]),
            ttft_s=trace["actual_ttft_s"],
            cached=CachedTokens(**trace["cached_tokens"]),
        )

    async def forget_pools(self) -> None:
        await self._post("/v1/cpd/cache/reset", {"tiers": ["pool"]})

    async def settle(self) -> None:
        deadline_s = time.monotonic() + SETTLE_S
        quiet = 0
        while quiet < 3:
            if time.monotonic() > deadline_s:
                raise TimeoutError("what was computed is not written down after a minute")
            status = (await self._client.get("/v1/cpd/status")).json()
            busy = any(w["unwritten_blocks"] or w["running"] for w in status["workers"]) or any(
                n["copying"] for n in status["nodes"]
            )
            quiet = 0 if busy else quiet + 1
            await asyncio.sleep(0.25)  # the router hears from workers, nodes and the directory a few times a second

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        response = await self._client.post(path, json=body, headers={"X-CPD-Trace": "1"})
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.asynccontextmanager
async def serving(config: Path, port: int, console: Console) -> AsyncIterator[None]:
    """The system on two Ray nodes, ready to answer; ended when left."""
    command = [sys.executable, "-m", "actors.cli.serve", "--config", str(config), "--port", str(port), "--nodes", "2"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                text = line.decode(errors="replace").rstrip()
                console.print(f"[dim]{text}[/dim]", highlight=False)
                if text.startswith("ready on "):
                    break
            else:
                raise RuntimeError("the system did not start; its last words are above")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGINT)
        await process.communicate()


async def run_ray(model: str, dtype: str, prompt_tokens: int, max_tokens: int, console: Console) -> int:
    """Start the cluster, tell the story, print the table; returns the exit status."""
    pool_tokens = -(-(prompt_tokens + 1024) // 64) * 64 * 2
    apps = applications(model, dtype, pool_tokens)
    folder = await asyncio.to_thread(build.model_folder, load({"model": {"id": model}}))
    codec = TextCodec.load(folder)
    port = free_port()
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(apps, file)
        file.flush()
        async with (
            serving(Path(file.name), port, console),
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=300) as client,
        ):
            rows = await story(HttpStage(client), codec, prompt_tokens, max_tokens, console)
    return report(rows, console)

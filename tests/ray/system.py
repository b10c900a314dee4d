"""The whole system under test: its YAML, how it is deployed, and someone who asks it over HTTP with the real `openai` client.

Owns no cluster (see `conftest`). Invariant: what is waited for is waited for by looking, until a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
from ray.serve._private.api import _get_global_client
from ray.serve.schema import ServeDeploySchema

from actors import build
from actors.text.codec import TextCodec
from cpd_ray import tokens as token_buffers
from cpd_ray.config import load
from cpd_ray.types import CachedTokens
from tests.path.oracle import DOCUMENT, Oracle

MODEL = "tiny"
BLOCK = 64
ANSWER = 12
RUN_S = 180.0
WAIT_S = 60.0
LONG = 14_000
"""Tokens of a prompt whose prefill takes seconds."""
RUNTIME: dict[str, Any] = {
    "routing": {"policy": "threshold", "cold_min_uncached_tokens": 1},
    "engine": {"step_tokens": 1024, "chunk_tokens": 512},
}
"""Every prompt with nothing cached is cold."""


def system_config(**changes: Any) -> dict[str, Any]:
    """As `serve deploy` takes it: pre-prefill on one node, prefill and two decode workers on the other; `changes` to the arguments of `cpd`."""
    shared = {
        "model": {"id": MODEL, "dtype": "float32", "threads": 1},
        "cache": {"block_tokens": BLOCK, "pool_tokens": 32_768},
        "transfer": {"copy_after_reads": 1, "copy_share": 1.0, "checksums": True},
    }

    def role(node: str, replicas: int = 1) -> dict[str, Any]:
        return {"replicas": replicas, "cpus_per_rank": 0.1, "labels": {"cpd/node": node}}

    roles = {"pre_prefill": role("n0"), "prefill": role("n1"), "decode": role("n1", 2)}
    kv = {**shared, "slab": {"gib": 1 / 32, "extent_mib": 8, "cpus": 0.1, "lease_ttl_s": 3.0, "reservation_ttl_s": 3.0}}
    names = ("router", "pre-prefill", "prefill", "decode")
    return {
        "applications": [
            {"name": "cpd-kv", "import_path": "serve_app:build_kv", "route_prefix": None, "args": kv},
            {
                "name": "cpd",
                "import_path": "serve_app:build",
                "route_prefix": "/",
                "args": {**shared, "router_cpus": 0.1, "roles": roles, **changes},
                "deployments": [{"name": name, "user_config": copy.deepcopy(RUNTIME)} for name in names],
            },
        ]
    }


def with_runtime(config: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """The same with other knobs in every deployment's `user_config`."""
    changed = copy.deepcopy(config)
    for deployment in changed["applications"][1]["deployments"]:
        for section, knobs in sections.items():
            deployment["user_config"].setdefault(section, {}).update(knobs)
    return changed


@dataclass(frozen=True)
class Replica:
    deployment: str
    replica_id: str
    pid: int | None
    node: str | None
    running: bool


class System:
    """The two applications on the cluster. `port`: of Serve's proxy."""

    def __init__(self, port: int, config: dict[str, Any]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.config = config
        self._deployed: dict[str, Any] | None = None
        folder = build.model_folder(load({"model": {"id": MODEL}}))
        self.folder = folder
        self.oracle = Oracle(folder)
        self.codec = TextCodec.load(folder)
        self._client = _get_global_client()

    def deploy(self, config: dict[str, Any] | None = None) -> None:
        """What `serve deploy` sends; returns before it has come about. Without `config`: as at first."""
        config = config or self.config
        if config != self._deployed:
            self._client.deploy_apps(ServeDeploySchema.model_validate(config))
            self._deployed = config

    def wait_until_running(self) -> None:
        """Every replica is there, and a request would be answered."""
        deadline_s = time.monotonic() + RUN_S
        while not (self.is_running() and self._answers()):
            assert time.monotonic() < deadline_s, self._client.get_serve_details()["applications"]
            time.sleep(0.1)

    def is_running(self) -> bool:
        applications = self._client.get_serve_details()["applications"]
        states = [applications[a["name"]]["status"] if a["name"] in applications else None for a in self.config["applications"]]
        return states == ["RUNNING"] * len(states)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def replicas(self, deployment: str | None = None) -> list[Replica]:
        """Those of both applications, or of one deployment."""
        found = []
        for application in self._client.get_serve_details()["applications"].values():
            for name, details in application["deployments"].items():
                for r in details["replicas"]:
                    found.append(Replica(name, r["replica_id"], r.get("pid"), r.get("node_id"), r["state"] == "RUNNING"))
        ours = {"router", "pre-prefill", "prefill", "decode", "kv-cache", "directory"}
        return [r for r in found if r.deployment == deployment or (deployment is None and r.deployment in ours)]

    def kill(self, deployment: str, *, node: str | None = None, name: str | None = None) -> Replica:
        """Kill -9 the process of the deployment's replica (of that name, on `node`)."""
        found = [
            r
            for r in self.replicas(deployment)
            if r.running and node in (None, r.node) and (name is None or name.endswith(r.replica_id))
        ]
        (replica,) = found
        assert replica.pid is not None
        os.kill(replica.pid, signal.SIGKILL)
        return replica

    def delete(self) -> None:
        self._client.delete_apps([application["name"] for application in self.config["applications"]])


@dataclass(frozen=True)
class Got:
    """A whole answer. `trace`: the `cpd` object."""

    text: str
    finish_reason: str | None
    usage: Any
    trace: dict[str, Any]

    @property
    def cached(self) -> CachedTokens:
        return CachedTokens(**self.trace["cached_tokens"])

    @property
    def route(self) -> str:
        return str(self.trace["route"])

    @property
    def roles(self) -> list[str]:
        return [worker.rpartition("-")[0] for worker in self.trace["workers"]]


class Asker:
    """Asks greedily, traced, for answers that an end token ends as it does transformers'."""

    _seeds = itertools.count(1)

    def __init__(self, system: System) -> None:
        self.system = system
        self.openai = openai.AsyncOpenAI(
            base_url=f"{system.url}/v1", api_key="none", max_retries=0, timeout=120, default_headers={"X-CPD-Trace": "1"}
        )
        self.http = httpx.AsyncClient(base_url=system.url, timeout=120)

    async def __aenter__(self) -> Asker:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.openai.close()
        await self.http.aclose()

    # -- prompts and what is right --------------------------------------------------------------------------------------

    def text(self, length: int) -> str:
        """A piece of real text that no other shares its first block with."""
        seed = next(self._seeds)
        document = DOCUMENT.read_text()
        start = random.Random(seed).randrange(len(document))
        return (f"{seed}: " + (document[start:] + document * (length // len(document) + 1)))[:length]

    async def ids(self, length: int) -> list[int]:
        """The same as tokens."""
        return list(token_buffers.unpack(await self.system.codec.encode(self.text(length), add_special_tokens=False)))

    async def greedy(self, prompt: list[int], max_tokens: int = ANSWER) -> tuple[list[int], str]:
        """What transformers answers."""
        tokens = await asyncio.to_thread(self.system.oracle.greedy, prompt, max_tokens)
        return tokens, await self.system.codec.decode(token_buffers.pack(tokens), skip_special_tokens=True)

    # -- asking ---------------------------------------------------------------------------------------------------------

    async def complete(self, prompt: list[int] | str, max_tokens: int = ANSWER, **options: Any) -> Got:
        answer = await self.openai.completions.create(model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, **options)
        (choice,) = answer.choices
        return Got(choice.text, choice.finish_reason, answer.usage, answer.cpd)

    async def stream(self, prompt: list[int], max_tokens: int = ANSWER, **options: Any) -> Any:
        """An open stream of completion chunks."""
        return await self.openai.completions.create(
            model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True,
            stream_options={"include_usage": True}, **options,
        )  # fmt: skip

    async def post(self, path: str, body: Any) -> dict[str, Any]:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def status(self) -> dict[str, Any]:
        response = await self.http.get("/v1/cpd/status")
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    async def forget(self, *tiers: str) -> dict[str, int]:
        """Drop what these tiers hold; all, when none is named."""
        dropped: dict[str, int] = (await self.post("/v1/cpd/cache/reset", {"tiers": list(tiers)} if tiers else {}))[
            "dropped_blocks"
        ]
        return dropped

    async def in_reach(self, prompt: list[int], role: str = "prefill") -> CachedTokens:
        """What the router believes that a worker of this role would find."""
        plan = await self.post("/v1/cpd/plan", {"prompt": prompt})
        (candidate,) = (c for c in plan["considered"] if c["role"] == role)
        return CachedTokens(**candidate["cached_tokens"])

    # -- waiting --------------------------------------------------------------------------------------------------------

    async def known(self, prompt: list[int], where: CachedTokens, role: str = "prefill") -> None:
        """Wait until the router knows that so much of `prompt` is cached there, and all that was computed is written down."""

        async def look() -> str:
            if (reach := await self.in_reach(prompt, role)) != where:
                return f"{reach} of {where}"
            status = await self.status()
            return str(status) if any(w["unwritten_blocks"] for w in status["workers"]) or _copying(status) else ""

        await until(look, "what is cached is not known")

    async def until_whole(self) -> None:
        """Wait until every role has its worker, every node its cache, and nothing is held for anyone."""

        async def look() -> str:
            if not self.system.is_running():
                return "Serve is not content"
            try:
                status = await self.status()
            except (httpx.HTTPError, AssertionError) as error:
                return f"no status: {error}"
            there = sorted((w["role"], w["state"]) for w in status["workers"])
            wanted = [(role, "ready") for role in ("decode", "decode", "pre_prefill", "prefill")]
            if there != wanted or len(status["nodes"]) != 2:
                return f"{there} and {len(status['nodes'])} caches are there"
            return held(status)

        await until(look, "the system is not whole and idle", RUN_S)


def _copying(status: dict[str, Any]) -> bool:
    return any(node["copying"] for node in status["nodes"])


def held(status: dict[str, Any]) -> str:
    """What is in use, in words; empty when nothing is."""
    found = [f"requests: {status['requests']}"] if any(status["requests"].values()) else []
    for worker in status["workers"]:
        pool = worker["pool"]
        busy = worker["running"] + worker["waiting"] + worker["backlog_tokens"] + worker["unwritten_blocks"]
        if busy or pool["free"] + pool["cached"] != pool["total"]:
            found.append(f"{worker['worker']}: {worker}")
    for node in status["nodes"]:
        slab = node["slab"]
        if node["leases"] or node["copying"] or slab["reserved"] or slab["quarantined"]:
            found.append(f"{node['node']}: {node}")
    return "; ".join(found)


async def until(look: Callable[[], Awaitable[str]], what: str, within_s: float = WAIT_S) -> None:
    """Look again and again until nothing is missing any more."""
    deadline_s = time.monotonic() + within_s
    while missing := await look():
        assert time.monotonic() < deadline_s, f"{what} after {within_s} s: {missing}"
        await asyncio.sleep(0.05)

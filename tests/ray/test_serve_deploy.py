"""The system as a user brings it up and changes it: the `make serve` command, then `serve deploy` against the cluster that runs."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.ray.launched import Launched, serve_cli, serve_deploy
from tests.ray.system import MODEL, system_config, until, with_runtime

pytestmark = pytest.mark.slow


async def test_serve_deploy_changes_a_threshold_without_a_restart_and_names_what_is_wrong(
    launched: Callable[..., Launched], port: int, tmp_path: Path
) -> None:
    config = one_node(system_config())
    run = launched(config["applications"], "--dashboard", "--store-gib=0.2")
    assert run.until("ready on", 240) == f"ready on http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, headers={"X-CPD-Trace": "1"}) as http:

        async def ask(prompt: str) -> dict[str, Any]:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
            response = await http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            answer: dict[str, Any] = response.json()
            return answer

        async def planned(prompt: str) -> dict[str, Any]:
            plan: dict[str, Any] = (await http.post("/v1/cpd/plan", json={"prompt": prompt})).json()
            return plan

        async def workers() -> list[str]:
            return sorted(w["worker"] for w in (await http.get("/v1/cpd/status")).json()["workers"])

        first = await ask("a" * 300)
        assert first["cpd"]["route"] == "cold"

        async def known() -> str:
            reach = (await planned("a" * 300))["chosen"]["cached_tokens"]
            return "" if reach["node"] == 256 else f"{reach}"

        await until(known, "what was computed is not known")
        before = await workers()
        changed = with_runtime(config, routing={"cold_min_uncached_tokens": 2500})
        assert "Sent deploy request successfully" in serve_deploy(run, tmp_path, changed["applications"])

        async def warm() -> str:
            route = (await planned("b" * 300))["route"]
            return "" if route == "warm" else str(route)

        await until(warm, "the threshold did not change")
        again = await ask("a" * 300)
        assert (again["cpd"]["route"], again["cpd"]["cached_tokens"]) == ("warm", {"pool": 0, "node": 256, "cluster": 0})
        assert again["choices"] == first["choices"]
        assert await workers() == before

        wrong = copy.deepcopy(changed["applications"])
        wrong[1]["args"]["cache"]["block_tokens"] = "many"
        serve_deploy(run, tmp_path, wrong)

        async def refused() -> str:
            said = await asyncio.to_thread(serve_cli, run, tmp_path, "status --name cpd")
            return "" if "DEPLOY_FAILED" in said and "cache.block_tokens" in said else said

        await until(refused, "what is wrong is not said")
        assert (await ask("a" * 300))["choices"] == first["choices"]
        assert await workers() == before


def one_node(config: dict[str, Any]) -> dict[str, Any]:
    """All roles on the one node that there is."""
    for role in config["applications"][1]["args"]["roles"].values():
        role["labels"] = {"cpd/node": "n0"}
    return config

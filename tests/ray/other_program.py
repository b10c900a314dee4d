"""Another program, which `test_client` copies beside an `actors` package of that program's own: it knows nothing of this project but `cpd_ray`.

It asks the system from its driver, and from a replica of an application of its own, and says in one JSON line what came of it.
"""

import asyncio
import json
import os
import sys

import actors.names
import cpd_ray
from cpd_ray.errors import InvalidRequest

RAY_BEFORE = "ray" in sys.modules

import ray  # noqa: E402
from ray import serve  # noqa: E402

FIELDS = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
PROMPT = "what the other program asks"


def wrong_field(call: object) -> str:
    try:
        call("x", temprature=1)  # type: ignore[operator]
    except InvalidRequest as error:
        return error.param or ""
    return "no error"


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Asker:
    def __init__(self, app: str) -> None:
        self.client = cpd_ray.CPDClient(app)

    async def __call__(self) -> dict:
        text = [chunk.text async for chunk in self.client.astream(PROMPT, **FIELDS)]
        try:
            await self.client.agenerate("x", temprature=1)
        except InvalidRequest as error:
            return {"answer": "".join(text), "param": error.param}
        return {}


def driver(app: str) -> tuple[dict, str]:
    client = cpd_ray.CPDClient(app)
    expected = client.generate(PROMPT, **FIELDS).text

    async def ask() -> str:
        return (await client.agenerate(PROMPT, **FIELDS)).text

    return {
        "torch": "torch" in sys.modules,
        "ray_before": RAY_BEFORE,
        "ours_loaded": sorted({name.partition(".")[0] for name in sys.modules} & {"kv", "placement", "serve_app"}),
        "mine": actors.names.MINE,
        "quick": os.environ["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1",
        "sync": client.generate(PROMPT, **FIELDS).text,
        "stream": "".join(chunk.text for chunk in client.stream(PROMPT, **FIELDS)),
        "async": asyncio.run(ask()),
        "twice": asyncio.run(ask()),  # in another event loop
        "param": wrong_field(client.generate),
    }, expected


def main(app: str) -> None:
    ray.init(address="auto", runtime_env={"working_dir": os.getcwd()}, log_to_driver=False)
    told, expected = driver(app)
    name = f"asker-{told['quick']}"

    async def deploy_and_ask() -> dict:
        return await serve.get_app_handle(name).remote()

    serve.run(Asker.bind(app), name=name, route_prefix=None)
    try:
        replica = asyncio.run(deploy_and_ask())
    finally:
        serve.delete(name)
    print(json.dumps({"driver": told, "replica": replica, "expected": expected}))


if __name__ == "__main__":
    main(sys.argv[1])

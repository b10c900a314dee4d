"""Asking from another Ray program, without HTTP: needs nothing of this project but the package `cpd_ray`.

In one terminal:    make serve
It says how other Ray programs reach it; then, in another:

    source /tmp/cpd-ray-.../env        # the line that `make serve` printed before `ready`
    .venv/bin/python examples/handle_client.py

First from this driver, blocking; then from a Serve application of its own, whose replica awaits many answers at once.
"""

from __future__ import annotations

import argparse
import asyncio

import ray
from ray import serve

from cpd_ray import CPDClient
from cpd_ray.errors import CPDError


@serve.deployment(ray_actor_options={"num_cpus": 0.1})
class Summariser:
    """An application that uses the model for a job of its own."""

    def __init__(self, app_name: str) -> None:
        self._client = CPDClient(app_name)

    async def summarise(self, document: str, questions: list[str]) -> list[str]:
        """One answer a question; what they have in common is computed once."""
        context = {"role": "system", "content": document}
        await self._client.awarm(messages=[context], ttl_s=60)
        answers = await asyncio.gather(
            *(
                self._client.agenerate(messages=[context, {"role": "user", "content": question}], max_tokens=32, temperature=0)
                for question in questions
            )
        )
        return [f"{a.text.strip()}   [{a.usage.cached_tokens} of {a.prompt_tokens} prompt tokens cached]" for a in answers]


def from_the_driver(app_name: str) -> None:
    client = CPDClient(app_name)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    print("planned:", client.plan(messages=messages).reason)
    for chunk in client.stream(messages=messages, max_tokens=32, temperature=0):
        print(chunk.text, end="", flush=True)
        if chunk.trace is not None:
            print(f"\nfirst token after {chunk.trace.actual_ttft_s:.2f} s, {chunk.trace.route}")
    try:
        client.generate("x", temprature=0.5)
    except CPDError as error:
        print(f"a wrong field is refused: {error.message}")


def from_an_application(app_name: str, document: str) -> None:
    async def ask() -> list[str]:
        # within an event loop, as Serve's quick mode wants its handles used
        handle = serve.get_app_handle("summariser")
        answers: list[str] = await handle.summarise.remote(document, ["What is this text about?", "Who may use it?"])
        return answers

    serve.run(Summariser.bind(app_name), name="summariser", route_prefix=None)
    try:
        for answer in asyncio.run(ask()):
            print(answer)
    finally:
        serve.delete("summariser")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--app", default="cpd", help="the system's Serve application")
    parser.add_argument("--document", default="LICENSE", help="a text file to ask about")
    given = parser.parse_args()
    ray.init(address="auto", log_to_driver=False)
    from_the_driver(given.app)
    with open(given.document) as file:
        from_an_application(given.app, file.read()[:4000])


if __name__ == "__main__":
    main()

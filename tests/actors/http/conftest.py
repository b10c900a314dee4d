"""An app over the fake face, in process and behind a real server, with a byte-level tokenizer: one token a byte."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
import uvicorn

from actors.http.app import HttpSettings, build_app
from actors.http.face import ModelCard
from actors.http.fake_face import FakeFace, Script
from actors.models.tiny import TinySpec, write_tiny
from actors.text.codec import TextCodec
from cpd_ray.clock import ManualClock

CONTEXT = 4096
CREATED = 1_700_000_000


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny(TinySpec(), folder)
    return folder


@pytest.fixture(scope="session")
def codec(model_folder: Path) -> Iterator[TextCodec]:
    codec = TextCodec.load(model_folder)
    yield codec
    codec.close()


class App:
    """A face, the app over it, and clients of it. `clock` is the one that rates are counted by."""

    def __init__(self, codec: TextCodec, script: Script | None = None, settings: HttpSettings | None = None) -> None:
        cards = (
            ModelCard("fake", CONTEXT, codec.vocab_size),
            ModelCard("org/fake-adapter", CONTEXT, codec.vocab_size, adapter="fake-adapter"),
        )
        self.clock = ManualClock()
        self.codec = codec
        self.face = FakeFace(codec, cards, script)
        self.asgi = build_app(self.face, settings, clock=self.clock, wall_s=lambda: float(CREATED), rng=random.Random(1))

    def client(self, **headers: str) -> httpx.AsyncClient:
        """In process."""
        return httpx.AsyncClient(
            transport=httpx.ASGITransport(self.asgi, raise_app_exceptions=True), base_url="http://app", headers=headers, timeout=60
        )

    async def post(self, path: str, body: object, **headers: str) -> httpx.Response:
        async with self.client(**headers) as client:
            return await client.post(path, json=body)

    async def get(self, path: str, **headers: str) -> httpx.Response:
        async with self.client(**headers) as client:
            return await client.get(path)

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[str]:
        """Behind a real server; yields its address."""
        config = uvicorn.Config(self.asgi, host="127.0.0.1", port=0, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        serving = asyncio.ensure_future(server.serve())
        try:
            while not server.started:
                assert not serving.done(), "the server did not start"
                await asyncio.sleep(0)
            host, port = server.servers[0].sockets[0].getsockname()[:2]
            yield f"http://{host}:{port}"
        finally:
            server.should_exit = True
            await serving

    @contextlib.asynccontextmanager
    async def openai(self, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
        """The real client, over a real server."""
        async with self.served() as address, openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
            yield client


MakeApp = Callable[..., App]


@pytest.fixture(scope="session")
def app_of(codec: TextCodec) -> MakeApp:
    """For tests that run many loops of their own; they check the face themselves."""
    return lambda script=None, settings=None: App(codec, script, settings)


@pytest.fixture
async def make_app(codec: TextCodec) -> AsyncIterator[MakeApp]:
    """Apps whose faces must have nothing left running when the test ends."""
    made: list[App] = []

    def make(script: Script | None = None, settings: HttpSettings | None = None) -> App:
        made.append(App(codec, script, settings))
        return made[-1]

    yield make
    for app in made:
        app.face.check()


@pytest.fixture
async def app(make_app: MakeApp) -> App:
    return make_app()

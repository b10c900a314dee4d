"""Applications for the launcher's tests: one that greets, one that leaves processes behind, one that can't be built."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from ray import serve


@serve.deployment
class Hello:
    def __init__(self, greeting: str = "hello") -> None:
        self._greeting = greeting

    async def __call__(self) -> str:
        return self._greeting


def build(arguments: dict[str, Any]) -> serve.Application:
    return Hello.bind(arguments.get("greeting", "hello"))


@serve.deployment
class Stray:
    """Starts a process that belongs to nobody: its own session, its parent gone."""

    def __init__(self) -> None:
        subprocess.run(["/bin/sh", "-c", "setsid sleep 600 >/dev/null 2>&1 &"], check=True)

    async def __call__(self) -> str:
        return str(os.getpid())


stray = Stray.bind()


def broken(arguments: dict[str, Any]) -> serve.Application:
    raise ValueError("this application was never meant to work")

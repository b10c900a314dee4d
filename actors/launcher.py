"""A private Ray cluster on this machine with Serve applications on it, in the foreground: what `make serve` runs.

Owns the start, the wait and the end: the one process that a terminal sees. Knows no Ray: `actors.local_cluster`, its child, does. Invariant:
when `launch` returns, however it came to that, no process, shared memory, folder or port of what it started is left, and no other Ray cluster
was touched.

The child lives in a session of its own, so that Ctrl-C reaches this process alone; orphans of the child become this process's children, so that
none escapes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from cpd_ray.errors import ConfigError

REPOSITORY = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GOODBYE_S = 20.0
"""How long Serve's replicas get to end in order. A second signal ends the wait."""
LOG_LINES = 25

CLUSTER_ENV = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 * 2**20),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Serve's quick mode (gRPC between replicas, handles in the caller's loop) without its ingress ports on every replica; and a cluster that
listens on the loopback interface, which Ray names by the systems where that is its default."""


@dataclass(frozen=True)
class LaunchSpec:
    """`config`: a YAML file as `serve deploy` takes it, whose `http_options` yield to `host` and `port`. `nodes`: Ray nodes, each with `cpus`
    logical CPUs and an object store of `store_bytes`. `health`: path that answers when requests would be. `dashboard`: also Ray's dashboard,
    which `serve deploy` talks to. `env`: for all processes, above what is inherited."""

    config: Path
    host: str = "127.0.0.1"
    port: int = 8000
    nodes: int = 1
    cpus: int = 16
    store_bytes: int = 2**30
    health: str = "/health"
    dashboard: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


def check(spec: LaunchSpec) -> dict[str, Any]:
    """The configuration as read, when nothing speaks against a start; raises ConfigError, in one line, else."""
    try:
        config = yaml.safe_load(spec.config.read_text())
    except OSError as error:
        raise ConfigError(f"the configuration file {spec.config} can't be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{spec.config} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or not isinstance(config.get("applications"), list) or not config["applications"]:
        raise ConfigError(
            f"{spec.config} names no applications: it needs a list `applications`, each with `name` and `import_path`"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((spec.host, spec.port))
        except OSError as error:
            raise ConfigError(
                f"port {spec.port} of {spec.host} can't be used ({error.strerror}): choose another with PORT=..."
            ) from error
    return config


async def launch(spec: LaunchSpec, say: Callable[[str], None]) -> int:
    """Start everything, say `ready on <url>` when requests are answered, serve until a stop signal or a failure, and clear up. Returns the exit
    code: 0 after a signal, 1 after a failure, 2 when nothing was started."""
    try:
        config = check(spec)
    except ConfigError as error:
        say(f"error: {error.message}")
        return 2
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    before = {p.pid for p in psutil.Process().children(recursive=True)}
    folder = Path(tempfile.mkdtemp(prefix="cpd-ray-", dir="/tmp"))  # short: the path of a unix socket has at most 107 characters
    stop = asyncio.Queue[None]()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.put_nowait, None)
    try:
        async with _child(spec, config, folder) as child:
            return await _watch(child, stop, say, folder)
    finally:
        await _end_all(before)
        shutil.rmtree(folder, ignore_errors=True)
        for number in STOP_SIGNALS:
            loop.remove_signal_handler(number)


@contextlib.asynccontextmanager
async def _child(spec: LaunchSpec, config: dict[str, Any], folder: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    with (folder / "log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "actors.local_cluster", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            start_new_session=True, env=environment(spec, folder),
        )  # fmt: skip
    assert child.stdin is not None
    told = {**asdict(spec), "config": config, "env": {}, "folder": str(folder), "supervisor": os.getpid()}
    child.stdin.write(json.dumps(told).encode())
    child.stdin.close()
    yield child


def environment(spec: LaunchSpec, folder: Path) -> dict[str, str]:
    """What the cluster's processes inherit: a folder and, unless the user has said how Ray is to authenticate, a token of their own."""
    inherited = {k: v for k, v in os.environ.items() if k not in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_DASHBOARD_ADDRESS")}
    path = os.pathsep.join(filter(None, (str(REPOSITORY), inherited.get("PYTHONPATH"))))
    own = {**CLUSTER_ENV, "PYTHONPATH": path, "RAY_TMPDIR": str(folder)}
    if "RAY_AUTH_MODE" not in inherited:
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(secrets.token_hex(32))
        own |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    return {**inherited, **own, **spec.env}


async def _watch(child: asyncio.subprocess.Process, stop: asyncio.Queue[None], say: Callable[[str], None], folder: Path) -> int:
    relaying = asyncio.create_task(_relay(child, say))
    stopping = asyncio.create_task(stop.get())
    await asyncio.wait((relaying, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stopping.done():
        say("stopping")
        await _goodbye(child, stop)
        relaying.cancel()
        return 0
    stopping.cancel()
    code = await child.wait()
    if not relaying.result():
        say(f"error: the cluster's starter ended unexpectedly with code {code}; its last words:")
        say("\n".join((folder / "log").read_text(errors="replace").splitlines()[-LOG_LINES:]))
    return 1


async def _relay(child: asyncio.subprocess.Process, say: Callable[[str], None]) -> bool:
    """Pass on what the child says, until it ends; whether it gave a reason."""
    assert child.stdout is not None
    reason = False
    async for line in child.stdout:
        text = line.decode(errors="replace").rstrip()
        reason |= text.startswith("error: ")
        say(text)
    return reason


async def _goodbye(child: asyncio.subprocess.Process, stop: asyncio.Queue[None]) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    again, ended = asyncio.create_task(stop.get()), asyncio.create_task(child.wait())
    await asyncio.wait((again, ended), timeout=GOODBYE_S, return_when=asyncio.FIRST_COMPLETED)
    for task in (again, ended):
        task.cancel()


async def _end_all(before: set[int]) -> None:
    """Kill every descendant that was not there before; new ones may appear meanwhile."""
    while left := [p for p in psutil.Process().children(recursive=True) if p.pid not in before]:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await asyncio.to_thread(psutil.wait_procs, left, timeout=1)

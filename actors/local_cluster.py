"""The Ray side of `actors.launcher`: its child process, which starts the nodes and Serve, deploys, and waits for the signal to end it all.

Owns the order of the start and of the end. Speaks to its parent in lines on standard output; Ray's own words go to standard error.
Invariant: it ends when its parent does, and Ray's processes end when it does.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from cpd_ray.config import explain

PR_SET_PDEATHSIG = 1
POLL_S = 0.2
NODE_LABEL = "cpd/node"
"""Each node is labelled n0, n1, ... under this name, so that a configuration can place roles."""


class Stopped(BaseException):
    """The parent wants an end."""


class StartFailed(Exception):
    """The message says what failed."""


def main() -> None:
    """Read the launch specification from standard input; see `actors.launcher`."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.signal(signal.SIGTERM, _stop)
    spec = json.load(sys.stdin)
    say = _speaker()
    try:
        if os.getppid() != spec["supervisor"]:
            raise Stopped
        _serve(spec, say)
    except Stopped:
        pass
    except StartFailed as error:
        say(f"error: {error}")
        sys.exit(1)
    finally:
        if os.getppid() != spec["supervisor"]:
            shutil.rmtree(spec["folder"], ignore_errors=True)


def _stop(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def _speaker() -> Callable[[str], None]:
    """Keeps standard output for us alone: whatever prints from now on prints to standard error."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda text: print(text, file=out)


def _serve(spec: dict[str, Any], say: Callable[[str], None]) -> None:
    say(f"starting Ray ({spec['nodes']} node{'s' if spec['nodes'] > 1 else ''})")
    importing = threading.Thread(target=importlib.import_module, args=("ray.serve",), daemon=True)
    importing.start()
    with _cluster(spec) as address:
        import ray

        importing.join()
        ray.init(address=address, log_to_driver=False, logging_level="warning")
        signal.signal(signal.SIGTERM, _stop)  # Ray has put its own in place
        _write_environment(spec, address)
        try:
            say("starting Serve")
            _deploy(spec, say)
            _await_health(spec, say)
            say(f"other Ray programs reach it after: source {spec['folder']}/env")
            say(f"ready on http://{spec['host']}:{spec['port']}")
            while True:
                signal.pause()
        finally:
            from ray import serve

            serve.shutdown()
            ray.shutdown()


@contextmanager
def _cluster(spec: dict[str, Any]) -> Iterator[str]:
    from ray.cluster_utils import Cluster

    common = {"num_cpus": spec["cpus"], "object_store_memory": spec["store_bytes"], "include_log_monitor": False}
    head = {**common, "labels": {NODE_LABEL: "n0"}, "include_dashboard": spec["dashboard"], "no_monitor": True}
    if spec["dashboard"]:
        head["dashboard_port"] = _free_port()
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for number in range(1, spec["nodes"]):
            cluster.add_node(wait=False, labels={NODE_LABEL: f"n{number}"}, **common)
        cluster.wait_for_nodes()
        yield cluster.address
    finally:
        cluster.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _write_environment(spec: dict[str, Any], address: str) -> None:
    """For other Ray programs of this user: `source <folder>/env`."""
    import ray

    reach = {"RAY_ADDRESS": address, "RAY_TMPDIR": spec["folder"]}
    if spec["dashboard"]:
        reach |= {"RAY_DASHBOARD_ADDRESS": f"http://{ray._private.worker.global_worker.node.webui_url}"}
    reach |= {
        name: os.environ[name]
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER")
        if name in os.environ
    }
    Path(spec["folder"], "env").write_text("".join(f"export {name}={value}\n" for name, value in reach.items()))


def _deploy(spec: dict[str, Any], say: Callable[[str], None]) -> None:
    from ray import serve
    from ray.serve._private.api import serve_start
    from ray.serve.schema import ServeDeploySchema

    config = {k: v for k, v in spec["config"].items() if k not in ("http_options", "proxy_location")}
    try:
        schema = ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        raise StartFailed(f"Serve refuses the configuration: {explain(error)}") from error
    client = serve_start(http_options={"host": spec["host"], "port": spec["port"], "location": "HeadOnly"})
    client.deploy_apps(schema)
    wanted, said = [app["name"] for app in config["applications"]], ""
    while True:
        applications = serve.status().applications
        news = "; ".join(_progress(name, applications.get(name)) for name in wanted)
        if news != said:
            say(said := news)
        states = {name: applications[name].status.value for name in wanted if name in applications}
        for name, state in states.items():
            if state == "DEPLOY_FAILED":
                raise StartFailed(f"the application {name} can't start: {_reason(applications[name])}")
        if [*states.values()] == ["RUNNING"] * len(wanted):
            return
        time.sleep(POLL_S)


def _progress(name: str, application: Any) -> str:
    if application is None or not application.deployments:
        return f"{name}: building"
    healthy = [d for d in application.deployments.values() if d.status.value == "HEALTHY"]
    waiting = [n for n, d in application.deployments.items() if d.status.value != "HEALTHY"]
    return f"{name}: {len(healthy)} of {len(application.deployments)} ready" + (
        f", starting {', '.join(waiting)}" if waiting else ""
    )


def _reason(application: Any) -> str:
    return "\n".join([d.message for d in application.deployments.values() if d.message] or [application.message])


def _await_health(spec: dict[str, Any], say: Callable[[str], None]) -> None:
    url, said = f"http://{spec['host']}:{spec['port']}{spec['health']}", ""
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            if (news := f"waiting for {url}: {error}") != said:
                say(said := news)
            time.sleep(POLL_S)


if __name__ == "__main__":
    main()

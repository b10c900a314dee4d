"""`serve deploy` for one file, and the wait until it has come about.

Owns the wait and its progress; Ray's own command does the deploying. Invariant: returns only when every application of the file runs, or,
with nothing to wait for, when Serve has taken the file.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cpd_ray.errors import ConfigError, DeadlineExceeded, Unavailable

POLL_S = 0.5


def deploy_file(
    file: Path,
    address: str,
    wait_s: float,
    *,
    say: Callable[[str], None] = print,
    pause: Callable[[float], None] = time.sleep,
    now_s: Callable[[], float] = time.monotonic,
) -> None:
    """Raises ConfigError when an application fails to start, Unavailable when there is no such cluster, DeadlineExceeded after `wait_s`."""
    command = [sys.executable, "-m", "ray.serve.scripts", "deploy", str(file), "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(_reason(done.stderr, address))
    say(f"Serve on {address} has taken {file}")
    if wait_s <= 0:
        return
    from ray.dashboard.modules.serve.sdk import ServeSubmissionClient

    client = ServeSubmissionClient(address)
    wanted = [str(application.get("name", "default")) for application in yaml.safe_load(file.read_text())["applications"]]
    deadline_s, said = now_s() + wait_s, ""
    while True:
        applications = client.get_serve_details()["applications"]
        if (news := "; ".join(_progress(name, applications.get(name)) for name in wanted)) != said:
            say(said := news)
        states = [applications.get(name, {}).get("status") for name in wanted]
        for name, state in zip(wanted, states, strict=True):
            if state == "DEPLOY_FAILED":
                raise ConfigError(f"the application {name} can't start: {_failure(applications[name])}")
        if states == ["RUNNING"] * len(wanted):
            return
        if now_s() > deadline_s:
            raise DeadlineExceeded(f"not everything runs after {wait_s:g} s; `serve status` tells more")
        pause(POLL_S)


def _reason(stderr: str, address: str) -> str:
    """The last line of a traceback says what it is about."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    if any("Failed to connect" in line or "ConnectionError" in line for line in lines):
        return f"no Ray dashboard answers on {address}: start Ray with `ray start --head`, or say where one is with --address"
    return f"serve deploy failed: {lines[-1] if lines else 'no reason given'}"


def _progress(name: str, application: dict[str, Any] | None) -> str:
    if application is None:
        return f"{name}: waiting"
    deployments = application["deployments"]
    waiting = [d for d, details in deployments.items() if details["status"] != "HEALTHY"]
    started = f"{name}: {len(deployments) - len(waiting)} of {len(deployments)} deployments ready"
    return started + (f", starting {', '.join(waiting)}" if waiting else "")


def _failure(application: dict[str, Any]) -> str:
    told = [d["message"] for d in application["deployments"].values() if d.get("message")] or [application.get("message", "")]
    return " ".join(" ".join(told).split())

"""`make serve`'s launcher, as a process: it says when it is ready, and whatever ends it, nothing of it is left."""

from __future__ import annotations

import signal
import socket
import time
import urllib.request
from pathlib import Path

import psutil
import pytest
import yaml

from actors.launcher import LaunchSpec, check
from cpd_ray.errors import ConfigError
from tests.ray.launched import serve_deploy

GREETING = [{"name": "hello", "import_path": "tests.ray.hello:build", "route_prefix": "/", "args": {"greeting": "good day"}}]
STRAY = [{"name": "stray", "import_path": "tests.ray.hello:stray", "route_prefix": "/stray"}]
BROKEN = [{"name": "broken", "import_path": "tests.ray.hello:broken", "route_prefix": "/", "args": {}}]
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def test_serves_until_ctrl_c_takes_deploys_and_refuses_a_second_on_its_port(launched, port, tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = launched(GREETING + STRAY, "--nodes=2", "--dashboard")
    assert run.until("ready on") == f"ready on http://127.0.0.1:{port}"
    assert get(f"http://127.0.0.1:{port}/") == "good day"
    assert any(p.name() == "sleep" for p in run.processes()), "nothing strayed"
    second = launched(GREETING)
    assert second.end(30) == 2
    (refusal,) = second.lines
    assert str(port) in refusal
    assert second.processes() == []
    changed = [{**GREETING[0], "args": {"greeting": "good night"}}, *STRAY]
    assert "Sent deploy request successfully" in serve_deploy(run, tmp_path, changed)
    deadline_s = time.monotonic() + 60
    while get(f"http://127.0.0.1:{port}/") != "good night":
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    outside = {c.laddr.ip for p in run.processes() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN} - LOOPBACK
    assert outside <= {"::"}, "only replicas' gRPC servers, which ask for the token, listen elsewhere"
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0


@pytest.mark.parametrize("moment", ["starting Ray", "starting Serve"])
def test_a_stop_during_the_start_leaves_nothing(launched, moment) -> None:  # type: ignore[no-untyped-def]
    run = launched(GREETING)
    run.until(moment)
    run.process.send_signal(signal.SIGTERM)
    assert run.end() == 0
    assert not [line for line in run.lines if "ready on" in line]


@pytest.mark.slow
def test_an_application_that_cannot_start_says_why(launched) -> None:  # type: ignore[no-untyped-def]
    run = launched(BROKEN)
    run.until("starting Ray")
    assert run.end(120) == 1
    run.until("error: the application broken can't start")
    run.until("never meant to work")


def test_a_configuration_that_serve_refuses_is_named(launched) -> None:  # type: ignore[no-untyped-def]
    run = launched([{"name": "nameless", "route_prefix": "/"}])
    run.until("starting Ray")
    assert run.end(120) == 1
    assert "import_path" in run.until("error: Serve refuses the configuration")


@pytest.mark.slow
def test_a_killed_launcher_takes_its_cluster_along(launched) -> None:  # type: ignore[no-untyped-def]
    run = launched(GREETING)
    run.until("ready on")
    run.process.kill()
    run.end()
    deadline_s = time.monotonic() + 60
    while run.processes():
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def test_what_speaks_against_a_start_is_said_in_one_line(tmp_path: Path, port: int) -> None:
    config = tmp_path / "c.yaml"

    def refusal(text: str | None, spec_port: int = port) -> str:
        if text is not None:
            config.write_text(text)
        with pytest.raises(ConfigError) as refused:
            check(LaunchSpec(config, port=spec_port))
        assert "\n" not in refused.value.message
        return refused.value.message

    assert "No such file" in refusal(None)
    assert "not YAML" in refusal("applications: [")
    assert "applications" in refusal("a: 1")
    assert "applications" in refusal("applications: []")
    good = yaml.safe_dump({"applications": GREETING})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "can't be used" in refusal(good, taken.getsockname()[1])
    assert check(LaunchSpec(config, port=port))["applications"] == GREETING

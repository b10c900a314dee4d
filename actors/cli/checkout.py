"""What only a checkout of the project can run: the demo and the benchmarks, as programs of their own.

Owns the search for them. Invariant: nothing of `bench/` is imported here.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cpd_ray.errors import Unavailable

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Benchmark:
    """`about`: the first line of its documentation."""

    module: str
    about: str


def run_module(module: str, arguments: Sequence[str], repository: Path = REPOSITORY) -> int:
    """Run `python -m module` in the checkout's context; its exit code. Raises Unavailable outside of a checkout."""
    source = repository.joinpath(*module.split("."))
    if not source.with_suffix(".py").is_file() and not (source / "__main__.py").is_file():
        raise Unavailable(f"{module} is not installed: run this from a checkout of the project")
    path = os.pathsep.join(filter(None, (str(repository), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", module, *arguments], env={**os.environ, "PYTHONPATH": path}, check=False
    ).returncode


def benchmarks(repository: Path = REPOSITORY) -> Mapping[str, Benchmark]:
    """By name: packages of `bench/` that run, and the micro-benchmarks."""
    mains = {file.parent.name: (f"bench.{file.parent.name}", file) for file in repository.glob("bench/*/__main__.py")}
    micro = {
        file.stem.replace("_", "-"): (f"bench.micro.{file.stem}", file)
        for file in repository.glob("bench/micro/*.py")
        if '__name__ == "__main__"' in file.read_text()
    }
    return {name: Benchmark(module, _about(file)) for name, (module, file) in sorted({**micro, **mains}.items())}


def _about(file: Path) -> str:
    documentation = ast.get_docstring(ast.parse(file.read_text())) or ""
    return documentation.partition("\n")[0]

"""`make serve`: a private Ray cluster with the applications of one YAML file, in the foreground.

Owns the command line only; `actors.launcher` does the work. Invariant: standard output ends with `ready on <url>` once requests are answered.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from actors.cli.checking import check_file
from actors.launcher import LaunchSpec, launch
from cpd_ray.errors import ConfigError


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 after a stop signal, 1 when the start failed, 2 when it could not begin."""
    parser = argparse.ArgumentParser(
        prog="cpd-ray serve", description="Serve on this machine, in a Ray cluster of its own, until Ctrl-C."
    )
    parser.add_argument(
        "--config", type=Path, default=Path("configs/local.yaml"), help="a file as `serve deploy` takes it (%(default)s)"
    )
    parser.add_argument("--host", default=LaunchSpec.host, help="where to listen (%(default)s)")
    parser.add_argument("--port", type=int, default=LaunchSpec.port, help="%(default)s")
    parser.add_argument("--nodes", type=int, default=LaunchSpec.nodes, help="Ray nodes to start on this machine (%(default)s)")
    parser.add_argument(
        "--store-gib", type=float, default=LaunchSpec.store_bytes / 2**30, help="object store of each node (%(default)s)"
    )
    parser.add_argument("--dashboard", action="store_true", help="also Ray's dashboard, which `serve deploy` talks to")
    given = parser.parse_args(arguments)
    if problems := _problems(given.config):
        print("\n".join(f"error: {given.config}: {problem}" for problem in problems), file=sys.stderr)
        return 2
    spec = LaunchSpec(
        config=given.config, host=given.host, port=given.port, nodes=given.nodes, store_bytes=int(given.store_gib * 2**30),
        dashboard=given.dashboard,
    )  # fmt: skip
    return asyncio.run(launch(spec, lambda line: print(line, flush=True)))


def _problems(config: Path) -> tuple[str, ...]:
    """What speaks against this project's applications in the file, before anything starts; the rest is the launcher's to refuse."""
    try:
        checked = check_file(config)
    except ConfigError:
        return ()
    return tuple(dict.fromkeys(checked.problems)) if checked.applications else ()


if __name__ == "__main__":
    sys.exit(main())

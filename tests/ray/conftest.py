"""One small Ray cluster (two nodes) with Serve for all tests here; it leaves nothing behind.

The cluster has a folder of its own, so that other clusters of the machine (and their address file) are not touched. Its processes run in
Serve's quick mode (see `actors.launcher`); the test process does not, so that both ways of a handle's life are tried.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
import ray
from ray import serve
from ray._private.state import actors
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from actors.local_cluster import NODE_LABEL
from tests.ray.launched import REPOSITORY, Launched
from tests.ray.system import Asker, System, system_config

STORE_BYTES = 256 * 2**20
SHARED_MEMORY = Path("/dev/shm")

CLUSTER_ENV = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH")))),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.ray)


@dataclass(frozen=True)
class RayCluster:
    """`nodes`: Ray's ids of the two nodes, labelled n0 and n1, the driver's first. `http_port`: where Serve's proxy listens."""

    address: str
    nodes: tuple[str, str]
    http_port: int


@pytest.fixture(scope="session")
def cluster() -> Iterator[RayCluster]:
    memory_before, running_before = set(SHARED_MEMORY.iterdir()), set(_descendants())
    folder = tempfile.mkdtemp(prefix="cpd-test-")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**CLUSTER_ENV, "RAY_TMPDIR": folder}.items():
            patch.setenv(name, value)
        arguments = {"num_cpus": 16, "object_store_memory": STORE_BYTES, "include_log_monitor": False}
        head = {**arguments, "include_dashboard": False, "no_monitor": True, "labels": {NODE_LABEL: "n0"}}
        started = Cluster(initialize_head=True, head_node_args=head)
        try:
            started.add_node(**arguments, labels={NODE_LABEL: "n1"})
            ray.init(address=started.address, log_to_driver=False)
            mine = ray.get_runtime_context().get_node_id()
            (other,) = (n["NodeID"] for n in ray.nodes() if n["NodeID"] != mine)
            port = free_port()
            serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
            yield RayCluster(started.address, (mine, other), port)
            serve.shutdown()
            _check_nothing_runs()
        finally:
            spawned = [p for pid, p in _descendants().items() if pid not in running_before]
            ray.shutdown()
            started.shutdown()
            _, alive = psutil.wait_procs(spawned, timeout=20)
            for process in alive:
                process.kill()
            shutil.rmtree(folder, ignore_errors=True)
    assert not alive, f"processes left behind: {alive}"
    assert not (left := abandoned(memory_before)), f"shared memory left behind: {left}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def abandoned(before: set[Path]) -> set[Path]:
    """Files in shared memory that were not there before and that no process of the machine maps; not those of Python's multiprocessing,
    which other programs of the machine come and go with, and nothing of ours on Ray uses."""
    mapped = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mapped |= {Path(region.path) for region in process.memory_maps()}
    return {path for path in set(SHARED_MEMORY.iterdir()) - before - mapped if not path.name.startswith("sem.mp-")}


def _descendants() -> dict[int, psutil.Process]:
    return {p.pid: p for p in psutil.Process().children(recursive=True)}


def _check_nothing_runs() -> None:
    running = [a["ActorClassName"] for a in actors().values() if a["State"] != "DEAD"]
    assert not running, f"actors left behind: {running}"
    groups = [g for g in placement_group_table().values() if g["state"] != "REMOVED"]
    assert not groups, f"placement groups left behind: {groups}"


@pytest.fixture(scope="session")
def system(cluster: RayCluster) -> Iterator[System]:
    """The whole system on the cluster, deployed as `serve deploy` does it."""
    running = System(cluster.http_port, system_config())
    running.deploy()
    running.wait_until_running()
    yield running
    running.delete()


@pytest_asyncio.fixture
async def asker(system: System) -> AsyncIterator[Asker]:
    """Someone who asks the system, which is as it was deployed, idle and knows nothing; idle and whole again afterwards."""
    async with Asker(system) as asker:
        await asker.until_whole()
        await asker.forget()
        yield asker
        system.deploy()
        await asker.until_whole()


@pytest.fixture
def deploy(cluster: RayCluster) -> Iterator[Callable[..., Any]]:
    """`deploy(application, name)`: run an application for one test; returns its ingress deployment's handle."""
    names: list[str] = []

    def run(application: Any, name: str) -> Any:
        names.append(name)
        return serve.run(application, name=name, route_prefix=None)

    yield run
    for name in names:
        serve.delete(name)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def launched(tmp_path: Path, port: int) -> Iterator[Callable[..., Launched]]:
    """Runs that leave nothing: no process, shared memory, folder or port."""
    memory, token = set(SHARED_MEMORY.iterdir()), Path.home() / ".ray" / "auth_token"
    had_token = token.exists()
    runs: list[Launched] = []

    def start(applications: list[dict[str, object]], *options: str) -> Launched:
        runs.append(Launched(tmp_path, applications, port, *options))
        return runs[-1]

    yield start
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

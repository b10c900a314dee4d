"""How a caller names the replica that a call is for, and what it gets when that replica is not there.

Owns the naming only, apart from `actors.targeting` because Serve copies that module by value: an exception class defined there would be another
class in each copy. Invariant: `session_for(id)` is understood by `TargetRequestRouter` alone.
"""

from __future__ import annotations

from cpd_ray.errors import WorkerGone

TARGET_MARK = "="
"""Starts a session id that names a replica. Serve's own session ids never reach these deployments."""
TARGET_ROUTER = "actors.targeting:TargetRequestRouter"


class TargetGone(WorkerGone):
    """The named replica is not among those that take calls: dead, draining or never there."""


def session_for(replica_id: str) -> str:
    """The session id of a call to the replica whose unique id is `replica_id`."""
    return TARGET_MARK + replica_id

"""One replica on each living node: the target of the KV-cache deployment.

Standard library and Ray only: it runs in Serve's controller, without the application's environment. Invariant: the target is the number of
nodes that can run anything at all, at least one.
"""

from __future__ import annotations

from typing import Any


def one_per_node(context: Any) -> tuple[int, dict[str, Any]]:
    """`policy_function` of Serve's AutoscalingPolicy: (target replicas, state)."""
    import ray

    living = sum(1 for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0)
    return max(1, living), {}

"""What the parts of one system are called in Serve, so that two can live on one cluster.

Owns the names only. Invariant: different system names give different application and deployment names' pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

from cpd_ray.types import Role


@dataclass(frozen=True, slots=True)
class Names:
    """`system`: the configuration's `name`."""

    system: str

    @property
    def app(self) -> str:
        """The application of router and workers."""
        return self.system

    @property
    def kv_app(self) -> str:
        """The application of KV caches and directory, which a redeploy of the other leaves alone."""
        return f"{self.system}-kv"

    @property
    def router(self) -> str:
        return "router"

    @property
    def kv_cache(self) -> str:
        return "kv-cache"

    @property
    def directory(self) -> str:
        return "directory"

    def worker(self, role: Role) -> str:
        return role.value.replace("_", "-")

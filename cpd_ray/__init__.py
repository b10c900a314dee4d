"""What other Ray apps import. `from cpd_ray import CPDClient` loads the client then, and Ray only when one is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cpd_ray.client import CPDClient

__all__ = ["CPDClient"]


def __getattr__(name: str) -> Any:
    if name == "CPDClient":
        from cpd_ray.client import CPDClient

        return CPDClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

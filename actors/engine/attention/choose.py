"""Which attention backend runs: by name, or the fastest that fits.

Owns the names. Invariant: a backend that can't run here is refused with the reason, never replaced silently.
"""

from __future__ import annotations

from actors.engine.attention.base import AttentionBackend
from actors.engine.attention.sdpa import SdpaBackend
from actors.engine.kv_memory import KvMemory
from cpd_ray.errors import ConfigError


def choose_backend(name: str, memory: KvMemory) -> AttentionBackend:
    """The backend `name` (`auto` picks) over `memory`. Raises ConfigError."""
    if name in ("auto", "sdpa"):
        return SdpaBackend(memory)
    raise ConfigError(f"model.attention: {name!r} is not available here; use auto or sdpa")

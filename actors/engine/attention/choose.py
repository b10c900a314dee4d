"""Which attention backend and which operations run: by name, or the fastest that fits.

Owns the names. Invariant: a backend asked for by name is that backend or a refusal with the reason, never another.
"""

from __future__ import annotations

import logging
from pathlib import Path

from actors.engine.attention.base import AttentionBackend
from actors.engine.attention.cpu_paged import CpuPagedBackend
from actors.engine.attention.flash import FLASH_NAMES, flash_backend
from actors.engine.attention.sdpa import SdpaBackend
from actors.engine.decoder import LayerOps, TorchOps
from actors.engine.kv_memory import KvMemory
from actors.engine.native.build import NativeUnavailable
from actors.engine.native.ops import NativeOps, PagedKernels
from cpd_ray.errors import ConfigError

log = logging.getLogger(__name__)

BACKENDS = ("auto", "sdpa", "cpu_paged", *FLASH_NAMES)


def choose_backend(name: str, memory: KvMemory, query_heads: int, cache_dir: Path) -> tuple[AttentionBackend, LayerOps]:
    """The backend `name` over `memory`, and the operations that go with it; `auto` takes the compiled kernels on CPU where they can be had.
    `cache_dir`: where compiled kernels are kept. Raises ConfigError."""
    if name not in BACKENDS:
        raise ConfigError(f"model.attention: {name!r} is not available here; use one of {', '.join(BACKENDS)}")
    if name in FLASH_NAMES:
        return flash_backend(name, memory), TorchOps()
    if name == "sdpa" or (name == "auto" and memory.tensor.device.type != "cpu"):
        return SdpaBackend(memory), TorchOps()
    try:
        if memory.tensor.device.type != "cpu":
            raise NativeUnavailable("the pool is not in CPU memory")
        ops = NativeOps(memory.shape.dtype, cache_dir)
        return CpuPagedBackend(PagedKernels(ops, memory, query_heads)), ops
    except NativeUnavailable as error:
        if name == "cpu_paged":
            raise ConfigError(f"model.attention: cpu_paged can't run here: {error}; use auto or sdpa") from error
        log.warning("decoding without compiled kernels, several times slower at large batches: %s", error)
        return SdpaBackend(memory), TorchOps()

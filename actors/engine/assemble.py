"""Puts model, pool bytes, attention and sampler together: what a worker or a test needs before it has a scheduler.

Owns the order of assembly only. Invariant: everything returned shares one device and dtype.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from actors.engine.attention.choose import choose_backend
from actors.engine.decoder import choose_decoder
from actors.engine.kv_memory import KvMemory
from actors.engine.loading import load_model
from actors.engine.runner import TorchRunner
from actors.engine.sampler import Sampler
from actors.models.facts import ModelFacts
from actors.models.store import default_cache_dir
from cpd_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TorchParts:
    """A loaded model ready to run: the engine takes `runner` and `facts`, slabs and transports take `memory.slotted()`."""

    runner: TorchRunner
    memory: KvMemory
    facts: ModelFacts


def assemble(
    folder: Path,
    *,
    blocks: int,
    block_size: int,
    dtype: str = "bfloat16",
    device: str = "auto",
    attention: str = "auto",
    threads: int | None = None,
    cache_dir: Path | None = None,
) -> TorchParts:
    """Load the model in `folder` over a pool of `blocks` blocks of `block_size` tokens. `threads`: torch's, for the whole process.
    `cache_dir`: where compiled kernels are kept.
    Raises ModelUnavailable or ConfigError."""
    if threads is not None:
        torch.set_num_threads(threads)
    place = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if place != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"model.device: {place!r} needs a GPU that torch can use, and there is none; use auto or cpu")
    loaded = load_model(folder, dtype=dtype, device=place)
    memory = KvMemory(loaded.kv_shape(block_size), blocks, device=place)
    sampler = Sampler(loaded.facts.vocab_size, loaded.facts.eos_token_ids)
    backend, ops = choose_backend(attention, memory, loaded.facts.query_heads, cache_dir or default_cache_dir(os.environ))
    runner = TorchRunner(choose_decoder(loaded, ops), memory, backend, sampler)
    return TorchParts(runner, memory, loaded.facts)

"""GPU backends: one call to a variable-length kernel that reads the paged pool through block tables.

Owns what such kernels are told (cumulative lengths, tables), and the one place where each library's call is spelt. Not yet run on a GPU:
a twin in torch takes the kernel's place in the contract tests. Invariant: see `actors.engine.attention.base`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from actors.engine.attention.base import write_kv
from actors.engine.batch import StepBatch
from actors.engine.kv_memory import KvMemory
from cpd_ray.config import FLASH_BLOCK_TOKENS
from cpd_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PagedLengths:
    """A step as the kernels want it, int32 on the pool's device: `starts` `[n + 1]` first query row of each sequence, `contexts` `[n]` tokens
    that it sees, `context_starts` `[n + 1]` their running sum, `tables` `[n, most blocks]`."""

    starts: torch.Tensor
    contexts: torch.Tensor
    context_starts: torch.Tensor
    tables: torch.Tensor
    longest_query: int
    longest_context: int


class PagedKernel(Protocol):
    """Causal attention, aligned to each sequence's end. `query` `[rows, query_heads, head_dim]`, `keys` and `values`
    `[blocks, block_size, kv_heads, head_dim]` (strided, last dimension contiguous). `window` as in `AttentionBackend.attend`."""

    def __call__(
        self, query: Any, keys: Any, values: Any, lengths: PagedLengths, *, scale: float, window: int | None
    ) -> torch.Tensor: ...


class FlashBackend:
    """Any `PagedKernel` over a pool."""

    def __init__(self, name: str, memory: KvMemory, kernel: PagedKernel) -> None:
        self.name = name
        self._memory = memory
        self._kernel = kernel
        self._batch: StepBatch | None = None
        self._lengths: PagedLengths | None = None

    def prepare(self, batch: StepBatch) -> None:
        self._batch, self._lengths = batch, paged_lengths(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, window: int | None
    ) -> torch.Tensor:
        assert self._batch is not None and self._lengths is not None, "attend before prepare"
        write_kv(self._memory, self._batch, layer, key, value)
        keys, values = self._memory.keys(layer).transpose(1, 2), self._memory.values(layer).transpose(1, 2)
        return self._kernel(query, keys, values, self._lengths, scale=scale, window=window)


def paged_lengths(batch: StepBatch) -> PagedLengths:
    """Decodes and chunks alike, in the order of their rows."""
    device, decodes = batch.tokens.device, batch.decodes
    queries = [1] * decodes + [chunk.count for chunk in batch.chunks]
    contexts = torch.cat([batch.lengths, torch.tensor([chunk.end for chunk in batch.chunks], dtype=torch.int32, device=device)])
    widest = max([batch.tables.shape[1] if decodes else 0, *(len(chunk.blocks) for chunk in batch.chunks)])
    # what lies beyond a sequence's own blocks is never read; any valid block will do
    tables = torch.zeros((len(queries), widest), dtype=torch.int32, device=device)
    tables[:decodes, : batch.tables.shape[1]] = batch.tables
    for row, chunk in enumerate(batch.chunks, decodes):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    return PagedLengths(
        starts=_running_sum(torch.tensor(queries, dtype=torch.int32, device=device)),
        contexts=contexts,
        context_starts=_running_sum(contexts),
        tables=tables,
        longest_query=max(queries),
        longest_context=int(contexts.max()),
    )


def _running_sum(counts: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


# -- the libraries ---------------------------------------------------------------------------------------------------


def flash_attn_kernel(function: Callable[..., Any]) -> PagedKernel:
    """flash-attn 2: `flash_attn.flash_attn_varlen_func`."""

    def call(query: Any, keys: Any, values: Any, lengths: PagedLengths, *, scale: float, window: int | None) -> torch.Tensor:
        return function(
            query, keys, values, lengths.starts, lengths.context_starts, lengths.longest_query, lengths.longest_context,
            softmax_scale=scale, causal=True, window_size=(-1 if window is None else window - 1, 0), block_table=lengths.tables,
        )  # fmt: skip

    return call


def varlen_attn_kernel(function: Callable[..., Any]) -> PagedKernel:
    """torch's own: `torch.nn.attention.varlen.varlen_attn`."""

    def call(query: Any, keys: Any, values: Any, lengths: PagedLengths, *, scale: float, window: int | None) -> torch.Tensor:
        return function(
            query, keys, values, lengths.starts, None, lengths.longest_query, lengths.longest_context,
            scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
            seqused_k=lengths.contexts, block_table=lengths.tables,
        )  # fmt: skip

    return call


def fa4_kernel(function: Callable[..., Any]) -> PagedKernel:
    """flash-attn 4: `flash_attn.cute.flash_attn_varlen_func`, which gives the log-sum-exp as well."""

    def call(query: Any, keys: Any, values: Any, lengths: PagedLengths, *, scale: float, window: int | None) -> torch.Tensor:
        result = function(
            query, keys, values, cu_seqlens_q=lengths.starts, seqused_k=lengths.contexts, page_table=lengths.tables,
            softmax_scale=scale, causal=True, window_size=(None, None) if window is None else (window - 1, 0),
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    return call


_LIBRARIES: dict[str, tuple[str, str, Callable[[Callable[..., Any]], PagedKernel]]] = {
    "flash_attn": ("flash_attn", "flash_attn_varlen_func", flash_attn_kernel),
    "varlen_attn": ("torch.nn.attention.varlen", "varlen_attn", varlen_attn_kernel),
    "fa4": ("flash_attn.cute", "flash_attn_varlen_func", fa4_kernel),
}
FLASH_NAMES = tuple(_LIBRARIES)


def flash_backend(name: str, memory: KvMemory) -> FlashBackend:
    """The backend `name` over a pool in GPU memory. Raises ConfigError with what is in the way."""
    shape = memory.shape
    if memory.tensor.device.type != "cuda":
        raise ConfigError(f"model.attention: {name} needs a GPU, and the pool is in CPU memory; use auto, sdpa or cpu_paged")
    if shape.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(f"model.attention: {name} takes bfloat16 or float16, not {shape.dtype}; use sdpa")
    if name == "flash_attn" and shape.block_size % FLASH_BLOCK_TOKENS:
        raise ConfigError(f"cache.block_tokens: flash_attn takes a multiple of {FLASH_BLOCK_TOKENS}, not {shape.block_size}")
    module, function, kernel = _LIBRARIES[name]
    try:
        call = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"model.attention: {name} is not installed ({module}.{function}); install it or use sdpa") from error
    return FlashBackend(name, memory, kernel(call))

"""From a model folder to a torch model whose attention goes through the paged pool.

Owns loading and the bridge that transformers calls instead of its own attention. Invariant: a loaded model never keeps KV of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from actors.engine.kv_memory import DTYPES, KvShape
from actors.models.facts import ModelFacts, model_facts
from cpd_ray.errors import ConfigError, ModelUnavailable

log = logging.getLogger(__name__)

ATTENTION = "cpd_paged"
BACKEND_ARGUMENT = "paged_backend"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`model` is transformers' causal LM in eval mode; `kv_heads` are this rank's own."""

    model: Any
    facts: ModelFacts
    dtype: torch.dtype
    device: str
    kv_heads: int

    def kv_shape(self, block_size: int) -> KvShape:
        """One block of this model's (this rank's) KV."""
        return KvShape(self.kv_heads, self.facts.layers, block_size, self.facts.head_dim, self.dtype)


def _paged_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **kwargs: Any
) -> tuple[Any, None]:
    """What transformers calls: `[1, heads, rows, head_dim]` in, `[1, rows, heads, head_dim]` out."""
    backend = kwargs[BACKEND_ARGUMENT]
    attended = backend.attend(
        module.layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling,
        window=kwargs.get("sliding_window"),
    )
    return attended[None], None


AttentionInterface.register(ATTENTION, _paged_attention)


def load_model(folder: Path, *, dtype: str = "bfloat16", device: str = "cpu") -> LoadedModel:
    """Load and check. Raises ModelUnavailable when the folder's model is refused, damaged, incomplete or too large for memory."""
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    facts = model_facts(folder)
    with _quiet_transformers():
        try:
            model, report = AutoModelForCausalLM.from_pretrained(
                folder, dtype=DTYPES[dtype], attn_implementation=ATTENTION, local_files_only=True, output_loading_info=True
            )
            model.eval().requires_grad_(False).to(device)
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            log.exception("loading the model failed")
            raise ModelUnavailable(f"the model's weights can't be loaded ({type(error).__name__}); see the log") from error
    # transformers fills what is missing with random numbers
    if lacking := sorted(report["missing_keys"]):
        raise ModelUnavailable(f"the model's weights lack {len(lacking)} tensor(s), the first is {lacking[0]}")
    return LoadedModel(model, facts, DTYPES[dtype], device, facts.kv_heads)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    bars_were_on = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if bars_were_on:
            transformers_logging.enable_progress_bar()

"""What a model is, read from its folder's JSON alone: its sizes, and whether this engine can run it.

Owns the refusals. Loads no weights, imports no torch: configuration, placement and the router use it.
Invariant: `ModelFacts` exist only for models that `check_supported` lets through.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpd_ray.errors import ModelUnavailable

SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "phi3")
"""Plain-attention decoders: RMS norms, rotary positions, grouped heads, a gated MLP."""

_STATE_SPACE = (
    "mamba",
    "mamba2",
    "jamba",
    "falcon_mamba",
    "falcon_h1",
    "bamba",
    "zamba",
    "zamba2",
    "rwkv",
    "recurrent_gemma",
    "lfm2",
)
_STATE_SPACE_KEYS = ("state_size", "ssm_cfg", "mamba_d_state", "ssm_state_size", "conv_kernel")
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Sizes of a supported model. `windows[layer]`: how many tokens back the layer sees (itself included), None for all."""

    model_type: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    windows: tuple[int | None, ...]

    @property
    def kv_elements_per_token(self) -> int:
        """Keys and values of one token over all layers and KV heads."""
        return 2 * self.layers * self.kv_heads * self.head_dim


def check_supported(config: Mapping[str, Any]) -> None:
    """Raises ModelUnavailable, with the reason, for a `config.json` that this engine can't run exactly."""
    kind = str(config.get("model_type", ""))
    reason = _refusal(kind, config)
    if reason:
        raise ModelUnavailable(
            f"model type {kind!r} can't be served: {reason}; supported are {', '.join(SUPPORTED)}", param="model"
        )


def _refusal(kind: str, config: Mapping[str, Any]) -> str | None:
    if config.get("is_encoder_decoder"):
        return "it is an encoder-decoder, and only decoders have a prefix whose KV can be reused"
    if kind in _STATE_SPACE or any(config.get(key) is not None for key in _STATE_SPACE_KEYS):
        return "it has state-space layers, whose state can't be cut into blocks of KV"
    if config.get("kv_lora_rank") is not None:
        return "it has multi-head latent attention, whose KV has no heads to lay out"
    if "text_config" in config or "vision_config" in config:
        return "it takes more than text"
    if kind not in SUPPORTED:
        return "it is not one of the plain-attention decoders that this engine was tested with"
    if config.get("quantization_config"):
        return "its weights are quantised"
    if odd := sorted(set(config.get("layer_types") or ()) - set(_LAYER_KINDS)):
        return f"it has layers of kind {', '.join(odd)}"
    if (rope := _rope_kind(config)) in _LENGTH_DEPENDENT_ROPE:
        return f"its rotary positions ({rope}) depend on the length of the prompt, so a prefix's KV can't be reused"
    return None


def _rope_kind(config: Mapping[str, Any]) -> str:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return str(rope.get("rope_type") or rope.get("type") or "default")


def model_facts(folder: Path) -> ModelFacts:
    """Facts of the model in `folder`. Raises ModelUnavailable when it is refused, or its `config.json` can't be read."""
    config = _read_json(folder / "config.json")
    check_supported(config)
    try:
        heads, hidden, layers = int(config["num_attention_heads"]), int(config["hidden_size"]), int(config["num_hidden_layers"])
        facts = ModelFacts(
            model_type=str(config["model_type"]),
            layers=layers,
            hidden=hidden,
            query_heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            vocab_size=int(config["vocab_size"]),
            max_position=int(config["max_position_embeddings"]),
            eos_token_ids=_eos_ids(config, folder),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
            windows=_windows(config, layers),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ModelUnavailable(f"the model's config.json lacks or garbles a size ({error})", param="model") from error
    if (
        min(facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim, facts.vocab_size) < 1
        or facts.query_heads % facts.kv_heads
    ):
        raise ModelUnavailable("the model's config.json has sizes that no model can have", param="model")
    return facts


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelUnavailable(f"the model's {path.name} can't be read ({type(error).__name__})", param="model") from error
    if not isinstance(content, dict):
        raise ModelUnavailable(f"the model's {path.name} is no JSON object", param="model")
    return content


def _eos_ids(config: Mapping[str, Any], folder: Path) -> tuple[int, ...]:
    """generation_config.json says what ends an answer; config.json when there is none."""
    generation = _read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ids = generation.get("eos_token_id", config.get("eos_token_id"))
    if ids is None:
        return ()
    return tuple(int(i) for i in ids) if isinstance(ids, list) else (int(ids),)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    # Qwen2 and Qwen3 state a window that they use only when told to
    if window is None or not config.get("use_sliding_window", config["model_type"] not in ("qwen2", "qwen3")):
        return (None,) * layers
    first = int(config.get("max_window_layers", 28)) if config["model_type"] in ("qwen2", "qwen3") else 0
    kinds = config.get("layer_types") or ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"{len(kinds)} layer_types for {layers} layers")
    return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)

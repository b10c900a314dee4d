"""The decoder stack over the paged pool: tokens in, logits of the sampled rows out.

Owns the order of operations in a layer. Two ways to run the same weights: `LeanDecoder`, our own loop over transformers' modules' weights
(a third of the calls, rows that nobody samples skip the last layer's products), and `TransformersDecoder`, the library's forward, for
weights that are split over ranks. Invariant: both give the same logits to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn import functional

from actors.engine.attention.base import AttentionBackend
from actors.engine.batch import StepBatch
from actors.engine.loading import BACKEND_ARGUMENT, LoadedModel


class Decoder(Protocol):
    """`backend` has been prepared for `batch`."""

    def logits(self, batch: StepBatch, backend: AttentionBackend) -> torch.Tensor:
        """`[sampled rows, vocabulary]`; writes the KV of every row."""
        ...


class LayerOps(Protocol):
    """What happens between matrix products. All on `[rows, ...]`, contiguous."""

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """`x += delta` in place (where given), then the RMS norm of `x` times `weight`."""
        ...

    def gated_silu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """`silu(gate) * up`."""
        ...

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        """Rotary positions in place on the leading dimensions of `[rows, heads, head_dim]`."""
        ...


class TorchOps:
    """Plain torch: any device, any dtype. Rounds where transformers rounds."""

    def add_rms_norm(self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if delta is not None:
            x.add_(delta)
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    def gated_silu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return functional.silu(gate).mul_(up)

    def rotate(self, heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> None:
        rotary = heads[..., : cosine.shape[1]]
        low, high = rotary.chunk(2, -1)
        rotary.copy_(rotary * cosine[:, None] + torch.cat((-high, low), -1) * sine[:, None])


class TransformersDecoder:
    """The library's own forward, with attention through the registered bridge."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._model = loaded.model

    def logits(self, batch: StepBatch, backend: AttentionBackend) -> torch.Tensor:
        arguments = {"use_cache": False, BACKEND_ARGUMENT: backend}
        output = self._model.model(input_ids=batch.tokens[None], position_ids=batch.positions[None], **arguments)
        return self._model.lm_head(output.last_hidden_state[0, batch.sample_rows])


@dataclass(frozen=True, slots=True)
class Product:
    """A linear layer's weight and bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class LeanLayer:
    """One decoder layer's weights. `query_norm`, `key_norm`: per-head norms, where the model has them."""

    input_norm: torch.Tensor
    query: Product
    key: Product
    value: Product
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: Product
    middle_norm: torch.Tensor
    gate: Product
    up: Product
    down: Product
    scale: float
    window: int | None


def choose_decoder(loaded: LoadedModel, ops: LayerOps) -> Decoder:
    """The lean loop for the models it knows, the library's forward for the others."""
    return LeanDecoder(loaded, ops) if loaded.model.config.hidden_act in ("silu", "swish") else TransformersDecoder(loaded)


class LeanDecoder:
    """Our own loop, for one device and an MLP gated by silu."""

    def __init__(self, loaded: LoadedModel, ops: LayerOps) -> None:
        config = loaded.model.config
        self._ops = ops
        self._eps = float(config.rms_norm_eps)
        self._head_dim = loaded.facts.head_dim
        stack = loaded.model.model
        self._layers = [lean_layer(m, loaded.facts.query_heads, loaded, i) for i, m in enumerate(stack.layers)]
        self._embedding = stack.embed_tokens.weight
        self._rotary = stack.rotary_emb
        self._final_norm = stack.norm.weight
        self._head = Product(loaded.model.lm_head.weight, loaded.model.lm_head.bias)

    def logits(self, batch: StepBatch, backend: AttentionBackend) -> torch.Tensor:
        x = functional.embedding(batch.tokens, self._embedding)
        cosine, sine = (t[0].contiguous() for t in self._rotary(x, position_ids=batch.positions[None]))
        delta: torch.Tensor | None = None
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            attended = self._attend(
                layer, index, self._ops.add_rms_norm(x, delta, layer.input_norm, self._eps), cosine, sine, backend
            )
            if index == last and len(batch.sample_rows) < len(x):
                # all KV is written: only the rows that are sampled go on
                x, attended = x[batch.sample_rows], attended[batch.sample_rows]
            normed = self._ops.add_rms_norm(x, layer.output(attended), layer.middle_norm, self._eps)
            delta = layer.down(self._ops.gated_silu(layer.gate(normed), layer.up(normed)))
        return self._head(self._ops.add_rms_norm(x, delta, self._final_norm, self._eps))

    def _attend(
        self,
        layer: LeanLayer,
        index: int,
        normed: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        backend: AttentionBackend,
    ) -> torch.Tensor:
        query = self._heads(layer.query(normed), layer.query_norm)
        key = self._heads(layer.key(normed), layer.key_norm)
        value = self._heads(layer.value(normed), None)
        self._ops.rotate(query, cosine, sine)
        self._ops.rotate(key, cosine, sine)
        return backend.attend(index, query, key, value, scale=layer.scale, window=layer.window).flatten(1)

    def _heads(self, x: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, self._head_dim)
        if norm is None:
            return heads
        return self._ops.add_rms_norm(heads.flatten(0, 1), None, norm, self._eps).view_as(heads)


def lean_layer(module: Any, query_heads: int, loaded: LoadedModel, index: int) -> LeanLayer:
    """A transformers decoder layer's weights, by name; fused ones are cut into views."""
    attention, mlp, dim = module.self_attn, module.mlp, loaded.facts.head_dim
    queries, keys = query_heads * dim, loaded.kv_heads * dim
    if hasattr(attention, "qkv_proj"):
        query, key, value = _cut(attention.qkv_proj, queries, keys, keys)
        gate, up = _cut(mlp.gate_up_proj, *[mlp.gate_up_proj.weight.shape[0] // 2] * 2)
    else:
        query, key, value = (_product(getattr(attention, name)) for name in ("q_proj", "k_proj", "v_proj"))
        gate, up = _product(mlp.gate_proj), _product(mlp.up_proj)
    return LeanLayer(
        input_norm=module.input_layernorm.weight,
        query=query,
        key=key,
        value=value,
        query_norm=attention.q_norm.weight if hasattr(attention, "q_norm") else None,
        key_norm=attention.k_norm.weight if hasattr(attention, "k_norm") else None,
        output=_product(attention.o_proj),
        middle_norm=module.post_attention_layernorm.weight,
        gate=gate,
        up=up,
        down=_product(mlp.down_proj),
        scale=float(attention.scaling),
        window=loaded.facts.windows[index],
    )


def _product(linear: Any) -> Product:
    return Product(linear.weight, linear.bias)


def _cut(linear: Any, *sizes: int) -> list[Product]:
    biases = linear.bias.split(sizes) if linear.bias is not None else [None] * len(sizes)
    return [Product(weight, bias) for weight, bias in zip(linear.weight.split(sizes), biases, strict=True)]

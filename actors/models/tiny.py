"""A tiny random Llama with a byte-level tokenizer, the same on every machine: for tests and benchmarks.

Owns the recipe from a `TinySpec` to a model folder that transformers loads. No torch here.
Invariant: equal specs give equal weights. Weights are scaled so that attention matters: a wrong byte of KV changes the answer.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from cpd_ray.errors import ConfigError

BYTES = 256
BOS, IM_START, IM_END, PAD = "<|bos|>", "<|im_start|>", "<|im_end|>", "<|pad|>"
SPECIALS = (BOS, IM_START, IM_END, PAD)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_FORMAT = 1
"""Goes up when the same spec would give other files."""


@dataclass(frozen=True, slots=True)
class TinySpec:
    """The model's size. Raises ConfigError, naming the field, for a size that no Llama can have."""

    layers: int = 2
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = BYTES + len(SPECIALS)
    max_position: int = 32_768
    seed: int = 0

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, what: str) -> None:
            if not ok:
                raise ConfigError(f"model tiny: {name} must be {what}, not {getattr(self, name)}", param="model")

        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "max_position"):
            need(1 <= getattr(self, name) <= 1 << 20, name, "from 1 to 1048576")
        need(self.heads % self.kv_heads == 0, "heads", f"a multiple of kv_heads ({self.kv_heads})")
        need(self.head_dim % 2 == 0, "head_dim", "even")
        need(BYTES + len(SPECIALS) <= self.vocab <= 1 << 20, "vocab", f"from {BYTES + len(SPECIALS)} to 1048576")
        need(0 <= self.seed < 1 << 32, "seed", "from 0 to 4294967295")

    @classmethod
    def parse(cls, text: str) -> TinySpec:
        """From `tiny` or `tiny:layers=2,hidden=64`; raises ConfigError for an unknown name or a value that is no integer."""
        _, _, options = text.partition(":")
        known = [f.name for f in fields(cls)]
        values: dict[str, int] = {}
        for option in filter(None, options.split(",")):
            name, _, value = option.partition("=")
            if name.strip() not in known:
                raise ConfigError(f"model tiny has no option {name.strip()!r}; known: {', '.join(known)}", param="model")
            try:
                values[name.strip()] = int(value)
            except ValueError:
                raise ConfigError(f"model tiny: {name.strip()} must be an integer, not {value.strip()!r}", param="model") from None
        return cls(**values)

    @property
    def recipe(self) -> dict[str, Any]:
        """What a folder of this model is made from."""
        return {"kind": "tiny", "format": _FORMAT, **asdict(self)}

    @property
    def folder(self) -> str:
        """A name that tells every size, so that two specs never share a folder."""
        short = {"layers": "l", "hidden": "h", "heads": "q", "kv_heads": "kv", "head_dim": "d", "intermediate": "i", "vocab": "v"}
        sizes = "-".join(f"{short[name]}{value}" for name, value in asdict(self).items() if name in short)
        return f"tiny-{sizes}-p{self.max_position}-s{self.seed}"


def write_tiny(spec: TinySpec, folder: Path) -> None:
    """Write config, weights (float32), tokenizer and chat template into an existing folder."""
    (folder / "config.json").write_text(json.dumps(_config(spec), indent=1) + "\n")
    generation = {"bos_token_id": BYTES, "eos_token_id": BYTES + 2, "pad_token_id": BYTES + 3}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    save_file(_weights(spec), folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(spec, folder)


def _config(spec: TinySpec) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BYTES,
        "eos_token_id": BYTES + 2,
        "pad_token_id": BYTES + 3,
        "dtype": "float32",
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "max_position_embeddings": spec.max_position,
        "mlp_bias": False,
        "num_attention_heads": spec.heads,
        "num_hidden_layers": spec.layers,
        "num_key_value_heads": spec.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "vocab_size": spec.vocab,
    }


def _weights(spec: TinySpec) -> dict[str, npt.NDArray[np.float32]]:
    generator = np.random.Generator(np.random.PCG64(spec.seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        scale = np.float32(gain / np.sqrt(columns))
        return generator.standard_normal((rows, columns), dtype=np.float32) * scale

    ones = np.ones(spec.hidden, dtype=np.float32)
    query, kv = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    weights = {"model.embed_tokens.weight": matrix(spec.vocab, spec.hidden, gain=float(np.sqrt(spec.hidden)))}
    for layer in range(spec.layers):
        at = f"model.layers.{layer}."
        weights[at + "input_layernorm.weight"] = ones.copy()
        weights[at + "post_attention_layernorm.weight"] = ones.copy()
        # peaked and loud attention: 16 changed tokens of 1,000 change the greedy answer within 4 tokens
        weights[at + "self_attn.q_proj.weight"] = matrix(query, spec.hidden, gain=3.0)
        weights[at + "self_attn.k_proj.weight"] = matrix(kv, spec.hidden)
        weights[at + "self_attn.v_proj.weight"] = matrix(kv, spec.hidden)
        weights[at + "self_attn.o_proj.weight"] = matrix(spec.hidden, query, gain=2.0)
        weights[at + "mlp.gate_proj.weight"] = matrix(spec.intermediate, spec.hidden)
        weights[at + "mlp.up_proj.weight"] = matrix(spec.intermediate, spec.hidden)
        weights[at + "mlp.down_proj.weight"] = matrix(spec.hidden, spec.intermediate)
    weights["model.norm.weight"] = ones.copy()
    weights["lm_head.weight"] = matrix(spec.vocab, spec.hidden, gain=3.0)
    return weights


def byte_symbols() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies: itself where printable, else the next from U+0100."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(BYTES)]


def _write_tokenizer(spec: TinySpec, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # token id = byte value; ids after the special ones exist only to make the vocabulary as large as asked
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocabulary |= {token: BYTES + i for i, token in enumerate(SPECIALS)}
    vocabulary |= {f"<|extra_{i}|>": i for i in range(len(vocabulary), spec.vocab)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": IM_END,
        "pad_token": PAD,
        "model_max_length": spec.max_position,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")

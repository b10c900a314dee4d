"""Loading: each supported family runs exactly as transformers runs it; what is damaged or refused says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from actors.engine.assemble import assemble
from actors.engine.decoder import LeanDecoder, TransformersDecoder, choose_decoder
from actors.engine.loading import load_model
from actors.engine.plan import StepPlan
from actors.models.resolve import resolve
from cpd_ray.errors import ConfigError, ModelUnavailable
from tests.actors.engine.torch_rig import BACKENDS, KERNELS, Bench, Oracle, step_of

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 131,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "head_dim": 8},
    "llama with llama3 positions and biases": {
        "model_type": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 16},
    "mistral with a window": {"model_type": "mistral", "sliding_window": 9, "head_dim": 8},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1},
    "qwen3": {"model_type": "qwen3", "head_dim": 16},
    "qwen3 with windows": {
        "model_type": "qwen3", "head_dim": 16, "use_sliding_window": True, "sliding_window": 20, "layer_types": SLIDING
    },
    "phi3": {"model_type": "phi3", "sliding_window": None, "partial_rotary_factor": 0.5},
    "phi3 with a window": {"model_type": "phi3", "sliding_window": 13},
}  # fmt: skip


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random model of each family, weights large enough that attention and position matter."""
    folders = {}
    for name, changes in FAMILIES.items():
        torch.manual_seed(len(name))
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**SIZES, **changes}), dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 2 / parameter.shape[1] ** 0.5)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        folders[name] = tmp_path_factory.mktemp("family")
        model.save_pretrained(folders[name])
    return folders


def logits_in_chunks(bench: Bench, tokens: list[int], cuts: list[int]) -> torch.Tensor:
    """Logits after each piece of `tokens`, the rest one by one."""
    table = list(range(-(-len(tokens) // bench.block_size)))
    rows, at = [], 0
    for end in [*cuts, *range(cuts[-1] + 1, len(tokens) + 1)]:
        rows.append(bench.runner.logits(StepPlan((step_of("t", tokens[:end], at, end, table),)))[0])
        at = end
    return torch.stack(rows)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_equals_the_stock_model(families: dict[str, Path], name: str, backend: str) -> None:
    tokens = torch.randint(3, 131, (60,), generator=torch.Generator().manual_seed(1)).tolist()
    cuts = [1, 17, 20, 52]
    expected = Oracle(families[name]).logits(tokens)[[*(c - 1 for c in cuts), *range(cuts[-1], 60)]]
    for decoder in (LeanDecoder, lambda loaded, _: TransformersDecoder(loaded)):
        bench = Bench(families[name], backend=backend, block_size=8, blocks=8, decoder=decoder)
        found = logits_in_chunks(bench, tokens, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("tiny", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(tiny: Path, dtype: str) -> None:
    loaded = load_model(tiny, dtype=dtype)
    assert {p.dtype for p in loaded.model.parameters()} == {getattr(torch, dtype)}
    assert (
        loaded.kv_shape(16).block_bytes
        == 2 * loaded.facts.layers * loaded.kv_heads * 16 * loaded.facts.head_dim * loaded.dtype.itemsize
    )


def test_another_activation_runs_through_the_library(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES, hidden_act="gelu"), dtype=torch.float32)
    model.save_pretrained(tmp_path)
    bench = Bench(tmp_path, backend="cpu_paged", block_size=8, blocks=8, decoder=choose_decoder)
    tokens = list(range(3, 43))
    torch.testing.assert_close(logits_in_chunks(bench, tokens, [40]), Oracle(tmp_path).logits(tokens)[-1:], rtol=1e-4, atol=1e-4)


def test_an_unknown_dtype_is_a_config_error(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="one of float32, bfloat16, float16"):
        load_model(tiny, dtype="int8")


def broken(tiny: Path, folder: Path) -> Path:
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def test_damaged_weights_are_refused(tiny: Path, tmp_path: Path) -> None:
    weights = broken(tiny, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelUnavailable, match="weights can't be loaded"):
        load_model(tmp_path)
    weights.unlink()
    with pytest.raises(ModelUnavailable, match="weights can't be loaded"):
        load_model(tmp_path)


def test_weights_that_lack_a_tensor_are_refused(tiny: Path, tmp_path: Path) -> None:
    weights = broken(tiny, tmp_path) / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelUnavailable, match=r"lack 1 tensor.*up_proj"):
        load_model(tmp_path)


def test_a_refused_model_is_refused_before_its_weights_are_read(tiny: Path, tmp_path: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mamba"}))
    with pytest.raises(ModelUnavailable, match="state-space"):
        load_model(tmp_path)


def test_assembled_parts_fit_each_other(tiny: Path) -> None:
    parts = assemble(tiny, blocks=5, block_size=16, dtype="float32", device="cpu", cache_dir=KERNELS)
    assert parts.memory.tensor.shape == (5, parts.facts.kv_heads, parts.facts.layers, 2, 16, parts.facts.head_dim)
    assert parts.memory.slotted().slots == 5
    with pytest.raises(ConfigError, match=r"model\.device"):
        assemble(tiny, blocks=5, block_size=16, device="cuda:99", cache_dir=KERNELS)
    with pytest.raises(ConfigError, match="doesn't fit into memory"):
        assemble(tiny, blocks=2**44, block_size=16, device="cpu", cache_dir=KERNELS)


@pytest.mark.model
def test_smollm2_answers() -> None:
    bench = Bench(resolve("smollm2"), backend="auto", block_size=64, blocks=4, dtype="bfloat16")
    tokenizer = AutoTokenizer.from_pretrained(resolve("smollm2"))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    text = bench.text(
        "q", tokenizer(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True))["input_ids"]
    )
    bench.step([(text, len(text.tokens))])
    while text.tokens[-1] != tokenizer.eos_token_id and len(text.answer) < 20:
        bench.step([(text, 1)])
    assert "Paris" in tokenizer.decode(text.answer)

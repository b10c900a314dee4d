"""Refusals name the key and what would be right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from cpd_ray import config as cfg
from cpd_ray.errors import ConfigError
from cpd_ray.types import Role


@dataclass(frozen=True)
class Shape:
    kv_heads: int = 3
    query_heads: int = 9
    max_position: int = 8192


def test_defaults_load_and_pools_are_whole_blocks() -> None:
    config = cfg.load({})
    assert config.pool_blocks(Role.DECODE) * config.cache.block_tokens == config.pool_tokens(Role.DECODE)
    assert config.runtime.admission.max_in_flight == 24


@pytest.mark.parametrize(
    ("given", "path", "hint"),
    [
        ({"modle": {}}, "modle", "unknown key"),
        ({"model": {"idd": "x"}}, "model.idd", "unknown key"),
        ({"cache": {"block_tokens": 0}}, "cache.block_tokens", "greater than 0"),
        ({"model": {"attention": "flash_attn"}, "cache": {"block_tokens": 64}}, "cache.block_tokens", "256"),
        ({"model": {"device": "cpu", "attention": "fa4"}}, "model.attention", "sdpa"),
        ({"roles": {"decode": {"replicas": 0}}}, "decode.replicas", "1 or more"),
        ({"roles": {"prefill": {"replicas": 0}, "pre_prefill": {"replicas": 0}}}, "prefill.replicas", "1 or more"),
        ({"roles": {"prefill": {"pool_tokens": 64}}}, "roles.prefill.pool_tokens", "two blocks"),
        ({"model": {"max_model_len": 100_000}}, "pool_tokens", "never fit"),
        ({"runtime": {"engine": {"chunk_tokens": 4096}}}, "runtime.engine", "at most step_tokens"),
        ({"runtime": {"routing": {"policy": "magic"}}}, "runtime.routing.policy", "cost"),
        ({"name": "No Spaces"}, "name", "pattern"),
    ],
)
def test_what_cannot_work_is_refused_by_name(given: dict[str, object], path: str, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        cfg.load(given)
    assert path in caught.value.message
    assert hint in caught.value.message


def test_yaml_errors_are_config_errors(tmp_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match="can't be read"):
        cfg.load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ConfigError, match="not YAML"):
        cfg.load(broken)
    broken.write_text("- a")
    with pytest.raises(ConfigError, match="mapping"):
        cfg.load(broken)
    good = tmp_path / "good.yaml"
    good.write_text("model: {id: tiny}\n")
    assert cfg.load(good).model.id == "tiny"


@pytest.mark.parametrize(("tp", "fits"), [(1, True), (3, True), (9, True), (2, False), (4, False)])
def test_tensor_parallel_against_heads(tp: int, fits: bool) -> None:
    config = cfg.load({"roles": {"prefill": {"tensor_parallel": tp}}})
    if fits:
        cfg.check_model(config, Shape())
    else:
        with pytest.raises(ConfigError, match=r"roles\.prefill\.tensor_parallel.*1, 3, 9"):
            cfg.check_model(config, Shape())


def test_model_longer_than_its_positions() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_model_len.*8192"):
        cfg.check_model(cfg.load({"model": {"max_model_len": 10_000}}), Shape())


def test_slab_against_object_store() -> None:
    store = 4 * 2**30
    assert cfg.slab_bytes(cfg.load({}), store) == store // 2
    assert cfg.slab_bytes(cfg.load({"slab": {"gib": 3}}), store) == 3 * 2**30
    with pytest.raises(ConfigError, match=r"slab\.gib.*object-store-memory"):
        cfg.slab_bytes(cfg.load({"slab": {"gib": 3.5}}), store)

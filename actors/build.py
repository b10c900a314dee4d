"""From a configuration to running parts: the one place where plain classes are put together.

Owns no state. Ray deployments, local processes and tests all build through here. Invariant: two processes with equal configurations
build parts with equal layout digests and root keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from actors.decode import DecodeWorker
from actors.engine.assemble import assemble
from actors.engine.engine import AsyncEngine
from actors.engine.validation import EngineShape
from actors.kv_cache import KvCacheNode
from actors.models.facts import ModelFacts, model_facts
from actors.models.resolve import resolve
from actors.prefill import PrefillWorker
from actors.served_model import ServedModel
from actors.worker import Identity, Worker
from cpd_ray.clock import Clock
from cpd_ray.config import CPDConfig, check_model
from cpd_ray.errors import ConfigError
from cpd_ray.ids import NodeId, pool_source
from cpd_ray.types import Role
from kv.events import EventLog
from kv.layout import BlockLayout
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.pool import BlockPool
from kv.tiers import TieredKv
from kv.transport.base import Transport

AnyWorker: TypeAlias = PrefillWorker | DecodeWorker


def model_folder(config: CPDConfig) -> Path:
    """The model's local folder, prepared or fetched when it isn't there yet. Raises ModelUnavailable."""
    name = config.model.id if config.model.revision is None else f"{config.model.id}@{config.model.revision}"
    return resolve(name, Path(config.model.cache_dir) if config.model.cache_dir else None)


def facts_of(config: CPDConfig) -> ModelFacts:
    """The model's facts, the configuration checked against them. Raises ModelUnavailable, ConfigError."""
    facts = model_facts(model_folder(config))
    check_model(config, facts)
    return facts


def layout_of(config: CPDConfig, facts: ModelFacts) -> BlockLayout:
    """The layout of a block of all heads."""
    return BlockLayout(facts.layers, facts.kv_heads, config.cache.block_tokens, facts.head_dim, config.model.dtype)


def layout_digest(config: CPDConfig, facts: ModelFacts) -> bytes:
    """What peers compare before one reads the other's blocks."""
    return layout_of(config, facts).digest(model=config.model.id, revision=config.model.revision)


def served_model(config: CPDConfig, facts: ModelFacts) -> ServedModel:
    """What the router knows of the model."""
    return ServedModel(
        name=config.model.name,
        identity=config.model.id,
        revision=config.model.revision,
        dtype=config.model.dtype,
        block_tokens=config.cache.block_tokens,
        kv_bytes_per_token=layout_of(config, facts).bytes_per_token,
        vocab_size=facts.vocab_size,
        max_tokens=max_tokens(config, facts),
    )


def max_tokens(config: CPDConfig, facts: ModelFacts) -> int:
    """Prompt plus answer, at most: the model's positions, the configured limit, and what every worker's pool can hold."""
    pools = [config.pool_blocks(role) * config.cache.block_tokens for role in Role if config.roles.get(role).replicas]
    return min([config.model.max_model_len or facts.max_position, facts.max_position, *pools])


def make_transport(config: CPDConfig, peer: str, digest: bytes) -> Transport:
    """This process's transport, known to others as `peer`."""
    if config.transfer.transport == "nixl":
        from kv.transport.nixl import NixlTransport

        return NixlTransport(peer, digest, concurrent_reads=config.transfer.concurrency)
    raise ConfigError("transfer.transport: inprocess joins parts of one process only; use nixl")

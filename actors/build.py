"""From a configuration to running parts: the one place where plain classes are put together.

Owns no state. Ray deployments, local processes and tests all build through here. Invariant: two processes with equal configurations
build parts with equal layout digests and root keys.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from actors.copy_near import CopySettings
from actors.decode import DecodeWorker
from actors.engine.calibrate import calibrate
from actors.engine.engine import AsyncEngine
from actors.engine.scheduler import Scheduler
from actors.engine.validation import EngineShape
from actors.kv_cache import KvCacheNode
from actors.models.facts import ModelFacts, model_facts
from actors.models.resolve import resolve
from actors.prefill import PrefillWorker
from actors.served_model import ServedModel
from actors.worker import Identity, TierPort, Worker
from cpd_ray.clock import Clock
from cpd_ray.config import CPDConfig, check_model
from cpd_ray.errors import ConfigError
from cpd_ray.ids import NodeId, pool_source, slab_source
from cpd_ray.types import Role
from kv.events import EventLog
from kv.eviction import DEFAULT_POLICY, new_policy
from kv.layout import BlockLayout
from kv.memory import SlottedMemory
from kv.node import KvNode
from kv.pool import BlockPool
from kv.sides import PoolSide, SlabSide
from kv.slab import Slab
from kv.slab_types import SlabLimits
from kv.tiers import TieredKv, TierSettings
from kv.transport.base import Transport
from placement.cost_fit import StepCostFit

AnyWorker: TypeAlias = PrefillWorker | DecodeWorker

POOL_REGION = "pool"


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


@dataclass(frozen=True, slots=True)
class NodeSide:
    """A worker's view of KV nodes: its own node's slab as mapped here (None when there is none), and clients of all nodes, which may
    change while the worker runs."""

    own: SlabSide | None
    nodes: Mapping[NodeId, KvNode]


def make_worker(
    config: CPDConfig,
    identity: Identity,
    side: NodeSide,
    clock: Clock,
    around: Callable[[Transport], Transport] = lambda inner: inner,
) -> AnyWorker:
    """A worker with its engine, pool, transport (and what is to be put `around` it) and way to the tiers; blocks while the model loads.
    Raises ModelUnavailable, ConfigError."""
    from actors.engine.assemble import assemble  # needs torch, which only workers load

    folder = model_folder(config)
    facts = facts_of(config)
    parts = assemble(
        folder,
        blocks=config.pool_blocks(identity.role),
        block_size=config.cache.block_tokens,
        dtype=config.model.dtype,
        device=config.model.device,
        attention=config.model.attention,
        threads=config.model.threads,
    )
    memory = parts.memory.slotted()
    transport = around(make_transport(config, identity.worker, layout_digest(config, facts)))
    region = transport.register(POOL_REGION, memory, identity.epoch)
    events = EventLog(pool_source(identity.worker), identity.node, identity.epoch)
    pool = BlockPool(memory.slots, clock=clock, events=events)
    settings = TierSettings(timeout_s=config.transfer.timeout_s, checksums=config.transfer.checksums)
    poolside = PoolSide(pool, memory, region)
    tiers = TieredKv(identity.worker, poolside, side.own, side.nodes, transport, clock=clock, settings=settings)
    port = TierPort(tiers)
    shape = EngineShape(
        config.cache.block_tokens,
        facts.vocab_size,
        min(max_tokens(config, facts), facts.max_position),
        frozenset(facts.eos_token_ids),
    )
    cost = StepCostFit()
    calibrate(parts.runner, shape, memory.slots, cost.observe)
    scheduler = Scheduler(pool, shape, config.runtime.engine, clock, cost, port.committed)
    engine = AsyncEngine(scheduler, parts.runner, port)
    worker = Worker(identity, engine, port, events)
    if identity.role is Role.DECODE:
        return DecodeWorker(worker)
    return PrefillWorker(worker, bounce_tokens=config.runtime.routing.bounce_tokens)


def make_node(
    config: CPDConfig, node: NodeId, memory: SlottedMemory, transport: Transport, *, epoch: int, clock: Clock
) -> KvCacheNode:
    """A node's KV cache over `memory`, whose slots are blocks."""
    slab, slots = config.slab, memory.slots
    limits = SlabLimits(
        slots=slots,
        slot_bytes=memory.slot_bytes,
        writer_slots=max(1, int(slots * slab.writer_share)),
        pin_slots=int(slots * slab.pin_share),
        reservation_ttl_s=slab.reservation_ttl_s,
        lease_ttl_s=slab.lease_ttl_s,
        lease_grace_s=slab.lease_grace_s,
    )
    events = EventLog(slab_source(node), node, epoch)
    policy = new_policy(DEFAULT_POLICY if slab.eviction == "default" else slab.eviction, slots)
    books = Slab(limits, policy, epoch=epoch, clock=clock, events=events)
    copies = CopySettings(config.transfer.copy_after_reads, config.transfer.copy_share, config.transfer.timeout_s)
    return KvCacheNode(books, memory, events, transport, clock=clock, copies=copies)

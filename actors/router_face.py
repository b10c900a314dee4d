"""The router as the HTTP layer and Serve handles see it.

Owns the answers about the system as a whole: its status, its health, what a cache reset means. Invariant: `healthy` is true only when a
request would be answered now.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from actors.fleet import Fleet
from actors.http.face import ModelCard, Status
from actors.router import Router, Warmed
from actors.text.codec import TextCodec
from cpd_ray.errors import PeerGone, WorkerGone
from cpd_ray.ids import NodeId
from cpd_ray.types import GenerateRequest, Role, Tier, TokenChunk
from kv.directory import Directory
from placement.routing.types import Decision


class RouterFace:
    """`actors.http.face.Face` over a router and what it stands on."""

    def __init__(self, router: Router, fleet: Fleet, directory: Directory, codec: TextCodec) -> None:
        self._router = router
        self._fleet = fleet
        self._directory = directory
        self._codec = codec

    @property
    def codec(self) -> TextCodec:
        return self._codec

    def models(self) -> tuple[ModelCard, ...]:
        model = self._router.model
        return (ModelCard(model.name, model.max_tokens, model.vocab_size),)

    def healthy(self) -> bool:
        prefills = self._fleet.workers(Role.PREFILL) or self._fleet.workers(Role.PRE_PREFILL)
        return bool(prefills and self._fleet.workers(Role.DECODE))

    def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        return self._router.generate(request)

    async def plan(self, request: GenerateRequest) -> Decision:
        return self._router.plan(request)

    async def warm(self, request: GenerateRequest, ttl_s: float) -> Warmed:
        return await self._router.warm(request, ttl_s)

    async def status(self) -> Status:
        counts = self._router.counts
        nodes = self._router.membership.node_reports
        return Status(counts.in_flight, counts.queued, tuple(self._fleet.reports()), tuple(nodes.values()), len(self._directory))

    async def reset(self, tiers: frozenset[Tier]) -> Mapping[Tier, int]:
        """The tiers are those of a prefill worker: `pool` is every worker's own pool, `node` the slabs of the nodes where prefill
        workers run, `cluster` all other slabs. Blocks in use stay."""
        nodes = self._router.membership.roster.nodes()
        near = self._prefill_nodes()
        chosen = {
            Tier.NODE: [client for node, client in nodes.items() if node in near],
            Tier.CLUSTER: [client for node, client in nodes.items() if node not in near],
        }
        dropped: dict[Tier, int] = {}
        for tier in Tier:
            if tier not in tiers:
                continue
            if tier is Tier.POOL:
                clients = list(self._router.membership.roster.workers().values())
                counts = await asyncio.gather(*(client.clear_pool() for client in clients), return_exceptions=True)
            else:
                counts = await asyncio.gather(*(client.clear() for client in chosen[tier]), return_exceptions=True)
            for count in counts:
                if isinstance(count, BaseException) and not isinstance(count, (WorkerGone, PeerGone)):
                    raise count
            dropped[tier] = sum(count for count in counts if isinstance(count, int))
        await self._router.membership.refresh(at_once=True)
        return dropped

    def _prefill_nodes(self) -> set[NodeId]:
        reports = self._fleet.reports()
        prefill = {r.node for r in reports if r.role is Role.PREFILL}
        return prefill or {r.node for r in reports if r.role is Role.PRE_PREFILL}

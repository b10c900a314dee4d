"""What a replica watches itself with: its meter, its exporter, and its logs' format.

Owns which wrapper goes around what. Starts nothing periodic: the replica calls `export`. Invariant: nothing measured or logged here is
needed for an answer.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.clients import DecodeClient, PrefillClient
from actors.fleet import Fleet
from actors.http.face import Face
from actors.observability import logs
from actors.observability.face import ObservedFace
from actors.observability.metrics import Meter
from actors.observability.ray_meter import RayMeter
from actors.observability.samples import Exporter, PoolTotals, Sample, worker_samples
from actors.observability.table import Side
from actors.observability.transport import ObservedTransport
from actors.observability.workers import ObservedDecode, ObservedPrefill
from actors.worker import Worker
from cpd_ray.clock import Clock
from kv.transport.base import Transport

EXPORT_S = 1.0
"""How often a replica exports what it reports of itself; Ray passes it on every ten seconds unless told otherwise."""


class Observer:
    """Of one replica."""

    def __init__(self, meter: Meter, clock: Clock) -> None:
        self.meter = meter
        self._clock = clock
        self._exporter = Exporter(meter)

    @classmethod
    def of_replica(cls, side: Side, clock: Clock, *, app: str, model: str, role: str, actor: str) -> Observer:
        """Measures with Ray, and has this process's logs written as JSON lines; `actor` names it there."""
        logs.configure({"app": app, "role": role, "actor": actor})
        return cls(RayMeter(side, app=app, model=model, role=role), clock)

    def face(self, face: Face, fleet: Fleet) -> ObservedFace:
        return ObservedFace(face, self.meter, self._clock, lambda: {report.worker: report.role for report in fleet.reports()})

    def prefill(self, client: PrefillClient) -> ObservedPrefill:
        return ObservedPrefill(client, self.meter, self._clock)

    def decode(self, client: DecodeClient) -> ObservedDecode:
        return ObservedDecode(client, self.meter, self._clock)

    def transport(self, transport: Transport) -> ObservedTransport:
        return ObservedTransport(transport, self.meter, self._clock)

    def export(self, samples: Iterable[Sample]) -> None:
        """What was sampled now."""
        self._exporter.export(samples)

    def export_worker(self, worker: Worker) -> None:
        """All that a worker says of itself."""
        pool, tiers = worker.engine.pool, worker.tiers
        (region,) = worker.descriptor.regions
        totals = PoolTotals(pool.evictions, pool.leases_lapsed, region.slot_bytes, tiers.counters, tiers.written)
        self.export(worker_samples(worker.report(), totals))

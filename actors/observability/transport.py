"""A transport that measures what the transport within it moves.

Owns no transfer: calls, errors and memory are those of the transport within. Invariant: each read is counted once, as seconds and bytes when
it succeeded, as a failure when not; a read that its caller gave up is neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from actors.observability.metrics import Meter
from cpd_ray.clock import Clock
from cpd_ray.errors import KVError
from cpd_ray.messages import PeerDescriptor, RegionRef
from kv.memory import SlottedMemory
from kv.transport.base import Span, Transport


class ObservedTransport:
    """`kv.transport.base.Transport` over another."""

    def __init__(self, transport: Transport, meter: Meter, clock: Clock) -> None:
        self.name = transport.name
        self._transport = transport
        self._clock = clock
        self._slot_bytes: dict[str, int] = {}
        self._seconds = meter.histogram("nixl_xfer_time_seconds")
        self._bytes = meter.histogram("nixl_bytes_transferred")
        self._failed = meter.counter("nixl_num_failed_transfers")

    def register(self, region: str, memory: SlottedMemory, generation: int) -> RegionRef:
        self._slot_bytes[region] = memory.slot_bytes
        return self._transport.register(region, memory, generation)

    async def read(
        self,
        source: RegionRef,
        source_slots: Sequence[int],
        into: RegionRef,
        into_slots: Sequence[int],
        *,
        timeout_s: float,
        source_span: Span | None = None,
        into_span: Span | None = None,
    ) -> None:
        began_s = self._clock.now_s()
        try:
            await self._transport.read(
                source, source_slots, into, into_slots, timeout_s=timeout_s, source_span=source_span, into_span=into_span
            )
        except KVError:
            self._failed.add()
            raise
        self._seconds.observe(self._clock.now_s() - began_s)
        each = into_span.nbytes if into_span is not None else self._slot_bytes[into.region]
        self._bytes.observe(float(len(into_slots) * each))

    def describe(self) -> PeerDescriptor:
        return self._transport.describe()

    def connect(self, peer: PeerDescriptor) -> None:
        self._transport.connect(peer)

    def disconnect(self, peer: str) -> None:
        self._transport.disconnect(peer)

    def close(self) -> None:
        self._transport.close()

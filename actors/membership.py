"""Keeping the router's fleet and directory true: asks every worker and node how it is, and what is cached where.

Owns the polling. Decides nothing. Invariant: who is gone leaves the fleet in the round that finds it gone, and a gap in a source's
events leads to its snapshot, never to a guess.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

from actors.fleet import Client, Fleet
from cpd_ray.errors import CPDError, PeerGone, WorkerGone
from cpd_ray.ids import NodeId, SourceId, WorkerId, pool_source, slab_source
from cpd_ray.messages import EventsAfter, EventsPage, NodeReport, WorkerReport
from kv.directory import UNKNOWN_EPOCH, Applied, Directory
from kv.node import KvNode

log = logging.getLogger(__name__)

Ask = Callable[[EventsAfter], Awaitable[EventsPage]]


class Roster(Protocol):
    """Who is there now, by name; changes as workers and nodes come and go."""

    def workers(self) -> Mapping[WorkerId, Client]: ...

    def nodes(self) -> Mapping[NodeId, KvNode]: ...


class Feed(Protocol):
    """Where the directory's content comes from."""

    async def refresh(self, roster: Roster, *, at_once: bool = False) -> None:
        """Take in what has changed since the last call. `at_once`: also what whoever is followed has not heard yet."""
        ...


class SourceFeed:
    """Straight from the sources: asks each pool and each slab for its events."""

    def __init__(self, directory: Directory, *, timeout_s: float = 2.0) -> None:
        self._directory = directory
        self._timeout_s = timeout_s

    async def refresh(self, roster: Roster, *, at_once: bool = False) -> None:
        asks: dict[SourceId, Ask] = {pool_source(w): client.events for w, client in roster.workers().items()}
        asks |= {slab_source(n): client.events for n, client in roster.nodes().items()}
        for state in self._directory.sources():
            if state.source not in asks:
                self._directory.forget(state.source)
        self._directory.expire()
        known = {position.source: position for position in self._directory.positions()}
        await asyncio.gather(*(self._follow(known.get(source), source, ask) for source, ask in asks.items()))

    async def _follow(self, known: EventsAfter | None, source: SourceId, ask: Ask) -> None:
        """Apply what `source` has to tell since last time; on a gap, its snapshot."""
        anew = EventsAfter(source, UNKNOWN_EPOCH, 0)
        try:
            async with asyncio.timeout(self._timeout_s):
                page = await ask(known or anew)
                if any(self._directory.apply(batch) is Applied.GAP for batch in page.batches):
                    for batch in (await ask(anew)).batches:
                        self._directory.apply(batch)
        except (WorkerGone, PeerGone):
            self._directory.forget(source)
        except (TimeoutError, CPDError) as error:
            log.warning("no events from %s: %s", source, error or "no answer in time")


class Membership:
    """`timeout_s`: how long a member may take to answer; one that doesn't stays as it was last heard, until the fleet calls it stale."""

    def __init__(self, roster: Roster, fleet: Fleet, feed: Feed, *, interval_s: float = 0.2, timeout_s: float = 2.0) -> None:
        self.roster = roster
        self._fleet = fleet
        self._feed = feed
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._task: asyncio.Task[None] | None = None
        self.node_reports: dict[NodeId, NodeReport] = {}
        self.on_change: Callable[[], None] = lambda: None

    async def refresh(self, *, at_once: bool = False) -> None:
        """One round over everyone. `at_once`: of the directory, too, nothing older than this call."""
        workers, nodes = dict(self.roster.workers()), dict(self.roster.nodes())
        for worker in set(self._fleet.members()) - set(workers):
            self._fleet.gone(worker)
        for node in set(self.node_reports) - set(nodes):
            del self.node_reports[node]
        await asyncio.gather(
            *(self._ask_worker(w, c) for w, c in workers.items()),
            *(self._ask_node(n, c) for n, c in nodes.items()),
            self._feed.refresh(self.roster, at_once=at_once),
        )
        self._fleet.round_ended()
        self.on_change()

    def worker_died(self, worker: WorkerId) -> None:
        """A caller found it dead before a round did."""
        self._fleet.gone(worker)
        self.on_change()

    async def start(self) -> None:
        """One round now, then one every `interval_s`."""
        await self.refresh()
        self._task = asyncio.create_task(self._loop(), name="membership")

    async def stop(self) -> None:
        """No more rounds."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def settled(self) -> None:
        """Return when all that was computed is written down and known here, copies between nodes included."""
        while True:
            await self.refresh()
            if not any(r.unwritten_blocks for r in self._fleet.reports()) and not any(
                n.copying for n in self.node_reports.values()
            ):
                await self.refresh()
                return
            await asyncio.sleep(self._interval_s / 4)

    async def _ask_worker(self, worker: WorkerId, client: Client) -> None:
        try:
            report: WorkerReport = await asyncio.wait_for(client.report(), self._timeout_s)
        except WorkerGone:
            self._fleet.gone(worker)
        except (TimeoutError, CPDError) as error:
            log.warning("no report from worker %s: %s", worker, error or "no answer in time")
        else:
            self._fleet.heard(client, report)

    async def _ask_node(self, node: NodeId, client: KvNode) -> None:
        try:
            self.node_reports[node] = await asyncio.wait_for(client.report(), self._timeout_s)
        except PeerGone:
            self.node_reports.pop(node, None)
        except (TimeoutError, CPDError) as error:
            log.warning("no report from the cache of node %s: %s", node, error or "no answer in time")

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("a membership round failed; the next one tries again")

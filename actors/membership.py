"""Keeping the router's fleet and directory true: asks every worker and node what it has and what changed.

Owns the polling. Decides nothing. Invariant: a source that is gone is forgotten by the fleet and by the directory in the same round,
and a gap in a source's events leads to its snapshot, never to a guess.
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
from cpd_ray.messages import EventsAfter, EventsPage, NodeReport
from kv.directory import Applied, Directory
from kv.node import KvNode

log = logging.getLogger(__name__)

NO_EPOCH = -1


class Roster(Protocol):
    """Who is there now, by name; changes as workers and nodes come and go."""

    def workers(self) -> Mapping[WorkerId, Client]: ...

    def nodes(self) -> Mapping[NodeId, KvNode]: ...


class Follower:
    """Feeds one directory from sources' event pages, remembering how far it has read each."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._read: dict[SourceId, tuple[int, int]] = {}

    async def follow(self, source: SourceId, ask: Callable[[EventsAfter], Awaitable[EventsPage]]) -> None:
        """Apply what `source` has to tell since last time; on a gap, its snapshot."""
        for _ in range(2):
            epoch, sequence = self._read.get(source, (NO_EPOCH, 0))
            page = await ask(EventsAfter(source, epoch, sequence))
            if not any(self._directory.apply(batch) is Applied.GAP for batch in page.batches):
                if page.batches:
                    self._read[source] = (page.batches[-1].epoch, page.batches[-1].sequence)
                return
            self._read.pop(source, None)

    def forget(self, source: SourceId) -> None:
        """The source is gone, and with it what it held."""
        self._read.pop(source, None)
        self._directory.forget(source)

    def known(self) -> set[SourceId]:
        return set(self._read)


class Membership:
    """`timeout_s`: a member that does not answer in time is left out until it does."""

    def __init__(self, roster: Roster, fleet: Fleet, directory: Directory, *, interval_s: float = 0.2, timeout_s: float = 2.0) -> None:
        self.roster = roster
        self._fleet = fleet
        self._follower = Follower(directory)
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self.node_reports: dict[NodeId, NodeReport] = {}
        self._task: asyncio.Task[None] | None = None
        self.on_change: Callable[[], None] = lambda: None

    async def refresh(self) -> None:
        """One round over everyone."""
        workers, nodes = dict(self.roster.workers()), dict(self.roster.nodes())
        for worker in set(self._fleet.workers()) - set(workers):
            self._worker_gone(worker)
        known = {pool_source(w) for w in workers} | {slab_source(n) for n in nodes}
        for source in self._follower.known() - known:
            self._follower.forget(source)
        for node in set(self.node_reports) - set(nodes):
            del self.node_reports[node]
        await asyncio.gather(
            *(self.refresh_worker(w, c) for w, c in workers.items()),
            *(self.refresh_node(n, c) for n, c in nodes.items()),
        )
        self.on_change()

    async def refresh_worker(self, worker: WorkerId, client: Client) -> None:
        """One worker's report and events."""
        try:
            async with asyncio.timeout(self._timeout_s):
                report = await client.report()
                self._fleet.heard(client, report)
                await self._follower.follow(pool_source(worker), client.events)
        except WorkerGone:
            self._worker_gone(worker)
        except TimeoutError:
            log.warning("worker %s did not answer within %s s", worker, self._timeout_s)
        except CPDError as error:
            log.warning("worker %s: %s", worker, error)

    async def refresh_node(self, node: NodeId, client: KvNode) -> None:
        """One node's report and events."""
        try:
            async with asyncio.timeout(self._timeout_s):
                self.node_reports[node] = await client.report()
                await self._follower.follow(slab_source(node), client.events)
        except PeerGone:
            self.node_reports.pop(node, None)
            self._follower.forget(slab_source(node))
        except TimeoutError:
            log.warning("the cache of node %s did not answer within %s s", node, self._timeout_s)
        except CPDError as error:
            log.warning("the cache of node %s: %s", node, error)

    def _worker_gone(self, worker: WorkerId) -> None:
        self._fleet.gone(worker)
        self._follower.forget(pool_source(worker))

    def worker_died(self, worker: WorkerId) -> None:
        """A caller found it dead before a round did."""
        self._worker_gone(worker)
        self.on_change()

    async def start(self) -> None:
        """One round now, then one every `interval_s`."""
        await self.refresh()
        self._task = asyncio.create_task(self._loop(), name="membership")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None

    async def _loop(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.refresh()
            except Exception:
                log.exception("a membership round failed; the next one tries again")

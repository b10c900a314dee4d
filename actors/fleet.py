"""The router's view of the workers: their last reports, plus what this router has sent them since.

Owns load accounting on the router's side. Does not poll (see `actors.membership`) and decides nothing. Invariant: a dispatched
request counts here until the worker's report has counted it or it ended, so nothing is counted twice or forgotten; after the last
request ended, nothing is counted at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from actors.clients import DecodeClient, PrefillClient
from cpd_ray.clock import Clock
from cpd_ray.errors import WorkerGone
from cpd_ray.ids import RequestId, WorkerId
from cpd_ray.messages import Origin, WorkerReport, WorkerState
from cpd_ray.types import Role
from placement.routing.types import Snapshot, WorkerView

Client = PrefillClient | DecodeClient


@dataclass(slots=True)
class _Sent:
    """One request on its way: `new_tokens` and `seconds` of prefill it brings."""

    sequence: int
    new_tokens: int
    seconds: float
    sent_at_s: float


@dataclass(slots=True)
class _Member:
    client: Client
    report: WorkerReport
    reported_at_s: float
    sent: dict[RequestId, _Sent] = field(default_factory=dict)
    sequence: int = 0


class Fleet:
    """`router`: this router's name in `Origin`. `stale_after_s`: a worker that has been silent for so long, while others were asked, is
    not chosen; after `lost_after_s` what it was sent counts as lost. (Silence is measured to the last round of asking, not to now: a
    stall of our own process is nobody's silence.)"""

    def __init__(
        self, router: str, clock: Clock, *, bytes_per_token: int, stale_after_s: float = 5.0, lost_after_s: float = 20.0
    ) -> None:
        self._router = router
        self._clock = clock
        self._bytes_per_token = bytes_per_token
        self._stale_after_s = stale_after_s
        self._lost_after_s = lost_after_s
        self._members: dict[WorkerId, _Member] = {}
        self._asked_at_s = clock.now_s()

    # -- membership --------------------------------------------------------------------------------------------------

    def heard(self, client: Client, report: WorkerReport) -> None:
        """A worker's newest report; a new epoch means it restarted and knows nothing of what was sent before."""
        now_s = self._clock.now_s()
        member = self._members.get(report.worker)
        if member is None or member.report.epoch != report.epoch:
            self._members[report.worker] = _Member(client, report, now_s)
            return
        member.client, member.report, member.reported_at_s = client, report, now_s
        counted = report.seen.get(self._router, 0)
        for request_id in [r for r, sent in member.sent.items() if sent.sequence <= counted]:
            del member.sent[request_id]

    def round_ended(self) -> None:
        """Everyone was asked, and had time to answer."""
        self._asked_at_s = self._clock.now_s()

    def gone(self, worker: WorkerId) -> None:
        """Dead or departed: not chosen until it reports again."""
        self._members.pop(worker, None)

    def workers(self, role: Role | None = None) -> list[WorkerId]:
        """Those that have reported lately, draining ones included."""
        return [w for w, m in self._members.items() if self._fresh(m) and (role is None or m.report.role is role)]

    def members(self) -> list[WorkerId]:
        """All that were ever heard and not found gone."""
        return list(self._members)

    def lost(self) -> list[WorkerId]:
        """Members that have been silent for so long that nobody should wait for them."""
        return [w for w, m in self._members.items() if self._silent_s(m) > self._lost_after_s]

    def reports(self) -> list[WorkerReport]:
        """Last report of each."""
        return [m.report for m in self._members.values()]

    def client(self, worker: WorkerId) -> Client:
        """Raises WorkerGone when it is not (or no longer) a member."""
        member = self._members.get(worker)
        if member is None:
            raise WorkerGone(f"worker {worker} is gone")
        return member.client

    def prefill_client(self, worker: WorkerId) -> PrefillClient:
        client = self.client(worker)
        assert self._members[worker].report.role is not Role.DECODE, "a decode worker was asked to prefill"
        return client  # type: ignore[return-value]

    def decode_client(self, worker: WorkerId) -> DecodeClient:
        client = self.client(worker)
        assert self._members[worker].report.role is Role.DECODE, "a prefill worker was asked to decode"
        return client  # type: ignore[return-value]

    # -- load --------------------------------------------------------------------------------------------------------

    @contextmanager
    def dispatch(self, worker: WorkerId, request: RequestId, *, new_tokens: int, seconds: float) -> Iterator[Origin]:
        """Count a request as this worker's load while it is open; gives the origin to send with it. Raises WorkerGone."""
        member = self._members.get(worker)
        if member is None:
            raise WorkerGone(f"worker {worker} is gone")
        member.sequence += 1
        sent = _Sent(member.sequence, new_tokens, seconds, self._clock.now_s())
        member.sent[request] = sent
        try:
            yield Origin(self._router, sent.sequence)
        finally:
            if member.sent.get(request) is sent:
                del member.sent[request]

    def snapshot(self) -> Snapshot:
        """What a policy decides on."""
        views = tuple(self._view(m) for m in self._members.values() if self._fresh(m))
        return Snapshot(workers=views, bytes_per_token=self._bytes_per_token)

    def uncounted(self) -> int:
        """Requests sent that no report has counted yet."""
        return sum(len(m.sent) for m in self._members.values())

    def _fresh(self, member: _Member) -> bool:
        return self._silent_s(member) <= self._stale_after_s and member.report.state is not WorkerState.STARTING

    def _silent_s(self, member: _Member) -> float:
        return self._asked_at_s - member.reported_at_s

    def _view(self, member: _Member) -> WorkerView:
        report, now_s = member.report, self._clock.now_s()
        view = WorkerView(
            worker=report.worker,
            role=report.role,
            node=report.node,
            running=report.running,
            waiting=report.waiting,
            backlog_tokens=report.backlog_tokens,
            backlog_s=report.backlog_s,
            pool=report.pool,
            step_cost=report.step_cost,
            fetch_bytes_per_s=report.fetch_bytes_per_s,
            queue_s=report.queue_s,
            queue_age_s=report.queue_age_s,
            draining=report.state is WorkerState.DRAINING,
        )
        sent = list(member.sent.values())
        if not sent:
            return view
        return replace(
            view,
            waiting=view.waiting + len(sent),
            backlog_tokens=view.backlog_tokens + sum(s.new_tokens for s in sent),
            backlog_s=view.backlog_s + sum(s.seconds for s in sent),
            queue_s=view.queue_s + tuple(s.seconds for s in sent),
            queue_age_s=view.queue_age_s + tuple(now_s - s.sent_at_s for s in sent),
        )

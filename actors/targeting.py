"""A Serve request router that sends a call to the one replica that its caller names, while Serve keeps its books.

Owns the way from a handle's session id to a replica. The module holds no state: Serve ships it by value to whoever holds a handle, so
what it shares with others (the exception) lives elsewhere. A call that names nobody is balanced by Serve's power of two choices. Invariant: a
named call reaches that replica, which counted it, or raises TargetGone; it never goes to another, and waits behind no other replica's calls.

It leans on Ray 2.60's `RequestRouter._choose_replica_for_request` and not on `choose_replicas` alone: Serve's queue of pending requests knows
one entry a parent request, starts no routing while a deployment has no replica, and lets a full replica's calls block the others'.
"""

from __future__ import annotations

import time

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router import PendingRequest, PowerOfTwoChoicesRequestRouter, RunningReplica

from actors.targets import TARGET_MARK, TargetGone


class TargetRequestRouter(PowerOfTwoChoicesRequestRouter):
    """Deployments name it as `RequestRouterConfig(request_router_class="actors.targeting:TargetRequestRouter")`.

    Serve takes a replica out of the view while it gives it a new `user_config`, though the replica goes on working. With
    `request_router_kwargs={"returns_within_s": s}` one that has left stays within reach for so long, unless it was found dead.
    """

    def initialize_state(self, *, returns_within_s: float = 0.0) -> None:
        self._returns_within_s = returns_within_s
        self._left: dict[ReplicaID, tuple[RunningReplica, float]] = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before, now_s = dict(self.curr_replicas), time.monotonic()
        super().update_replicas(replicas)
        self._left |= {name: (replica, now_s) for name, replica in before.items()}
        self._left = {n: left for n, left in self._left.items() if n not in self.curr_replicas and self._may_return(left[1])}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        self._left.pop(replica_id, None)
        super().on_replica_actor_died(replica_id)

    def within_reach(self) -> dict[ReplicaID, RunningReplica]:
        """The replicas in view, and those that left it a moment ago."""
        return {n: replica for n, (replica, left_s) in self._left.items() if self._may_return(left_s)} | dict(self.curr_replicas)

    def _may_return(self, left_s: float) -> bool:
        return time.monotonic() - left_s < self._returns_within_s

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        session_id = pending_request.metadata.session_id
        if not session_id.startswith(TARGET_MARK):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        target = ReplicaID(session_id.removeprefix(TARGET_MARK), self._deployment_id)
        attempt = 0
        while (replica := self.within_reach().get(target)) is not None:
            if await self._select_from_candidate_replicas([replica], attempt) is not None:
                self._record_queue_wait_time(pending_request)
                return replica
            await self._backoff(attempt)
            attempt += 1
        raise TargetGone(f"{self._deployment_id.name} has no replica {target.unique_id}")

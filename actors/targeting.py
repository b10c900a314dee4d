"""A Serve request router that sends a call to the one replica that its caller names, while Serve keeps its books.

Owns the way from a handle's session id to a replica. Holds no state of its own: Serve ships this module by value to whoever holds a handle, so
what it shares with others (the exception) lives elsewhere. A call that names nobody is balanced by Serve's power of two choices. Invariant: a
named call reaches that replica, which counted it, or raises TargetGone; it never goes to another, and waits behind no other replica's calls.

It leans on Ray 2.60's `RequestRouter._choose_replica_for_request` and not on `choose_replicas` alone: Serve's queue of pending requests knows
one entry a parent request, starts no routing while a deployment has no replica, and lets a full replica's calls block the others'.
"""

from __future__ import annotations

from ray.serve._private.common import ReplicaID
from ray.serve._private.request_router import PendingRequest, PowerOfTwoChoicesRequestRouter, RunningReplica

from actors.targets import TARGET_MARK, TargetGone


class TargetRequestRouter(PowerOfTwoChoicesRequestRouter):
    """Deployments name it as `RequestRouterConfig(request_router_class="actors.targeting:TargetRequestRouter")`."""

    async def _choose_replica_for_request(self, pending_request: PendingRequest, *, is_retry: bool = False) -> RunningReplica:
        session_id = pending_request.metadata.session_id
        if not session_id.startswith(TARGET_MARK):
            return await super()._choose_replica_for_request(pending_request, is_retry=is_retry)
        target = ReplicaID(session_id.removeprefix(TARGET_MARK), self._deployment_id)
        attempt = 0
        while (replica := self.curr_replicas.get(target)) is not None:
            if await self._select_from_candidate_replicas([replica], attempt) is not None:
                self._record_queue_wait_time(pending_request)
                return replica
            await self._backoff(attempt)
            attempt += 1
        raise TargetGone(f"{self._deployment_id.name} has no replica {target.unique_id}")

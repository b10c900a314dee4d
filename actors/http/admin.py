"""`/v1/cpd/...`: what operators and services use besides answers: status, plan, warm, cache reset.

Owns these routes and their JSON. Decides nothing. Invariant: what all tenants share is changed by an admin key only.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from actors.http import schemas
from actors.http.face import Status
from actors.http.jobs import Asked, Choice, Job
from actors.http.openapi import takes
from actors.http.routes import Service, to_json
from cpd_ray.errors import Forbidden, InvalidRequest
from cpd_ray.types import Tier
from placement.routing.types import Candidate, Decision


def admin_routes(service: Service) -> APIRouter:
    """Everything under /v1/cpd."""
    routes = APIRouter(prefix="/v1/cpd")

    @routes.get("/status")
    async def status(request: Request) -> Response:
        return to_json(status_json(await service.face.status()))

    @routes.post("/plan", openapi_extra=takes(schemas.CompletionBody, schemas.ChatBody))
    async def plan(request: Request) -> Response:
        _, job = await service.prompted(request, "plan", schemas.CompletionBody, schemas.ChatBody)
        choice = only_prompt(job)
        decision = await service.face.plan(choice.request)
        return to_json(plan_json(choice, decision))

    @routes.post("/warm", openapi_extra=takes(schemas.WarmCompletionBody, schemas.WarmChatBody))
    async def warm(request: Request) -> Response:
        body = await service.body(request, schemas.WarmCompletionBody, schemas.WarmChatBody)
        return await service.run(request, warm_json(service, body, service.asked(request, "warm")))

    @routes.post("/cache/reset", openapi_extra=takes(schemas.ResetBody))
    async def reset(request: Request) -> Response:
        if not request.state.caller.admin:
            raise Forbidden("this key may not drop what all tenants share", code="admin_only")
        body = await service.body(request, schemas.ResetBody)
        dropped = await service.face.reset(frozenset(Tier) if body.tiers is None else body.tiers)
        return to_json({"dropped_blocks": {str(tier): count for tier, count in dropped.items()}})

    return routes


def only_prompt(job: Job) -> Choice:
    """The job's one prompt; raises InvalidRequest when there are more."""
    if len({choice.prompt for choice in job.choices}) != 1:
        raise InvalidRequest("one prompt at a time", param="prompt")
    return job.choices[0]


async def warm_json(service: Service, body: schemas.GenerationBody, asked: Asked) -> dict[str, Any]:
    """Warm a context; what `/v1/cpd/warm` answers."""
    assert isinstance(body, (schemas.WarmCompletionBody, schemas.WarmChatBody))
    if body.ttl_s > service.limits.max_warm_ttl_s:
        raise InvalidRequest(f"ttl_s must be at most {service.limits.max_warm_ttl_s:.0f}", param="ttl_s")
    if isinstance(body, schemas.WarmChatBody):
        # what later turns begin with: the header of an answer is not part of it
        job = await service.jobs.chat(body, asked, add_generation_prompt=False)
    else:
        job = await service.jobs.completion(body, asked)
    warmed = await service.face.warm(only_prompt(job).request, body.ttl_s)
    return {
        "id": job.id,
        "object": "cpd.warm",
        "model": job.model,
        "prompt_tokens": warmed.tokens,
        "cached_tokens": warmed.cached_tokens,
        "blocks": warmed.blocks,
        "pinned_blocks": warmed.pinned_blocks,
        "ttl_s": body.ttl_s,
        "worker": warmed.worker,
        "node": warmed.node,
    }


def status_json(status: Status) -> dict[str, Any]:
    """What `/v1/cpd/status` shows."""
    return {
        "requests": {"in_flight": status.in_flight, "queued": status.queued},
        "workers": [
            {
                "worker": w.worker,
                "role": w.role,
                "node": w.node,
                "state": w.state,
                "running": w.running,
                "waiting": w.waiting,
                "backlog_tokens": w.backlog_tokens,
                "backlog_s": w.backlog_s,
                "pool": w.pool,
                "unwritten_blocks": w.unwritten_blocks,
                "step_cost": w.step_cost,
                "fetch_bytes_per_s": w.fetch_bytes_per_s,
                "block_size": w.block_size,
            }
            for w in status.workers
        ],
        "nodes": [
            {
                "node": n.node,
                "slab": {
                    "total": n.slots.total,
                    "used": n.slots.total - n.slots.free,
                    "free": n.slots.free,
                    "reserved": n.slots.reserved,
                    "committed": n.slots.committed,
                    "quarantined": n.slots.quarantined,
                    "pinned": n.slots.pinned,
                    "bytes_total": n.slots.bytes_total,
                },
                "leases": n.slots.leases,
                "evictions": n.evictions,
                "copies_in": n.copies_in,
                "copying": n.copying,
                "leases_lapsed": n.leases_lapsed,
            }
            for n in status.nodes
        ],
        "directory": {"keys": status.directory_keys},
    }


def plan_json(choice: Choice, decision: Decision) -> dict[str, Any]:
    """What `/v1/cpd/plan` shows: the decision with every number that it was made on."""
    return {
        "prompt_tokens": choice.request.prompt_tokens,
        "route": decision.route,
        "policy": decision.policy,
        "reason": decision.reason,
        "predicted_ttft_s": decision.predicted_ttft_s,
        "chosen": _candidate(decision.chosen),
        "considered": [_candidate(c) for c in decision.considered],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    return {
        "worker": candidate.worker,
        "role": candidate.role,
        "cached_tokens": {
            "pool": candidate.pool_tokens,
            "node": candidate.node_tokens,
            "cluster": candidate.cluster_tokens,
        },
        "new_tokens": candidate.new_tokens,
        "backlog_s": candidate.backlog_s,
        "fetch_s": candidate.fetch_s,
        "prefill_s": candidate.prefill_s,
        "inflicted_s": candidate.inflicted_s,
        "ttft_s": candidate.ttft_s,
    }

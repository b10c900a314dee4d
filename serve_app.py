"""The two Serve applications. `serve deploy` names `serve_app:build_kv` and `serve_app:build`; `serve run serve_app:app` serves the defaults.

Owns the decorators: here, and only here, plain classes become deployments. Invariant: what may change without a restart is in `user_config`,
all else in the arguments.
"""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from actors.names import Names
from actors.replica_kv import DirectoryReplica, KvCacheReplica
from actors.replica_router import RouterReplica
from actors.replica_worker import DecodeReplica, PrefillReplica, PrePrefillReplica, WorkerReplica
from actors.targets import TARGET_ROUTER
from cpd_ray.config import CPDConfig, load
from cpd_ray.types import Role

WORKERS: dict[Role, type[WorkerReplica]] = {
    Role.PRE_PREFILL: PrePrefillReplica,
    Role.PREFILL: PrefillReplica,
    Role.DECODE: DecodeReplica,
}
MANY = 100_000
"""No limit of Serve's own on calls to a replica: the router admits."""
DRAIN_S = 30.0
DRAIN_LOOK_S = 0.2
"""How often a replica that is to end looks whether its last request has ended."""
RECONFIGURED_WITHIN_S = 3.0
"""How long Serve may keep a worker out of everyone's view while it gives it new knobs. A worker that leaves for good may be asked so long."""


def build_kv(args: dict[str, Any]) -> Application:
    """The application `<name>-kv`: a KV cache a node, and the directory. `args` as `cpd_ray.config.CPDConfig`; raises ConfigError."""
    config = load(args)
    names, plain = Names(config.name), config.model_dump(mode="json")
    nodes = AutoscalingConfig(
        min_replicas=1,
        initial_replicas=1,
        max_replicas=4096,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function="placement.autoscaling.per_node:one_per_node"),
    )
    caches = serve.deployment(
        name=names.kv_cache,
        autoscaling_config=nodes,
        max_replicas_per_node=1,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": config.slab.cpus},
        request_router_config=RequestRouterConfig(request_router_class=TARGET_ROUTER),
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=2.0,
    )(KvCacheReplica)
    directory = serve.deployment(
        name=names.directory,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": config.slab.cpus},
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
    )(DirectoryReplica)
    return directory.bind(plain, caches.bind(plain))


def build(args: dict[str, Any]) -> Application:
    """The application `<name>`: router and workers. `args` as `cpd_ray.config.CPDConfig`; raises ConfigError."""
    config = load(args)
    workers = [_workers(config, role) for role in Role if config.roles.get(role).replicas]
    router = serve.deployment(
        name=Names(config.name).router,
        num_replicas=config.routers,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": config.router_cpus},
        user_config=config.runtime.model_dump(mode="json"),
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=2.0,
    )(serve.ingress()(RouterReplica))
    return router.bind(_arguments(config), *workers)


def _workers(config: CPDConfig, role: Role) -> Application:
    """One role's pool: each replica in a placement group of its own."""
    chosen = config.roles.get(role)
    pool = serve.deployment(
        name=Names(config.name).worker(role),
        num_replicas=chosen.replicas,
        max_ongoing_requests=MANY,
        ray_actor_options={"num_cpus": chosen.cpus_per_rank, "num_gpus": chosen.gpus_per_rank},
        placement_group_bundles=[{"CPU": chosen.cpus_per_rank} | ({"GPU": chosen.gpus_per_rank} if chosen.gpus_per_rank else {})],
        placement_group_strategy="STRICT_PACK",
        **({"placement_group_bundle_label_selector": [chosen.labels]} if chosen.labels else {}),
        request_router_config=RequestRouterConfig(
            request_router_class=TARGET_ROUTER, request_router_kwargs={"returns_within_s": RECONFIGURED_WITHIN_S}
        ),
        user_config=config.runtime.model_dump(mode="json"),
        graceful_shutdown_timeout_s=DRAIN_S,
        graceful_shutdown_wait_loop_s=DRAIN_LOOK_S,
        health_check_period_s=2.0,
    )(WORKERS[role])
    return pool.bind(_arguments(config))


def _arguments(config: CPDConfig) -> dict[str, Any]:
    """What restarts its owner when it changes: everything but the runtime knobs, which travel as `user_config`."""
    return config.model_dump(mode="json", exclude={"runtime"})


app = build({})

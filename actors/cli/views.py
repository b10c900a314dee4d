"""What commands show: tables of results, for a person at a terminal.

Owns the looks only. Invariant: every figure stands in the result that is shown; nothing is computed anew but sums and shares.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from actors.cli.api import Api
from actors.cli.checking import Checked, CheckedApplication
from actors.cli.checkout import Benchmark
from cpd_ray.errors import CPDError
from cpd_ray.results import NodeState, Plan, PlanCandidate, PoolState, SystemStatus, Warmed, WorkerState
from cpd_ray.types import CachedTokens, Role

GIB = 2**30


def show(view: RenderableType) -> None:
    Console(highlight=False).print(view)


def plain(raw: Mapping[str, Any]) -> None:
    print(json.dumps(raw))


def problems(checked: Checked) -> None:
    """One line each, on standard error."""
    console = Console(stderr=True, highlight=False)
    for problem in checked.problems:
        console.print(Text(f"error: {checked.file}: {problem}", style="red"), soft_wrap=True)


def every(seconds: float) -> Iterator[None]:
    """Ticks, for ever."""
    for number in itertools.count():
        if number:
            time.sleep(seconds)
        yield


def watch(api: Api, ticks: Iterable[None], console: Console | None = None) -> None:
    """The status anew at each tick, until Ctrl-C. A system that does not answer is said so, and asked again."""
    with Live(console=console, auto_refresh=False) as live:
        for _ in ticks:
            try:
                view: RenderableType = status_view(api.status())
            except CPDError as error:
                view = Text(f"error: {error.message}", style="red")
            live.update(view, refresh=True)


def status_view(status: SystemStatus) -> RenderableType:
    workers = _table(
        "worker", "role", "state", ">running", ">waiting", ">backlog", "pool in use", ">cached", ">leased", ">quarantined"
    )
    for worker in sorted(status.workers, key=lambda w: (w.role, w.worker)):
        workers.add_row(*_worker_row(worker))
    nodes = _table("node", "slab in use", ">size", ">pinned", ">quarantined", ">leases", ">evictions", ">copies in")
    for node in sorted(status.nodes, key=lambda n: n.node):
        nodes.add_row(*_node_row(node))
    head = f"{status.in_flight} in flight, {status.queued} queued; {status.directory_keys} blocks known to be cached"
    return Group(Text(head, style="bold"), workers, nodes)


def _worker_row(worker: WorkerState) -> tuple[str, ...]:
    pool: PoolState = worker.pool
    used = pool.total - pool.free - pool.cached
    backlog = f"{worker.backlog_s:.2f} s" if worker.backlog_tokens else "-"
    counts = (pool.cached, pool.leased, pool.quarantined)
    return (
        worker.worker, worker.role, worker.state, str(worker.running), str(worker.waiting), backlog, _share(used, pool.total),
        *map(str, counts),
    )  # fmt: skip


def _node_row(node: NodeState) -> tuple[str, ...]:
    slab = node.slab
    counts = (slab.pinned, slab.quarantined, node.leases, node.evictions, node.copies_in)
    return node.node[:12], _share(slab.used, slab.total), f"{slab.bytes_total / GIB:.2f} GiB", *map(str, counts)


def plan_view(plan: Plan) -> RenderableType:
    table = _table(
        "", "worker", ">pool", ">node", ">cluster", ">to compute", ">backlog", ">fetch", ">prefill", ">inflicted", ">first token"
    )
    for candidate in plan.considered:
        table.add_row(*_candidate_row(candidate, candidate == plan.chosen), style="bold" if candidate == plan.chosen else None)
    head = f"{plan.route}: {plan.prompt_tokens} tokens, first token predicted after {plan.predicted_ttft_s:.2f} s ({plan.policy})"
    return Group(Text(head, style="bold"), Text(plan.reason), table)


def _candidate_row(candidate: PlanCandidate, chosen: bool) -> tuple[str, ...]:
    cached: CachedTokens = candidate.cached
    seconds = (candidate.backlog_s, candidate.fetch_s, candidate.prefill_s, candidate.inflicted_s, candidate.ttft_s)
    counts = (cached.pool, cached.node, cached.cluster, candidate.new_tokens)
    return "->" if chosen else "", candidate.worker, *map(str, counts), *(f"{s:.2f} s" for s in seconds)


def warmed_line(name: str, warmed: Warmed) -> Text:
    told = f"{name}: {warmed.prompt_tokens} tokens, {warmed.cached_tokens} of them cached before; "
    return Text(f"{told}{warmed.pinned_blocks} of {warmed.blocks} blocks pinned for {warmed.ttl_s:g} s on {warmed.node[:12]}")


def bench_view(known: Mapping[str, Benchmark]) -> RenderableType:
    if not known:
        return Text("There are no benchmarks here: run this from a checkout of the project.")
    table = _table("benchmark", "what it measures")
    for name, benchmark in known.items():
        table.add_row(name, benchmark.about)
    return table


def config_view(checked: Checked) -> RenderableType:
    shown: list[RenderableType] = [Text(f"{checked.file}", style="bold")]
    for app in checked.applications:
        shown += [Text(f"\n{app.name} ({app.import_path})", style="bold"), *_application_view(app)]
    shown += [Text(f"\n{name}: not this project's; left alone") for name in checked.others]
    return Group(*shown)


def _application_view(app: CheckedApplication) -> Iterator[RenderableType]:
    config, facts, each = app.config, app.model, app.bytes_per_token
    sizes = (
        ""
        if facts is None
        else f": {facts.model_type}, {facts.layers} layers, {facts.query_heads} query and {facts.kv_heads} KV heads"
    )
    yield Text(f"model {config.model.id} in {config.model.dtype}{sizes}")
    yield Text(
        f"blocks of {config.cache.block_tokens} tokens"
        + ("" if each is None else f", {each * config.cache.block_tokens} bytes each")
    )
    if not app.is_system:
        slab = config.slab
        size = f"{slab.gib:g} GiB" if slab.gib is not None else f"{slab.store_share:.0%} of the node's object store"
        fits = "" if each is None or slab.gib is None else f", room for {int(slab.gib * GIB // each)} tokens"
        yield Text(f"on each node: a slab of {size}{fits}; {slab.cpus:g} logical CPUs")
        return
    yield _roles_table(app)
    runtime = app.runtime
    yield Text(
        f"{config.routers} router{'s' if config.routers > 1 else ''}; policy {runtime.routing.policy}, at most "
        f"{runtime.admission.max_in_flight} requests in flight, then {runtime.admission.max_queued} queued"
    )


def _roles_table(app: CheckedApplication) -> Table:
    config, each = app.config, app.bytes_per_token
    table = _table("role", ">replicas", ">ranks each", ">CPUs each", ">GPUs each", ">pool tokens", ">pool bytes")
    for role in Role:
        chosen, pool = config.roles.get(role), config.pool_tokens(role)
        if chosen.replicas:
            size = "-" if each is None else f"{pool * each / GIB:.2f} GiB"
            cpus, gpus = chosen.ranks * chosen.cpus_per_rank, chosen.ranks * chosen.gpus_per_rank
            table.add_row(role, str(chosen.replicas), str(chosen.ranks), f"{cpus:g}", f"{gpus:g}", str(pool), size)
    return table


def _share(part: int, whole: int) -> str:
    """As a bar and a percentage."""
    share = part / whole if whole else 0.0
    filled = round(share * 10)
    return f"{'#' * filled}{'.' * (10 - filled)} {share:4.0%}"


def _table(*columns: str) -> Table:
    """Columns that begin with `>` are aligned to the right."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left", no_wrap=True)
    return table

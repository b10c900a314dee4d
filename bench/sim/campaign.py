"""The whole comparison: sustainable rates, isolation, curves, the knob's Pareto front, ablations and fan-out, as one JSON document.

Owns which runs there are and over how many processes they spread. Invariant: every number of the document comes with the seeds, window
and settings that it was made with.
"""

from __future__ import annotations

import math
import platform
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.sim.records import Objective, Outcome, quantile
from bench.sim.run import Window, simulate
from bench.sim.sustain import Sustained, paired_ratio, sustained
from bench.sim.systems import CPD_1D, PD_2P1D, PLAIN, SYSTEMS, Setup, System
from bench.workload.adversarial import ADVERSARIAL
from bench.workload.agent import AGENT_MIXES
from bench.workload.trace import TraceReplay
from bench.workload.types import Workload
from placement.routing.types import Route

ISOLATION_QPS = (1.2, 2.0)
ISOLATION_SYSTEMS = ("cpd_cost", "cpd_threshold", "pd_best")
ISOLATION_MIX = "agent_10_12"


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is run. `curve_qps`: offered rates of the curves, empty for none. `spills`: of the Pareto front."""

    seeds: tuple[int, ...]
    tolerance: float
    window: Window
    curve_qps: tuple[float, ...] = ()
    spills: tuple[float, ...] = ()
    trace: Path | None = None
    setup: Setup = field(default_factory=Setup)
    jobs: int = 2


def short(trace: Path | None, jobs: int) -> Plan:
    """Under ten minutes on two cores."""
    return Plan((1,), 0.04, Window(240, 600, 60), trace=trace, jobs=jobs)


def full(trace: Path | None, jobs: int, seeds: int = 10) -> Plan:
    """What `docs/RESULTS.md` is made from."""
    return Plan(
        seeds=tuple(range(1, seeds + 1)),
        tolerance=0.02,
        window=Window(300, 900, 60),
        curve_qps=(0.4, 0.8, 1.2, 1.6, 2.0, 2.4, 2.8, 3.2),
        spills=(0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, math.inf),
        trace=trace,
        jobs=jobs,
    )


def load_workload(name: str, trace: Path | None) -> Workload:
    """By name; raises KeyError for an unknown one."""
    if name == "trace":
        assert trace is not None, "the trace workload needs a file"
        return TraceReplay(trace)
    return {**AGENT_MIXES, **ADVERSARIAL}[name]


# -- one piece of work, in a process of its own ----------------------------------------------------------------------


def _sustain(system: System, workload: str, plan: Plan) -> Sustained:
    guess = 4.0 if workload == "trace" else 1.6
    return sustained(
        system,
        load_workload(workload, plan.trace),
        plan.seeds,
        tolerance=plan.tolerance,
        setup=plan.setup,
        window=plan.window,
        guess=guess,
    )


def _point(system: System, workload: str, qps: float, seed: int, plan: Plan) -> dict[str, Any]:
    outcome = simulate(system, load_workload(workload, plan.trace), qps, seed, setup=plan.setup, window=plan.window)
    return summary(outcome)


def summary(outcome: Outcome) -> dict[str, Any]:
    """One run in numbers; an infinite quantile is None."""

    def at(values: list[float], *shares: float) -> dict[str, float | None]:
        return {f"p{round(share * 100)}": _finite(quantile(values, share)) for share in shares}

    seconds, gpus = outcome.window_s, outcome.gpus
    return {
        "system": outcome.system,
        "workload": outcome.workload,
        "qps": outcome.qps,
        "seed": outcome.seed,
        "requests": len(outcome.records),
        "unserved": sum(math.isinf(r.ttft_s) for r in outcome.records),
        "ttft_s": at(outcome.ttft_s(), 0.5, 0.9, 0.99),
        "warm_ttft_s": at(outcome.of_route(Route.WARM), 0.5, 0.9, 0.99),
        "cold_ttft_s": at(outcome.of_route(Route.COLD), 0.5, 0.9, 0.99),
        "meets": outcome.meets(Objective()),
        "warm_on_prefill_share": _finite(outcome.warm_on_prefill_share),
        "prefill_tokens_per_s_per_gpu": outcome.prompt_tokens_served / seconds / gpus,
        "computed_tokens": outcome.computed_tokens,
        "generated_tokens_per_s_per_gpu": outcome.generated_tokens / seconds / gpus,
        "prediction_error": _finite(outcome.prediction_error),
        "wall_s": outcome.wall_s,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# -- the whole -------------------------------------------------------------------------------------------------------


def run_campaign(plan: Plan, say: Any = lambda _: None) -> dict[str, Any]:
    """Everything that the plan asks for. `say` is told of progress."""
    started_s = time.time()
    workloads = [*AGENT_MIXES, *(["trace"] if plan.trace else [])]
    trace_plan = replace(plan, setup=replace(plan.setup, block_tokens=512))
    with ProcessPoolExecutor(plan.jobs) as processes:
        isolation = {
            (qps, name, seed): processes.submit(_point, SYSTEMS[name], ISOLATION_MIX, qps, seed, plan)
            for qps in ISOLATION_QPS
            for name in ISOLATION_SYSTEMS
            for seed in plan.seeds
        }
        rates = {
            (workload, name): processes.submit(_sustain, system, workload, trace_plan if workload == "trace" else plan)
            for workload in workloads
            for name, system in SYSTEMS.items()
        }
        extra = _submit_extras(processes, plan)
        points = {key: future.result() for key, future in isolation.items()}
        say(f"isolation at {ISOLATION_QPS} QPS: {len(points)} runs")
        found: dict[str, dict[str, Sustained]] = {}
        for (workload, name), future in rates.items():
            found.setdefault(workload, {})[name] = future.result()
            say(f"{workload} {name}: {found[workload][name].mean:.2f} QPS")
        extras = {key: future.result() for key, future in extra.items()}
    document = {
        "sustainable_qps": {w: {n: round(s.mean, 4) for n, s in systems.items()} for w, systems in found.items()},
        **_isolation(points),
        "ratios": {w: _ratios(systems) for w, systems in found.items()},
        "by_seed": {w: {n: list(s.by_seed) for n, s in systems.items()} for w, systems in found.items()},
        "isolation_runs": list(points.values()),
        "curves": [extras[k] for k in extras if k[0] == "curve"],
        "pareto": [{**extras[k], "spill_after_s": _finite(k[1])} for k in extras if k[0] == "pareto"],
        "ablations": [{**extras[k], "ablation": k[1]} for k in extras if k[0] == "ablation"],
        "adversarial": [extras[k] for k in extras if k[0] == "adversarial"],
        "meta": _meta(plan, time.time() - started_s),
    }
    return document


def _submit_extras(processes: ProcessPoolExecutor, plan: Plan) -> dict[tuple[Any, ...], Any]:
    extra: dict[tuple[Any, ...], Any] = {}
    seed = plan.seeds[0]
    small = [SYSTEMS["pd_best"].on(PD_2P1D), SYSTEMS["pd_shared"].on(PD_2P1D)]
    small += [SYSTEMS["cpd_threshold"].on(CPD_1D), SYSTEMS["cpd_cost"].on(CPD_1D)]
    for qps in plan.curve_qps:
        for system in [*SYSTEMS.values(), *small]:
            named = replace(system, name=f"{system.name} ({system.topology.name})")
            extra["curve", named.name, qps] = processes.submit(_point, named, ISOLATION_MIX, qps, seed, plan)
    for spill in plan.spills:
        system = replace(SYSTEMS["cpd_cost"], spill_after_s=spill)
        for qps in (2.0, 2.6):
            extra["pareto", spill, qps] = processes.submit(_point, system, ISOLATION_MIX, qps, seed, plan)
    if plan.curve_qps:
        ours = SYSTEMS["cpd_cost"]
        chunks = {"chunk_tokens": ours.chunk_tokens, "step_tokens": ours.step_tokens}
        for qps in ISOLATION_QPS:
            best = replace(SYSTEMS["pd_best"], **chunks)  # type: ignore[arg-type]
            extra["ablation", "pd_best with our chunks", qps] = processes.submit(_point, best, ISOLATION_MIX, qps, seed, plan)
            long = replace(ours, chunk_tokens=16384, step_tokens=16384)
            extra["ablation", "cpd_cost with the baselines' chunks", qps] = processes.submit(
                _point, long, ISOLATION_MIX, qps, seed, plan
            )
        for name in ADVERSARIAL:
            for compared in ISOLATION_SYSTEMS:
                extra["adversarial", name, compared] = processes.submit(_point, SYSTEMS[compared], name, 0.6, seed, plan)
    return extra


def _isolation(points: dict[tuple[float, str, int], dict[str, Any]]) -> dict[str, Any]:
    """Means over seeds, in the shape that the acceptance reads."""

    def mean(qps: float, name: str, *path: str) -> float | None:
        values = []
        for (q, n, _), point in points.items():
            if (q, n) == (qps, name):
                value: Any = point
                for key in path:
                    value = value[key]
                values.append(value)
        return None if any(v is None for v in values) else sum(values) / len(values)

    def table(*path: str) -> dict[str, dict[str, Any]]:
        return {str(q): {n: mean(q, n, *path) for n in ISOLATION_SYSTEMS} for q in ISOLATION_QPS}

    p50, p90 = table("warm_ttft_s", "p50"), table("warm_ttft_s", "p90")
    return {
        "warm_ttft_s": {q: {n: {"p50": p50[q][n], "p90": p90[q][n]} for n in ISOLATION_SYSTEMS} for q in p50},
        "cold_ttft_p99_s": table("cold_ttft_s", "p99"),
        "all_ttft_p99_s": table("ttft_s", "p99"),
        "warm_on_prefill_share": {str(q): mean(q, "cpd_cost", "warm_on_prefill_share") for q in ISOLATION_QPS},
    }


def _ratios(systems: dict[str, Sustained]) -> dict[str, dict[str, float]]:
    """Ours over the best plain P/D (the best by its mean) and over the honest best; the paper's threshold over shared-cache P/D."""
    best_plain = max((systems[name] for name in PLAIN), key=lambda s: s.mean)
    pairs: Iterable[tuple[str, Sustained, Sustained]] = (
        ("cpd_cost_vs_best_plain", systems["cpd_cost"], best_plain),
        ("cpd_cost_vs_pd_best", systems["cpd_cost"], systems["pd_best"]),
        ("cpd_threshold_vs_pd_shared", systems["cpd_threshold"], systems["pd_shared"]),
    )
    ratios = {}
    for name, ours, theirs in pairs:
        found = paired_ratio(ours.by_seed, theirs.by_seed)
        ratios[name] = {"mean": found.mean, "low": found.low, "high": found.high}
    return ratios


def _meta(plan: Plan, wall_s: float) -> dict[str, Any]:
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": head.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "seeds": list(plan.seeds),
        "tolerance_qps": plan.tolerance,
        "window_s": [plan.window.warm_up_s, plan.window.measured_s],
        "node": plan.setup.node.name,
        "model": plan.setup.model.name,
        "block_tokens": plan.setup.block_tokens,
        "trace": plan.trace.name if plan.trace else None,
        "wall_s": round(wall_s, 1),
    }

"""The simulated worker against queueing theory: M/D/1, M/G/1 first come first served, M/G/1 shortest remaining first.

The worker (the real scheduler over the real pool) is held against an exact recursion on the same arrivals, and the recursion against
the closed form over many more arrivals: so neither noise nor a shared mistake can hide.
"""

from __future__ import annotations

import heapq
import random

import pytest

from actors.engine.interface import EngineOutput
from bench.sim.cache import CacheShape, SimNode
from bench.sim.loop import EventLoop
from bench.sim.prefill import PrefillJob, SimPrefillWorker
from bench.workload.types import stream_keys
from cpd_ray.config import EngineConfig
from cpd_ray.ids import LeaseId, NodeId, RequestId, WorkerId
from cpd_ray.messages import StepCost
from cpd_ray.types import Role
from kv.eviction.scored import LeastRecentlyUsed

UNIT_TOKENS = 64
UNIT_S = 0.01
COST = StepCost(0.0, UNIT_S / UNIT_TOKENS, 0.0, 0.0)

Arrivals = list[tuple[float, int]]
"""Moment, and size in units."""


def poisson(rate: float, sizes: dict[int, float], count: int, seed: int) -> Arrivals:
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append((now, rng.choices(list(sizes), list(sizes.values()))[0]))
    return arrivals


def worker_responses(arrivals: Arrivals, order: str) -> list[float]:
    loop = EventLoop()
    node = SimNode(NodeId("n"), CacheShape(64, 1, 1e18, 1e18), LeastRecentlyUsed(), loop)
    config = EngineConfig(
        step_tokens=UNIT_TOKENS,
        chunk_tokens=UNIT_TOKENS,
        max_running=4096,
        order=order,  # type: ignore[arg-type]
        aging_s=1e9,
    )
    worker = SimPrefillWorker(WorkerId("w"), Role.PREFILL, node, 1 << 14, UNIT_TOKENS, (COST, config), loop, shared=False)
    responses: dict[int, float] = {}

    def send(i: int) -> None:
        _, size = arrivals[i]

        def prefilled(output: EngineOutput, lease: LeaseId) -> None:
            responses[i] = loop.now_s() - arrivals[i][0]
            worker.end_handover(lease)

        keys = tuple(stream_keys(i + 1, 0, size))
        worker.add(PrefillJob(RequestId(str(i)), size * UNIT_TOKENS, keys, (), 0, prefilled), 0)

    for i, (moment, _) in enumerate(arrivals):
        loop.at(moment, send, i)
    loop.run(1e12)
    worker.scheduler.check()
    assert len(responses) == len(arrivals)
    return [responses[i] for i in range(len(arrivals))]


def first_come(arrivals: Arrivals) -> list[float]:
    free, responses = 0.0, []
    for moment, size in arrivals:
        free = max(free, moment) + size * UNIT_S
        responses.append(free - moment)
    return responses


def shortest_remaining(arrivals: Arrivals) -> list[float]:
    """Preemptive, ties to the earlier arrival."""
    responses = [0.0] * len(arrivals)
    queue: list[tuple[float, int]] = []
    now, i = 0.0, 0
    while i < len(arrivals) or queue:
        if not queue:
            now = max(now, arrivals[i][0])
        while i < len(arrivals) and arrivals[i][0] <= now:
            heapq.heappush(queue, (arrivals[i][1] * UNIT_S, i))
            i += 1
        left, job = heapq.heappop(queue)
        until = arrivals[i][0] if i < len(arrivals) else float("inf")
        if now + left <= until:
            now += left
            responses[job] = now - arrivals[job][0]
        else:
            heapq.heappush(queue, (left - (until - now), job))
            now = until
    return responses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def pollaczek_khinchine(rate: float, sizes: dict[int, float]) -> float:
    """Mean response of M/G/1 first come first served."""
    first = sum(p * s * UNIT_S for s, p in sizes.items())
    second = sum(p * (s * UNIT_S) ** 2 for s, p in sizes.items())
    return first + rate * second / (2 * (1 - rate * first))


def schrage_miller(rate: float, sizes: dict[int, float]) -> float:
    """Mean response of M/G/1 shortest remaining first with sizes that have atoms (Schrage and Miller, 1966)."""
    steps = sorted(sizes)

    def load(keep: list[int]) -> float:
        return rate * sum(sizes[s] * s * UNIT_S for s in keep)

    total = 0.0
    for x in steps:
        below, upto = [s for s in steps if s < x], [s for s in steps if s <= x]
        second = sum(sizes[s] * (s * UNIT_S) ** 2 for s in upto) + (x * UNIT_S) ** 2 * sum(sizes[s] for s in steps if s > x)
        wait = rate * second / (2 * (1 - load(below)) * (1 - load(upto)))
        residence, start = 0.0, 0
        for s in upto:
            residence += (s - start) * UNIT_S / (1 - load([t for t in steps if t < s]))
            start = s
        total += sizes[x] * (wait + residence)
    return total


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_m_d_1(load: float) -> None:
    rate = load / (4 * UNIT_S)
    arrivals = poisson(rate, {4: 1.0}, 1500, seed=1)
    assert worker_responses(arrivals, "fcfs") == pytest.approx(first_come(arrivals))
    many = poisson(rate, {4: 1.0}, 400_000, seed=2)
    # M/D/1: S + rho S / (2 (1 - rho))
    assert mean(first_come(many)) == pytest.approx(4 * UNIT_S * (1 + load / (2 * (1 - load))), rel=0.03)


def test_m_g_1_first_come() -> None:
    sizes = {2: 0.8, 20: 0.2}
    rate = 0.7 / (5.6 * UNIT_S)
    arrivals = poisson(rate, sizes, 1500, seed=3)
    assert worker_responses(arrivals, "fcfs") == pytest.approx(first_come(arrivals))
    assert mean(first_come(poisson(rate, sizes, 400_000, seed=4))) == pytest.approx(pollaczek_khinchine(rate, sizes), rel=0.03)


def test_m_g_1_shortest_remaining() -> None:
    sizes = {8: 0.8, 60: 0.2}
    rate = 0.7 / (18.4 * UNIT_S)
    arrivals = poisson(rate, sizes, 600, seed=5)
    ours, exact = worker_responses(arrivals, "shortest"), shortest_remaining(arrivals)
    # preemption waits for the end of a chunk, one unit here
    assert mean(ours) == pytest.approx(mean(exact), abs=UNIT_S)
    assert mean(ours) < 0.8 * mean(first_come(arrivals))
    assert mean(shortest_remaining(poisson(rate, sizes, 300_000, seed=6))) == pytest.approx(schrage_miller(rate, sizes), rel=0.03)

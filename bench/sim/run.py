"""One simulated run: build the cluster of a system, play a workload against it, keep what became of each request.

Owns the closed loop within sessions and the measured window. Invariant: deterministic: equal arguments give equal outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from bench.sim.cache import CacheShape, SimNode
from bench.sim.decode import SimDecodeWorker
from bench.sim.loop import EventLoop
from bench.sim.prefill import SimPrefillWorker
from bench.sim.records import Objective, Outcome, Record
from bench.sim.router import SimRouter
from bench.sim.systems import Setup, System
from bench.workload.types import Session, Workload
from cpd_ray.config import EngineConfig
from cpd_ray.ids import NodeId, WorkerId
from cpd_ray.types import Role
from kv.eviction import DEFAULT_POLICY, new_policy


@dataclass(frozen=True, slots=True)
class Window:
    """Arrivals in `[warm_up_s, warm_up_s + measured_s)` count. After that the run goes on for `drain_s` without counting new ones."""

    warm_up_s: float = 300.0
    measured_s: float = 1200.0
    drain_s: float = 60.0

    @property
    def end_s(self) -> float:
        return self.warm_up_s + self.measured_s


class Cluster:
    """The nodes and workers of a system, and its router."""

    def __init__(self, system: System, setup: Setup, loop: EventLoop) -> None:
        node_model, model, size = setup.node, setup.model, setup.block_tokens
        shape = CacheShape(
            node_model.slab_blocks(model, size), model.bytes_per_token * size, node_model.host_rate, node_model.network_rate
        )
        pool_blocks = node_model.pool_blocks(model, size)
        eviction = DEFAULT_POLICY if setup.eviction == "default" else setup.eviction
        self.nodes: dict[NodeId, SimNode] = {}
        self.prefills: dict[WorkerId, SimPrefillWorker] = {}
        self.decodes: dict[WorkerId, SimDecodeWorker] = {}
        topology = system.topology
        engine = (
            node_model.prefill_cost(model),
            EngineConfig(
                step_tokens=system.step_tokens,
                chunk_tokens=system.chunk_tokens,
                order="shortest" if system.order == "shortest" else "fcfs",
                aging_s=system.aging_s,
            ),
        )
        roles = [Role.PRE_PREFILL] * topology.pre_prefill + [Role.PREFILL] * topology.prefill + [Role.DECODE] * topology.decode
        for i, role in enumerate(roles):
            node = self.nodes[NodeId(f"n{i}")] = SimNode(NodeId(f"n{i}"), shape, new_policy(eviction, shape.slots), loop)
            name = WorkerId(f"{role}-{i}")
            if role is Role.DECODE:
                self.decodes[name] = SimDecodeWorker(name, node, pool_blocks, size, node_model.decode_cost(model), loop)
            else:
                self.prefills[name] = SimPrefillWorker(name, role, node, pool_blocks, size, engine, loop, shared=system.shared)
        self.router = SimRouter(system, self.nodes, self.prefills, self.decodes, loop, block_tokens=size)


class _Player:
    """Plays sessions: the next turn comes `think_s` after the end of the answer before."""

    def __init__(self, cluster: Cluster, setup: Setup, loop: EventLoop, window: Window) -> None:
        self.records: list[Record] = []
        self._router = cluster.router
        self._setup = setup
        self._loop = loop
        self._window = window

    def play(self, sessions: Iterator[Session]) -> None:
        """Start the next session when its time comes; only the next one is held."""
        session = next(sessions, None)
        if session is not None and session.arrival_s < self._window.end_s:
            self._loop.at(session.arrival_s, self._begin, session, sessions)

    def _begin(self, session: Session, sessions: Iterator[Session]) -> None:
        self._turn(session, 0)
        self.play(sessions)

    def _turn(self, session: Session, number: int) -> None:
        turn, now_s = session.turns[number], self._loop.now_s()
        record = Record(f"{session.name}.{number}", now_s, turn.prompt_tokens, turn.output_tokens)
        if self._window.warm_up_s <= now_s < self._window.end_s:
            self.records.append(record)
        known = (turn.prompt_tokens + turn.output_tokens) // session.block_tokens
        keys = session.keys[:known]

        def ended() -> None:
            if number + 1 < len(session.turns):
                self._loop.after(session.turns[number + 1].think_s, self._turn, session, number + 1)

        self._loop.after(self._setup.node.face_s, self._router.arrive, record, keys, ended)


class _Hopeless:
    """Whether the objective can no longer be met, whatever comes: more misses than the window's requests allow."""

    def __init__(self, records: list[Record], expected: float, objective: Objective, loop: EventLoop) -> None:
        self._records, self._loop, self._objective = records, loop, objective
        # arrivals vary: only far more misses than the expected number of requests allows are hopeless
        self._late50 = 0.5 * (expected * 1.15 + 20)
        self._late90 = 0.1 * (expected * 1.15 + 20)
        self._next_s = 0.0
        self.found = False

    def __call__(self) -> bool:
        now_s = self._loop.now_s()
        if now_s < self._next_s:
            return False
        self._next_s = now_s + 10.0
        objective = self._objective
        over = [min(r.ttft_s, now_s - r.arrival_s) for r in self._records]
        self.found = sum(o > objective.p50_s for o in over) > self._late50 or sum(o > objective.p90_s for o in over) > self._late90
        return self.found


def simulate(
    system: System,
    workload: Workload,
    qps: float,
    seed: int,
    *,
    setup: Setup | None = None,
    window: Window | None = None,
    give_up_on: Objective | None = None,
) -> Outcome:
    """Play `workload` at `qps` requests a second against `system`. With `give_up_on` the run stops once that can't be met any more."""
    setup, window = setup or Setup(), window or Window()
    started_s = time.perf_counter()
    loop = EventLoop()
    cluster = Cluster(system, setup, loop)
    player = _Player(cluster, setup, loop, window)
    player.play(workload.sessions(qps, seed, setup.block_tokens))
    loop.run(window.warm_up_s)
    before = _totals(cluster)
    hopeless = _Hopeless(player.records, qps * window.measured_s, give_up_on, loop) if give_up_on else None
    loop.run(window.end_s, hopeless or (lambda: False))
    after = _totals(cluster)
    aborted = hopeless is not None and hopeless.found
    if not aborted:
        loop.run(window.end_s + window.drain_s)
        cluster.router.check()
    return Outcome(
        system=system.name,
        workload=workload.name,
        qps=qps,
        seed=seed,
        window_s=window.measured_s,
        gpus=setup.node.gpus * system.topology.nodes,
        records=player.records,
        aborted=aborted,
        computed_tokens=after[0] - before[0],
        generated_tokens=after[1] - before[1],
        prompt_tokens_served=sum(r.prompt_tokens for r in player.records if r.ttft_s < float("inf")),
        wall_s=time.perf_counter() - started_s,
    )


def _totals(cluster: Cluster) -> tuple[int, int]:
    computed = sum(worker.computed_tokens for worker in cluster.prefills.values())
    return computed, sum(worker.generated_tokens for worker in cluster.decodes.values())

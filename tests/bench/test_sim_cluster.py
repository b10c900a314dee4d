"""The simulated cluster: repeatable, its books balance, nothing vanishes, sixteen agents cost one prefill, physics adds up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.sim.cache import CacheShape, Link, SimNode, occupy
from bench.sim.decode import DecodeJob, SimDecodeWorker
from bench.sim.hardware import B200_TP4, LLAMA_70B, NODE_MODELS, this_machine
from bench.sim.loop import EventLoop
from bench.sim.records import Objective, Record, quantile
from bench.sim.run import Window, simulate
from bench.sim.sustain import interval, largest, paired_ratio, sustained
from bench.sim.systems import SYSTEMS, Setup
from bench.workload.agent import AgentMix
from bench.workload.types import Session, Turn, stream_keys
from cpd_ray.ids import NodeId, RequestId, WorkerId
from kv.eviction.scored import LeastRecentlyUsed
from placement.routing.types import Route

SMALL = AgentMix("small", one_off=0.3, turns=3, one_off_tokens=(6_000, 9_000), context_tokens=(4_000, 8_000), think_s=(1.0, 2.0))
WINDOW = Window(5.0, 25.0, 20.0)


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_every_system_serves_everything_at_a_low_rate_and_twice_alike(name: str) -> None:
    first, again = (simulate(SYSTEMS[name], SMALL, 2.0, 3, window=WINDOW) for _ in range(2))
    assert first.records == again.records
    assert len(first.records) > 20
    assert all(math.isfinite(r.ttft_s) and r.end_s > r.arrival_s + r.ttft_s for r in first.records)
    assert all(r.cached_tokens + r.computed_tokens == r.prompt_tokens for r in first.records)
    assert {r.route for r in first.records} == {Route.COLD, Route.WARM}
    assert first.meets(Objective())


def test_what_is_never_served_is_a_miss() -> None:
    flood = replace(SMALL, one_off=1.0, one_off_tokens=(100_000, 120_000))
    outcome = simulate(SYSTEMS["pd_round_robin"], flood, 30.0, 1, window=Window(0.0, 15.0, 0.0))
    assert len(outcome.records) > 300
    assert sum(math.isinf(r.ttft_s) for r in outcome.records) > 200
    assert quantile(outcome.ttft_s(), 0.9) == math.inf
    assert not outcome.meets(Objective(1e9, 1e9))
    hopeless = simulate(SYSTEMS["pd_round_robin"], flood, 30.0, 1, window=Window(0.0, 60.0, 0.0), give_up_on=Objective())
    assert hopeless.aborted
    assert not hopeless.meets(Objective(1e9, 1e9)), "a run that was given up met nothing"


@dataclass(frozen=True, slots=True)
class OneFanOut:
    """Sixteen agents, once, on a context that nobody has seen."""

    name: str = "one_fan_out"
    requests_per_session: float = 1.0

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        blocks = 100_000 // block_tokens
        context = stream_keys(1, 0, blocks)
        for agent in range(16):
            tokens = blocks * block_tokens + 200 + agent
            yield Session(f"agent-{agent}", 1.0, (Turn(tokens, 50),), tuple(context), block_tokens)


@pytest.mark.parametrize("name", ["cpd_cost", "cpd_threshold"])
def test_sixteen_agents_on_one_new_context_cost_one_prefill(name: str) -> None:
    outcome = simulate(SYSTEMS[name], OneFanOut(), 1.0, 1, window=Window(0.0, 60.0, 0.0))
    tails = sum(r.prompt_tokens - 100_000 // 512 * 512 for r in outcome.records)
    assert outcome.computed_tokens <= 100_000 + tails + 16 * 512
    assert all(math.isfinite(r.ttft_s) for r in outcome.records)


# -- physics ---------------------------------------------------------------------------------------------------------


def test_hardware_times_follow_from_peaks_and_efficiencies() -> None:
    prefill = B200_TP4.prefill_cost(LLAMA_70B)
    flop = 2 * 70.6e9 * 2048 + 4 * 80 * 8192 * 2048 * (50_000 + 1024)
    assert prefill.predict_s(2048, 2048 * (50_000 + 1024), 1) == pytest.approx(0.005 + flop / (4 * 2.25e15 * 0.5))
    decode = B200_TP4.decode_cost(LLAMA_70B)
    moved = 70.6e9 * 2 + 8 * 60_000 * LLAMA_70B.bytes_per_token
    products = 8 * 2 * 70.6e9 / (4 * 2.25e15 * 0.5)
    assert decode.predict_s(8, 8 * 60_000, 8) == pytest.approx(0.005 + moved / (4 * 8e12 * 0.7) + products)
    assert LLAMA_70B.bytes_per_token == 327_680
    for node, model in NODE_MODELS.values():
        assert node.pool_blocks(model, 512) > 1000
    with pytest.raises(ValueError, match="no room"):
        replace(B200_TP4, memory_bytes=100e9).pool_blocks(LLAMA_70B, 512)
    with pytest.raises(ValueError, match="can't be"):
        this_machine(0.0, 0.05, 1e10)
    assert this_machine(800, 0.05, 1e10).prefill_cost(LLAMA_70B).per_token_s > 0


def test_a_link_moves_one_transfer_at_a_time_at_the_slower_ends_rate() -> None:
    fast, slow = Link(100.0), Link(50.0)
    assert occupy(0.0, 100, fast, slow) == 2.0
    assert occupy(1.0, 100, fast) == 3.0, "it waits for the one before"
    assert occupy(10.0, 100, fast) == 11.0
    assert fast.moved_bytes == 300


def test_time_does_not_go_back_and_equal_moments_keep_their_order() -> None:
    loop, seen = EventLoop(), []
    for i in (2, 0, 1):
        loop.at(float(i // 2), seen.append, i)
    loop.run(5.0)
    assert seen == [0, 1, 2]
    assert loop.now_s() == 5.0
    with pytest.raises(ValueError, match="before now"):
        loop.at(4.0, seen.append, 3)


def test_a_decode_batch_takes_its_steps_at_the_batchs_pace() -> None:
    loop = EventLoop()
    node = SimNode(NodeId("n"), CacheShape(4000, 1, 1e18, 1e18), LeastRecentlyUsed(), loop)
    cost = B200_TP4.decode_cost(LLAMA_70B)
    worker = SimDecodeWorker(WorkerId("d"), node, 2000, 512, cost, loop)
    ends: dict[str, float] = {}

    def job(name: str, tokens: int, output: int) -> DecodeJob:
        keys = tuple(stream_keys(len(name), 0, tokens // 512))
        return DecodeJob(
            RequestId(name), tokens, output, keys, lambda _, done: done(), lambda: None, lambda: ends.update({name: loop.now_s()})
        )

    worker.add(job("a", 10_240, 100), 1)
    worker.add(job("bb", 20_480, 50), 2)
    loop.run(100.0)
    both = sum(cost.predict_s(2, 30_720, 2) for _ in range(50))
    alone = sum(cost.predict_s(1, 10_290 + i, 1) for i in range(50))
    assert ends["bb"] == pytest.approx(both, rel=0.01)
    assert ends["a"] == pytest.approx(both + alone, rel=0.01)
    assert worker.generated_tokens == 150
    worker.pool.check()


# -- the search ------------------------------------------------------------------------------------------------------


@given(edge=st.integers(0, 400), guess=st.floats(0.01, 10))
def test_bisection_finds_the_edge_from_any_guess(edge: int, guess: float) -> None:
    assert largest(lambda qps: qps <= edge * 0.02 + 1e-9, 0.02, guess) == pytest.approx(edge * 0.02)


def test_the_sustained_rate_is_where_the_objective_ends() -> None:
    found = sustained(
        SYSTEMS["pd_best"],
        SMALL,
        (1, 2),
        tolerance=2.0,
        setup=Setup(),
        window=Window(2.0, 10.0, 10.0),
        objective=Objective(0.25, 0.6),
        guess=4.0,
    )
    assert all(0 < qps < 64 for qps in found.by_seed)
    assert found.runs >= 4


def test_intervals_and_quantiles() -> None:
    assert interval([2.0]).low == 2.0
    ratio = paired_ratio((2.0, 4.0, 6.0), (1.0, 2.0, 3.0))
    assert (ratio.mean, ratio.low, ratio.high) == (2.0, 2.0, 2.0)
    wide = interval([1.0, 2.0, 3.0])
    assert wide.low == pytest.approx(2 - 4.302653 / math.sqrt(3), rel=1e-5)
    assert quantile([3.0, 1.0, 2.0, math.inf], 0.5) == 2.0
    assert quantile([1.0, math.inf], 0.9) == math.inf
    assert quantile([], 0.5) == 0.0
    assert Objective(1.0, 8.0).met_by([0.5] * 9 + [9.0])
    assert not Objective(1.0, 8.0).met_by([0.5] * 8 + [9.0] * 2)
    assert Record("r", 0.0, 1, 1).ttft_s == math.inf
    with pytest.raises(ValueError, match="no values"):
        interval([])

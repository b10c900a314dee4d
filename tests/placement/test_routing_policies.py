"""Prefill policies against brute force, and the properties that hold for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpd_ray.errors import ConfigError, Unavailable
from cpd_ray.ids import BlockKey, NodeId, RequestId, WorkerId
from cpd_ray.messages import PoolCounts, StepCost
from cpd_ray.types import Role
from placement.cost_model import CostModel, prefill_s
from placement.routing.candidates import PREFILLING
from placement.routing.prefixes import common_blocks
from placement.routing.registry import POLICIES, make_policy
from placement.routing.types import RequestView, Route, Snapshot, WorkerView

BLOCK = 64
COST = StepCost(base_s=0.01, per_token_s=1e-4, per_attention_s=1e-9, per_sequence_s=1e-4)


def worker(
    name: str, role: Role, node: str, *, queue: tuple[float, ...] = (), draining: bool = False, total: int = 4000
) -> WorkerView:
    return WorkerView(
        worker=WorkerId(name),
        role=role,
        node=NodeId(node),
        running=len(queue),
        waiting=0,
        backlog_tokens=int(1000 * sum(queue)),
        backlog_s=sum(queue),
        pool=PoolCounts(total=total, free=total, cached=0, active=0, leased=0, quarantined=0),
        step_cost=COST,
        fetch_bytes_per_s={"node": 8e9, "cluster": 2e9},
        queue_s=queue,
        draining=draining,
    )


workers = st.builds(
    worker,
    name=st.just("w"),
    role=st.sampled_from(list(Role)),
    node=st.sampled_from(["n0", "n1", "n2"]),
    queue=st.lists(st.floats(0.0, 20.0), max_size=5).map(tuple),
    draining=st.booleans(),
    total=st.sampled_from([10, 4000]),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[RequestView, Snapshot]:
    views = tuple(replace(view, worker=WorkerId(f"w{i}")) for i, view in enumerate(draw(st.lists(workers, max_size=6))))
    total = draw(st.integers(1, 50_000))
    blocks = st.integers(0, total // BLOCK)
    request = RequestView(
        request_id=RequestId("r"),
        total_tokens=total,
        block_size=BLOCK,
        by_worker={view.worker: draw(blocks) * BLOCK for view in views if draw(st.booleans())},
        by_node={NodeId(name): draw(blocks) * BLOCK for name in ("n0", "n1", "n2") if draw(st.booleans())},
        by_flight={view.worker: draw(blocks) * BLOCK for view in views if draw(st.booleans())},
        waited_s=draw(st.floats(0, 100)),
        sequence=draw(st.integers(0, 1000)),
    )
    return request, Snapshot(views, bytes_per_token=50_000)


def able(request: RequestView, snapshot: Snapshot) -> list[WorkerView]:
    need = math.ceil(request.total_tokens / BLOCK)
    return [w for w in snapshot.workers if w.role in PREFILLING and not w.draining and w.pool.total >= need]


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_chooses_an_able_worker_or_says_there_is_none(name: str, case: tuple[RequestView, Snapshot]) -> None:
    request, snapshot = case
    policy = make_policy(name)
    names = {w.worker for w in able(request, snapshot)}
    if not names:
        with pytest.raises(Unavailable):
            policy.decide(request, snapshot)
        return
    decision = policy.decide(request, snapshot)
    assert decision.chosen.worker in names
    assert decision.chosen in decision.considered
    assert {c.worker for c in decision.considered} == names
    assert decision.policy == name
    assert decision.reason
    for c in decision.considered:
        assert c.cached_tokens + c.joined_tokens + c.new_tokens == request.total_tokens
        assert c.new_tokens >= 1
        assert min(c.pool_tokens, c.node_tokens, c.cluster_tokens, c.backlog_s, c.fetch_s, c.inflicted_s) >= 0
        assert c.prefill_s > 0
    assert policy.decide(request, snapshot) == decision, "a policy is pure"


@settings(max_examples=300, deadline=None)
@given(case=cases())
def test_threshold_equals_the_papers_words(case: tuple[RequestView, Snapshot]) -> None:
    request, snapshot = case
    if not able(request, snapshot):
        return
    cached = max([0, *request.by_worker.values(), *request.by_node.values()])
    cold = cached / request.total_tokens < 0.1 and request.total_tokens - cached >= 2500
    decision = make_policy("threshold").decide(request, snapshot)
    assert decision.route is (Route.COLD if cold else Route.WARM)
    own_role = Role.PRE_PREFILL if cold else Role.PREFILL
    own = {w.worker for w in able(request, snapshot) if w.role is own_role}
    assert (decision.chosen.role is own_role) == bool(own)
    pool = [c for c in decision.considered if not own or c.worker in own]
    assert decision.chosen.cached_tokens + decision.chosen.joined_tokens == max(c.cached_tokens + c.joined_tokens for c in pool)
    peers = [c for c in pool if _tiers(c) == _tiers(decision.chosen)]
    assert decision.chosen.backlog_s == min(c.backlog_s for c in peers)


def _tiers(c: object) -> tuple[int, int, int]:
    return (c.pool_tokens, c.node_tokens, c.cluster_tokens + c.joined_tokens)  # type: ignore[attr-defined]


@settings(max_examples=300, deadline=None)
@given(case=cases(), spill=st.floats(0, 30))
def test_cost_equals_brute_force(case: tuple[RequestView, Snapshot], spill: float) -> None:
    request, snapshot = case
    if not able(request, snapshot):
        return
    decision = make_policy("cost", spill_after_s=spill).decide(request, snapshot)
    role = Role.PRE_PREFILL if decision.route is Route.COLD else Role.PREFILL
    own = [c.cost_s for c in decision.considered if c.role is role]
    other = [c.cost_s for c in decision.considered if c.role is not role]
    crosses = not own or (bool(other) and min(own) - min(other) > max(0.0, spill - request.waited_s))
    assert (decision.chosen.role is not role) == crosses
    assert decision.chosen.cost_s == min(other if crosses else own)


@settings(max_examples=200, deadline=None)
@given(case=cases(), low=st.floats(0, 10), more=st.floats(0, 10))
def test_a_higher_spill_threshold_never_adds_a_crossing(case: tuple[RequestView, Snapshot], low: float, more: float) -> None:
    request, snapshot = case
    if not able(request, snapshot):
        return

    def stays(spill: float) -> bool:
        decision = make_policy("cost", spill_after_s=spill).decide(request, snapshot)
        return decision.chosen.role is (Role.PRE_PREFILL if decision.route is Route.COLD else Role.PREFILL)

    assert stays(low) <= stays(low + more)


@settings(max_examples=200, deadline=None)
@given(case=cases(), at=st.integers(0, 5), extra=st.integers(1, 20))
def test_more_cached_in_a_worker_never_makes_it_dearer(case: tuple[RequestView, Snapshot], at: int, extra: int) -> None:
    request, snapshot = case
    if not snapshot.workers:
        return
    view = snapshot.workers[at % len(snapshot.workers)]
    model = CostModel()
    before = model.candidate(request, view, snapshot)
    held = min(request.by_worker.get(view.worker, 0) + extra * BLOCK, request.total_tokens)
    richer = replace(request, by_worker={**request.by_worker, view.worker: held})
    after = model.candidate(richer, view, snapshot)
    assert after.fetch_s + after.prefill_s <= before.fetch_s + before.prefill_s + COST.base_s + COST.per_sequence_s
    assert after.new_tokens <= before.new_tokens


@given(context=st.integers(0, 100_000), new=st.integers(1, 30_000), chunk=st.integers(64, 8192))
def test_prefill_time_is_the_sum_over_its_chunks(context: int, new: int, chunk: int) -> None:
    total, done = 0.0, 0
    while done < new:
        step = min(chunk, new - done)
        total += COST.predict_s(step, step * (context + done + step / 2), 1)
        done += step
    assert prefill_s(COST, context, new, chunk) == pytest.approx(total)


@given(queue=st.lists(st.floats(0, 10), min_size=1, max_size=8), own=st.floats(0.01, 10))
def test_shortest_remaining_splits_the_queue_into_ahead_and_behind(queue: list[float], own: float) -> None:
    view = worker("w", Role.PREFILL, "n0", queue=tuple(queue))
    model = CostModel()
    assert model.ahead_s(view, own) == pytest.approx(sum(s for s in queue if s <= own))
    assert model.inflicted_s(view, own) == pytest.approx(own * sum(1 for s in queue if s > own))
    first_come = CostModel(shortest_remaining=False)
    assert first_come.ahead_s(view, own) == pytest.approx(sum(queue))
    assert first_come.inflicted_s(view, own) == 0


def test_aging_puts_one_that_waited_ahead() -> None:
    view = replace(worker("w", Role.PREFILL, "n0", queue=(5.0,)), queue_age_s=(100.0,))
    assert CostModel(aging=0.0).ahead_s(view, 1.0) == 0
    assert CostModel(aging=0.1).ahead_s(view, 1.0) == 5.0
    assert CostModel(aging=0.1).ahead_s(view, 1.0, waited_s=200.0) == 0


def test_a_tier_slower_than_computing_is_not_used() -> None:
    view = replace(worker("w", Role.PREFILL, "n0"), fetch_bytes_per_s={"node": 8e9, "cluster": 1e6})
    request = RequestView(RequestId("r"), 6400, BLOCK, {}, {NodeId("n0"): 3200, NodeId("n1"): 6400})
    numbers = CostModel().candidate(request, view, Snapshot((view,), 50_000))
    assert (numbers.pool_tokens, numbers.node_tokens, numbers.cluster_tokens) == (0, 3200, 0)


def test_a_wholly_cached_prompt_computes_its_last_block() -> None:
    view = worker("w", Role.PREFILL, "n0")
    for total in (640, 641, 639):
        request = RequestView(RequestId("r"), total, BLOCK, {WorkerId("w"): total // BLOCK * BLOCK}, {})
        numbers = CostModel().candidate(request, view, Snapshot((view,), 1))
        assert numbers.pool_tokens == (total - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("name", ["threshold", "cost"])
@pytest.mark.parametrize("left", PREFILLING)
def test_an_empty_pool_falls_back_to_the_other(name: str, left: Role) -> None:
    snapshot = Snapshot((worker("a", left, "n0"), worker("d", Role.DECODE, "n1")), 1)
    cold = RequestView(RequestId("c"), 40_000, BLOCK, {}, {})
    warm = RequestView(RequestId("w"), 40_000, BLOCK, {}, {NodeId("n0"): 39_936})
    for request in (cold, warm):
        decision = make_policy(name).decide(request, snapshot)
        assert decision.chosen.worker == "a"
        own = Role.PRE_PREFILL if decision.route is Route.COLD else Role.PREFILL
        assert ("has no worker" in decision.reason) == (own is not left)


def test_round_robin_visits_each_in_turn() -> None:
    snapshot = Snapshot(tuple(worker(f"w{i}", Role.PREFILL, "n0") for i in range(3)), 1)
    request = RequestView(RequestId("r"), 100, BLOCK, {}, {})
    seen = [make_policy("round_robin").decide(replace(request, sequence=i), snapshot).chosen.worker for i in range(6)]
    assert seen == ["w0", "w1", "w2", "w0", "w1", "w2"]


@pytest.mark.parametrize(
    ("settings_", "key"),
    [
        ({"name": "nearest"}, "routing.policy"),
        ({"cold_ratio": 1.5}, "routing.cold_ratio"),
        ({"spill_after_s": -1.0}, "routing.spill_after_s"),
        ({"spill_after_s": math.nan}, "routing.spill_after_s"),
        ({"chunk_tokens": 0}, "routing.chunk_tokens"),
    ],
)
def test_impossible_settings_are_refused_by_key(settings_: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=key) as caught:
        make_policy(**settings_)  # type: ignore[arg-type]
    assert caught.value.param == key


def test_agents_on_one_new_context_follow_the_one_that_computes_it() -> None:
    cost = StepCost(0.005, 3e-5, 6e-10, 0.0)
    views = [replace(worker(n, r, n), step_cost=cost) for n, r in (("p", Role.PREFILL), ("pp", Role.PRE_PREFILL))]
    alone = RequestView(RequestId("first"), 100_000, BLOCK, {}, {})
    first = make_policy("cost").decide(alone, Snapshot(tuple(views), 1))
    assert first.chosen.worker == "pp"
    busy = replace(views[1], queue_s=(first.chosen.prefill_s,), backlog_s=first.chosen.prefill_s)
    follower = replace(alone, request_id=RequestId("next"), by_flight={WorkerId("pp"): 99_840})
    for _ in range(15):
        decision = make_policy("cost").decide(follower, Snapshot((views[0], busy), 1))
        assert decision.chosen.worker == "pp"
        assert decision.chosen.joined_tokens == 99_840
        tail_s = decision.chosen.prefill_s
        assert tail_s < 0.1
        busy = replace(busy, queue_s=(*busy.queue_s, tail_s), backlog_s=busy.backlog_s + tail_s)


@given(one=st.lists(st.integers(0, 1), max_size=40), other=st.lists(st.integers(0, 1), max_size=40))
def test_common_blocks_equals_counting(one: list[int], other: list[int]) -> None:
    def chained(bits: list[int]) -> list[BlockKey]:
        return [BlockKey(bytes(bits[: i + 1])) for i in range(len(bits))]

    count = 0
    while count < min(len(one), len(other)) and one[count] == other[count]:
        count += 1
    assert common_blocks(chained(one), chained(other)) == count

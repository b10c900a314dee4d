"""The arithmetic of order and chunks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.engine.ordering import PRIORITY_S, Work, chunk_length, prefill_budget, standing, worthwhile_tokens
from cpd_ray.config import EngineConfig
from cpd_ray.messages import StepCost

COST = StepCost(0.02, 1e-3, 1e-7, 1e-3)
CONFIG = EngineConfig(step_tokens=2048, chunk_tokens=512, aging_s=10.0)


def place(work: Work, arrival_s: float = 0.0, priority: int = 0, config: EngineConfig = CONFIG) -> float:
    return standing(work, arrival_s, priority, 0, config, COST)[0]


def test_shortest_remaining_goes_first_and_first_come_ignores_it() -> None:
    short, long = Work(0, 100), Work(0, 5000)
    assert place(short) < place(long)
    fcfs = CONFIG.model_copy(update={"order": "fcfs"})
    assert place(long, 0.0, config=fcfs) < place(short, 1.0, config=fcfs)


def test_waiting_outweighs_work_at_the_configured_rate() -> None:
    long = Work(0, 5000)
    lead_s = (place(long) - place(Work(0, 100))) * CONFIG.aging_s
    assert place(Work(0, 100), lead_s - 0.01) < place(long) < place(Work(0, 100), lead_s + 0.01)


def test_priority_is_a_bounded_head_start() -> None:
    assert place(Work(0, 1), priority=1) == place(Work(0, 1)) - PRIORITY_S
    assert place(Work(0, 1), priority=10**9) == place(Work(0, 1), priority=10)


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 600), st.sampled_from([1, 16, 64, 256]))
def test_a_chunk_ends_at_a_border_or_the_end_and_progresses(start: int, new: int, limit: int, size: int) -> None:
    work = Work(start, start + new)
    length = chunk_length(work, limit, size)
    assert 0 <= length <= min(limit, new)
    assert length in (0, new) or (start + length) % size == 0
    if limit >= size:
        assert length > 0
        assert length == new or length > limit - size, "the chunk stops at the last border within reach"


@given(st.integers(-1000, 0), st.integers(0, 300), st.integers(1, 300))
def test_no_limit_gives_no_chunk(limit: int, start: int, new: int) -> None:
    assert chunk_length(Work(start, start + new), limit, 16) == 0


def test_chunks_are_long_alone_and_short_in_company() -> None:
    assert prefill_budget(CONFIG, 64, decodes=0, alone=True) == 2048
    assert prefill_budget(CONFIG, 64, decodes=0, alone=False) == 512
    assert prefill_budget(CONFIG, 64, decodes=2000, alone=False) == 64, "decodes never shut prompts out"


def test_joining_a_finishing_step_must_pay_for_the_delay() -> None:
    assert worthwhile_tokens(COST, 0, finishing=0, behind=1) is None
    few = worthwhile_tokens(COST, 0, finishing=1, behind=1)
    assert few is not None
    assert few * COST.per_token_s + COST.per_sequence_s <= COST.base_s, "costs more than the step that it spares"
    more = worthwhile_tokens(COST, 0, finishing=1, behind=4)
    delayed = worthwhile_tokens(COST, 0, finishing=4, behind=4)
    deep = worthwhile_tokens(COST, 100_000, finishing=1, behind=1)
    assert more is not None
    assert delayed is not None
    assert deep is not None
    assert more > few
    assert delayed == few
    assert deep < few


def test_attention_makes_the_same_tokens_dearer_later() -> None:
    assert Work(8000, 8512).predict_s(COST, 512) > Work(0, 512).predict_s(COST, 512)
    assert Work(10, 10).predict_s(COST, 512) == 0.0

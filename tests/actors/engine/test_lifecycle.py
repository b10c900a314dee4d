"""The lifecycle table, the token buffer, and the count of what was never computed."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.cached import CachedMarks
from actors.engine.sequence import HOLDING, MOVES, Event, Phase, Sequence
from cpd_ray.types import CachedTokens, Tier
from kv.keys import block_keys
from tests.actors.engine.rig import ROOT, Rig


def test_the_table_is_total() -> None:
    assert set(MOVES) == set(Phase)
    assert all(set(moves) == set(Event) for moves in MOVES.values())


def test_every_phase_is_reached_and_leads_to_the_end() -> None:
    def reach(start: Phase) -> set[Phase]:
        seen, front = {start}, [start]
        while front:
            for to in MOVES[front.pop()].values():
                if to is not None and to not in seen:
                    seen.add(to)
                    front.append(to)
        return seen

    assert reach(Phase.WAITING) == set(Phase)
    assert all(Phase.FINISHED in reach(phase) for phase in Phase)
    assert reach(Phase.FINISHED) == {Phase.FINISHED}


def test_what_holds_blocks_can_lose_or_end() -> None:
    for phase in HOLDING:
        assert MOVES[phase][Event.END] is Phase.FINISHED
    assert MOVES[Phase.LEAVING][Event.PREEMPT] is None, "what its owner left never comes back"


def test_an_illegal_move_is_our_bug() -> None:
    sequence = Sequence(Rig().request("a", [1, 2, 3]), 0.0, 1)
    sequence.move(Event.END, 1.0)
    with pytest.raises(AssertionError, match="can't happen"):
        sequence.move(Event.RUN, 2.0)


def test_time_is_booked_where_it_was_spent() -> None:
    sequence = Sequence(Rig().request("a", [1, 2, 3]), 10.0, 1)
    sequence.move(Event.FETCH, 12.0)
    sequence.move(Event.RUN, 15.0)
    sequence.move(Event.PREEMPT, 19.0)
    sequence.move(Event.RUN, 20.0)
    assert sequence.times_s(26.0) == {"queue": 3.0, "fetch": 3.0, "compute": 10.0}


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 9))
def test_keys_of_generated_blocks_continue_the_prompts_chain(prompt: int, answer: int, size: int) -> None:
    rig = Rig(block_size=size)
    sequence = Sequence(rig.request("a", range(prompt), answer), 0.0, 1)
    for token in range(answer):
        sequence.append(token + 500)
    whole = [*range(prompt), *range(500, 500 + answer)]
    expected = rig.keys(whole)
    assert [sequence.key(block, size) for block in range(len(expected))] == expected
    assert list(sequence.tokens(0, sequence.known)) == whole
    assert sequence.output_index == answer
    assert block_keys(ROOT, sequence.tokens(0, sequence.known), size) == expected


def test_cached_marks_follow_each_token_of_a_random_life() -> None:
    rng = random.Random(7)
    for _ in range(300):
        marks = CachedMarks(40)
        truth: dict[int, Tier | None] = {}
        for _life in range(rng.randint(1, 4)):
            kept = rng.randint(0, 45)
            marks.lose(kept)
            truth = {place: tier for place, tier in truth.items() if place < kept or tier is None}
            stop = kept
            marks.spare(Tier.POOL, kept)
            for place in range(min(kept, 40)):
                truth.setdefault(place, Tier.POOL)
            for tier in rng.sample([Tier.NODE, Tier.CLUSTER], rng.randint(0, 2)):
                stop = rng.randint(stop, 45)
                marks.spare(tier, stop)
                for place in range(min(stop, 40)):
                    truth.setdefault(place, tier)
            end = rng.randint(stop, 50)
            marks.compute(stop, end)
            truth |= dict.fromkeys(range(stop, min(end, 40)), None)
            counted = {tier: list(truth.values()).count(tier) for tier in Tier}
            assert marks.count() == CachedTokens(counted[Tier.POOL], counted[Tier.NODE], counted[Tier.CLUSTER])

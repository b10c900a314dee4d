"""Right answers and exact cached counts, whatever the length, the chunks, and where the KV comes from."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.engine.fakes import oracle
from cpd_ray.config import EngineConfig
from cpd_ray.errors import EngineFault
from cpd_ray.types import CachedTokens, FinishReason, SamplingParams
from tests.actors.engine.rig import VOCAB, Rig

SIZE = 4
lengths = st.one_of(
    st.integers(1, 60), st.builds(lambda k, d: max(1, k * SIZE + d), st.integers(0, 15), st.sampled_from([-1, 0, 1]))
)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(VOCAB) for _ in range(length)]


@given(lengths, st.integers(1, 12), st.integers(SIZE, 40))
def test_cold_then_warm_from_the_pool(length: int, new: int, chunk: int) -> None:
    rig = Rig(config=EngineConfig(step_tokens=40, chunk_tokens=chunk))
    tokens = prompt(length)
    for name in ("cold", "warm"):
        rig.add(name, tokens, new)
        rig.run()
        assert rig.answer(name) == oracle(tokens, new, VOCAB)
    usable = (length - 1) // SIZE * SIZE
    assert rig.first("cold").cached == CachedTokens()
    assert rig.first("warm").cached == CachedTokens(pool=usable)
    assert rig.last("cold").computed_tokens == length + new - 1, "the last token of the answer needs no KV"
    assert rig.last("warm").computed_tokens == length - usable + new - 1
    rig.assert_nothing_held()


@given(lengths, st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_fetched_blocks_count_exactly_by_tier(length: int, in_pool: int, may_fetch: int, lands: int) -> None:
    rig = Rig()
    tokens = prompt(length)
    rig.add("fill", tokens, 1)
    rig.run()
    rig.pool.clear()
    if in_pool and (length - 1) // SIZE >= in_pool:
        rig.add("head", tokens[: in_pool * SIZE + 1], 1)
        rig.run()
    pool_blocks = rig.pool.match(rig.keys(tokens))
    rig.port.landing = lambda plan: (lands, ())
    rig.add("it", tokens, 3, may_fetch_blocks=may_fetch)
    rig.run()
    usable = (length - 1) // SIZE
    pool_blocks = min(pool_blocks, usable)
    node = min(max(0, min(may_fetch, usable) - pool_blocks), lands)
    assert rig.first("it").cached == CachedTokens(pool=pool_blocks * SIZE, node=node * SIZE)
    assert rig.answer("it") == oracle(tokens, 3, VOCAB)
    assert rig.last("it").computed_tokens == length - (pool_blocks + node) * SIZE + 2
    rig.assert_nothing_held()


@given(lengths, st.integers(2, 9), st.integers(0, 15), st.booleans())
def test_a_handed_over_request_starts_with_a_decode_step(length: int, new: int, in_pool: int, tail_lost: bool) -> None:
    prefill, decode = Rig(), Rig()
    tokens = prompt(length)
    decode.port.stored = prefill.port.stored
    request = prefill.add("it", tokens, 1, hold=True)
    prefill.run()
    held, first = prefill.last("it").held_blocks, prefill.answer("it")
    whole, rest = divmod(length, SIZE)
    assert len(held) == whole + (rest > 0)
    if rest and not tail_lost:
        decode.port.tails["it"] = prefill.runner.memory[held[-1]]
    prefill.pool.release(held)
    prefill.assert_nothing_held()
    if 0 < in_pool <= whole:
        decode.add("head", tokens[: in_pool * SIZE], 1)
        decode.run()
    decode.plans.clear()
    pool_tokens = min(decode.pool.match(request.keys), whole) * SIZE
    decode.add(
        "it",
        [*tokens, *first],
        new - 1,
        prompt_tokens=length,
        may_fetch_blocks=whole,
        fetch_tail=True,
    )
    decode.run()
    assert first + decode.answer("it") == oracle(tokens, new, VOCAB)
    lost = rest if tail_lost else 0
    cached = decode.first("it").cached
    assert cached is not None
    assert cached.pool == pool_tokens
    assert cached.total == length - lost
    assert decode.plans[0].new_tokens == 1 + lost
    decode.assert_nothing_held()


def test_blocks_of_the_answer_are_committed_and_told_in_chain_order() -> None:
    rig = Rig()
    tokens = prompt(10)
    rig.add("a", tokens, 12)
    rig.run()
    turn = [*tokens, *rig.answer("a")]
    keys = rig.keys(turn[:-1])  # the last token's KV was never computed
    assert list(rig.port.stored) == keys
    assert [rig.port.parents[key] for key in keys] == [None, *keys[:-1]]
    rig.add("next", [*turn, 5, 6, 7], 2)
    rig.run()
    assert rig.first("next").cached == CachedTokens(pool=len(keys) * SIZE)


def test_cached_never_reaches_the_last_token() -> None:
    rig = Rig()
    for length in range(1, 30):
        for name in ("x", "y"):
            rig.add(f"{name}{length}", prompt(length), 1)
            rig.run()
        cached = rig.first(f"y{length}").cached
        assert cached is not None
        assert cached.total == (length - 1) // SIZE * SIZE < length


def test_a_batch_of_all_kinds_equals_each_alone() -> None:
    rng = random.Random(3)
    rig = Rig(blocks=400, config=EngineConfig(step_tokens=48, chunk_tokens=12, max_running=6))
    wanted = {}
    for i in range(40):
        tokens = prompt(rng.choice([1, 3, 4, 5, 8, 31, 32, 33, 60]), seed=rng.randrange(4))
        new = rng.randint(1, 10)
        rig.add(f"r{i}", tokens, new, may_fetch_blocks=rng.choice([0, 100]))
        wanted[f"r{i}"] = oracle(tokens, new, VOCAB)
        if rng.random() < 0.5:
            rig.step()
    rig.run()
    assert {name: rig.answer(name) for name in wanted} == wanted
    assert max(len(plan.sequences) for plan in rig.plans) == 6
    rig.assert_nothing_held()


# -- ends ------------------------------------------------------------------------------------------------------------


def test_an_end_token_ends_the_answer_and_is_part_of_it() -> None:
    tokens, free = prompt(9), oracle(prompt(9), 8, VOCAB)
    for stops in ({"eos": frozenset({free[3]})}, {"sampling": SamplingParams(max_tokens=8, stop_token_ids=(free[3],))}):
        rig = Rig(eos=stops.get("eos", frozenset()))  # type: ignore[arg-type]
        rig.add("a", tokens, 8, **({"sampling": stops["sampling"]} if "sampling" in stops else {}))
        rig.run()
        assert rig.answer("a") == free[:4]
        assert rig.last("a").finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("sampling", "ends"),
    [
        (SamplingParams(max_tokens=8, ignore_eos=True), 8),
        (SamplingParams(max_tokens=8, min_tokens=3), 4),
        (SamplingParams(max_tokens=8, min_tokens=4), 8),
    ],
)
def test_min_tokens_and_ignore_eos_hold_the_end_off(sampling: SamplingParams, ends: int) -> None:
    free = oracle(prompt(9), 8, VOCAB)
    assert len(set(free)) == 8
    rig = Rig(eos=frozenset({free[3]}))
    rig.add("a", prompt(9), 8, sampling=sampling)
    rig.run()
    assert len(rig.answer("a")) == ends
    assert rig.last("a").finish_reason is (FinishReason.LENGTH if ends == 8 else FinishReason.STOP)


def test_kv_only_requests_commit_and_sample_nothing() -> None:
    rig = Rig()
    tokens = prompt(33)
    rig.add("warm", tokens, 0, sample=False)
    rig.run()
    assert rig.last("warm").tokens == ()
    assert rig.last("warm").finish_reason is FinishReason.LENGTH
    assert rig.last("warm").cached == CachedTokens()
    assert rig.pool.match(rig.keys(tokens)) == 8
    assert not any(step.sample for plan in rig.plans for step in plan.sequences)
    rig.assert_nothing_held()


def test_held_blocks_stay_readable_until_they_are_released() -> None:
    rig = Rig()
    tokens = prompt(10)
    rig.add("a", tokens, 1, hold=True)
    rig.run()
    held = rig.last("a").held_blocks
    assert len(held) == 3
    assert rig.pool.counts().active == 3
    assert rig.runner.entries(held, 10)
    rig.pool.release(held)
    rig.assert_nothing_held()


def test_a_faulty_sequence_ends_alone_and_commits_nothing_of_that_step() -> None:
    rig = Rig()
    rig.runner.fault = lambda step: EngineFault("NaN logits") if step.request_id == "bad" else None
    rig.add("bad", prompt(9), 4)
    rig.add("good", prompt(11), 4)
    rig.run()
    assert isinstance(rig.last("bad").error, EngineFault)
    assert rig.last("bad").tokens == ()
    assert rig.pool.match(rig.keys(prompt(9))) == 0
    assert rig.answer("good") == oracle(prompt(11), 4, VOCAB)
    rig.assert_nothing_held()


def test_a_step_that_breaks_ends_its_requests_and_nothing_else() -> None:
    rig = Rig(config=EngineConfig(step_tokens=16, chunk_tokens=16, max_running=1))
    rig.add("a", prompt(9), 4)
    rig.add("b", prompt(10), 4)
    plan = rig.schedule()
    assert plan is not None
    outputs = rig.scheduler.fail(plan, EngineFault("boom"))
    rig.scheduler.check()
    assert [(o.request_id, type(o.error)) for o in outputs] == [("a", EngineFault)]
    assert rig.pool.match(rig.keys(prompt(9))) == 0
    rig.run()
    assert rig.answer("b") == oracle(prompt(10), 4, VOCAB)
    rig.assert_nothing_held()

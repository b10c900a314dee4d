"""Sampling against plain definitions: distributions, truncation, penalties, log-probabilities; and that a row stands alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from actors.engine.plan import Sampled, SequenceStep
from actors.engine.randomness import gumbel, seed_of, stream, uniform
from actors.engine.sampler import Sampler
from cpd_ray.errors import EngineFault, InvalidRequest
from cpd_ray.ids import RequestId
from cpd_ray.types import SamplingParams
from tests.actors.engine.torch_rig import ids_view

VOCAB = 400
EOS = 9
SAMPLER = Sampler(VOCAB, [EOS, VOCAB + 7])
LEAST_P = 1e-4
"""Chi-square tests run on fixed seeds: they pass for good once they pass."""


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1000, **{"seed": 0, **changes})


def step(
    sampling: SamplingParams, *, index: int = 0, history: Sequence[int] = (1, 2, 3), prompt: int = 3, name: str = "r"
) -> SequenceStep:
    view = ids_view(history)
    return SequenceStep(RequestId(name), len(history) - 1, view[-1:], [], True, sampling, index, view, prompt)


def one(row: torch.Tensor, sampling: SamplingParams, **more: Any) -> Sampled:
    return SAMPLER.sample([step(sampling, **more)], row[None])[0]


def token(row: torch.Tensor, sampling: SamplingParams, **more: Any) -> int:
    found = one(row, sampling, **more)
    assert found.error is None
    assert found.token is not None
    return found.token


def row_of(seed: int, spread: float = 2.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * spread).to(dtype)


def wanted(row: torch.Tensor, s: SamplingParams) -> npt.NDArray[np.float64]:
    """The distribution by its definition: temperature, min-p, top-k, top-p, one after the other, ties at a border kept."""
    p = torch.softmax(row.double() / s.temperature, -1).numpy()
    p = np.where(p >= s.min_p * p.max(), p, 0)
    if s.top_k and s.top_k < len(p):
        p = np.where(p >= np.sort(p)[-s.top_k], p, 0)
    p = p / p.sum()
    order = np.sort(p)[::-1]
    reached = np.cumsum(order)
    border = order[min(int(np.searchsorted(reached, s.top_p)), len(p) - 1)] if s.top_p < 1 else 0
    p = np.where(p >= border, p, 0)
    return p / p.sum()


def counts_of(row: torch.Tensor, s: SamplingParams, draws: int) -> npt.NDArray[np.int64]:
    steps = [step(replace(s, seed=i), name=f"r{i}") for i in range(draws)]
    tokens = [found.token for found in SAMPLER.sample(steps, row.expand(draws, -1))]
    return np.bincount(np.array(tokens, dtype=np.int64), minlength=len(row))


# -- distributions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "s",
    [
        params(temperature=1.0),
        params(temperature=0.5),
        params(temperature=3.0),
        params(top_k=5),
        params(top_k=40, temperature=1.7),
        params(top_p=0.5),
        params(top_p=0.95, temperature=2.0),
        params(min_p=0.1),
        params(min_p=0.05, top_k=30, top_p=0.8),
        params(top_k=3, top_p=0.99, temperature=10.0),
    ],
    ids=lambda s: f"t{s.temperature}-k{s.top_k}-p{s.top_p}-m{s.min_p}",
)
def test_draws_follow_the_distribution(s: SamplingParams) -> None:
    row, draws = row_of(1), 2000
    expected = wanted(row, s) * draws
    counts = counts_of(row, s, draws)
    assert counts[expected == 0].sum() == 0
    # categories too rare for the approximation are put together
    rare = expected < 5
    seen, hoped = [*counts[~rare], counts[rare].sum()], [*expected[~rare], expected[rare].sum()]
    if hoped[-1] < 5:
        seen, hoped = [*seen[:-2], seen[-2] + seen[-1]], [*hoped[:-2], hoped[-2] + hoped[-1]]
    assert stats.chisquare(seen, hoped).pvalue > LEAST_P


def test_a_flat_vocabulary_is_drawn_from_as_a_whole() -> None:
    counts = counts_of(torch.zeros(VOCAB), params(), 4000)
    assert stats.chisquare(counts).pvalue > LEAST_P


def test_the_far_tail_is_drawn_in_its_share() -> None:
    # 300 ids 11 below the peak hold together 300 e^-11 = 0.5 % of the mass: beyond the near candidates, yet drawn
    row = torch.full((VOCAB,), -50.0)
    row[0], row[100:400] = 0.0, -11.0
    share = 300 * math.exp(-11) / (1 + 300 * math.exp(-11))
    counts = counts_of(row, params(), 3000)
    assert stats.binomtest(int(counts[100:].sum()), 3000, share).pvalue > LEAST_P
    assert counts[1:100].sum() == 0


@given(
    seed=st.integers(0, 2**32 - 1),
    spread=st.floats(0.01, 30),
    temperature=st.floats(0.05, 20),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.001, 1),
    min_p=st.floats(0, 1),
    coarse=st.booleans(),
)
def test_nothing_cut_away_is_ever_drawn(
    seed: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, coarse: bool
) -> None:
    # coarse logits have many ties, at the borders too
    row = row_of(seed % 1000, spread, torch.bfloat16 if coarse else torch.float32)
    s = params(seed=seed, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    chosen = token(row, s)
    allowed = wanted(row.float(), s)
    # what lies within rounding of a border may fall on either side of it
    loose = wanted(row.float(), replace(s, top_p=min(1.0, top_p * 1.0001), min_p=min_p * 0.9999))
    assert allowed[chosen] > 0 or loose[chosen] > 0


def test_a_nucleus_of_one_and_top_k_of_one_are_greedy() -> None:
    for seed in range(20):
        row = row_of(seed)
        assert token(row, params(top_p=1e-6, seed=seed)) == token(row, params(top_k=1, seed=seed)) == int(row.argmax())


def test_greedy_takes_the_first_of_equals_and_ignores_the_seed() -> None:
    row = torch.zeros(VOCAB)
    row[[30, 50]] = 1.0
    assert {token(row, params(temperature=0, seed=seed)) for seed in range(5)} == {30}
    assert token(row, params(temperature=1e-30)) == 30


# -- randomness ------------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_position_only() -> None:
    row = row_of(3)
    alone = [token(row, params(seed=5), index=i) for i in range(50)]
    assert len(set(alone)) > 10
    again = [token(row, params(seed=5), index=i, history=range(i + 1), name=f"other{i}") for i in range(50)]
    assert again == alone
    assert [token(row, params(seed=6), index=i) for i in range(50)] != alone


def test_a_row_is_the_same_in_any_company() -> None:
    rows = torch.stack([row_of(i, dtype=torch.bfloat16) for i in range(8)])
    kinds = [params(seed=i, top_p=0.9) if i % 3 else params(temperature=0) for i in range(8)]
    kinds[4] = params(seed=4, repetition_penalty=1.3, logprobs=3)
    steps = [step(s, index=i, name=f"r{i}") for i, s in enumerate(kinds)]
    together = SAMPLER.sample(steps, rows)
    assert together == [SAMPLER.sample([s], rows[i : i + 1])[0] for i, s in enumerate(steps)]
    assert together[::-1] == SAMPLER.sample(steps[::-1], rows.flip(0))


def test_a_request_without_a_seed_draws_by_its_name() -> None:
    row = row_of(3, 0.5)
    names = [f"request-{i}" for i in range(40)]
    found = [token(row, params(seed=None), name=name) for name in names]
    assert found == [token(row, params(seed=seed_of(name)), name="x") for name in names]
    assert len(set(found)) > 20


def test_noise_is_uniform_over_tokens_positions_and_seeds() -> None:
    over_tokens = uniform(stream(1, 2), np.arange(20_000))
    over_positions = np.array([uniform(stream(1, i), np.array([7]))[0] for i in range(3000)])
    over_seeds = np.array([uniform(stream(i, 0), np.array([7]))[0] for i in range(-1500, 1500)])
    for sample in (over_tokens, over_positions, over_seeds):
        assert sample.min() > 0
        assert sample.max() < 1
        assert stats.kstest(sample, "uniform").pvalue > LEAST_P
    for lag in (1, 2, 64):
        assert abs(stats.pearsonr(over_tokens[:-lag], over_tokens[lag:]).statistic) < 0.03
    assert stats.kstest(gumbel(stream(3, 0), np.arange(20_000)), "gumbel_r").pvalue > LEAST_P
    assert stream(-1, 0) == stream(2**64 - 1, 0)


def test_noise_never_changes_between_versions() -> None:
    assert stream(0, 0) == 0xA706DD2F4D197E6F
    assert stream(12345, 678) == 0xD8C8B94680135070
    np.testing.assert_array_equal(
        uniform(stream(7, 1), np.array([0, 1, 49_151])), [0.16798203294970532, 0.05238503339197692, 0.6441821464431805]
    )


# -- what changes the logits -----------------------------------------------------------------------------------------


def test_penalties_follow_their_definitions() -> None:
    row = row_of(8)
    history, prompt = [5, 6, 6, 7, 20, 20, 20, 30], 4
    s = params(temperature=0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.3)
    adjusted = row.clone()
    for i in {5, 6, 7, 20, 30}:
        adjusted[i] = adjusted[i] / 1.5 if adjusted[i] > 0 else adjusted[i] * 1.5
    adjusted[20] -= 0.7 + 0.3 * 3
    adjusted[30] -= 0.7 + 0.3
    for favourite in (5, 20, 30, 100):
        lifted, lifted_adjusted = row.clone(), adjusted.clone()
        delta = float(adjusted.max() - adjusted[favourite])
        for lift in (delta - 0.05, delta + 0.05):
            lifted_adjusted[favourite] = adjusted[favourite] + lift
            value = lifted_adjusted[favourite] + (
                0.7 + 0.3 * history[prompt:].count(favourite) if favourite in history[prompt:] else 0
            )
            seen = favourite in history
            lifted[favourite] = (value * 1.5 if value > 0 else value / 1.5) if seen else value
            assert token(lifted, s, history=history, prompt=prompt, index=4) == int(lifted_adjusted.argmax())


def test_penalties_leave_the_logits_of_others_alone() -> None:
    row = row_of(8)
    before = row.clone()
    one(row, params(repetition_penalty=2.0, logit_bias=((3, 50.0),)))
    assert torch.equal(row, before)
    # an id outside the vocabulary in the history is no index
    assert one(row, params(temperature=0, repetition_penalty=2.0), history=[1, VOCAB + 5]).error is None


def test_logit_bias_adds_up_and_refuses_ids_outside() -> None:
    row = row_of(2)
    assert token(row, params(temperature=0, logit_bias=((17, 60.0), (17, 40.0)))) == 17
    best = int(row.argmax())
    assert token(row, params(temperature=0, logit_bias=((best, -100.0),))) == int(row.topk(2).indices[1])
    found = SAMPLER.sample([step(params(logit_bias=((VOCAB, 1.0),))), step(params(temperature=0))], torch.stack([row, row]))
    assert isinstance(found[0].error, InvalidRequest)
    assert found[0].token is None
    assert found[1].token == best


def test_end_and_stop_ids_are_held_back_until_min_tokens_are_out() -> None:
    row = row_of(2)
    row[EOS], row[77] = 100.0, 90.0
    s = params(temperature=0, min_tokens=3, stop_token_ids=(77, VOCAB + 1))
    third = int(row.topk(3).indices[2])
    assert [token(row, s, index=i) for i in range(5)] == [third, third, third, EOS, EOS]
    assert token(row, replace(s, stop_token_ids=()), index=0) == 77
    everything = one(row, params(min_tokens=1, stop_token_ids=tuple(range(VOCAB))))
    assert isinstance(everything.error, InvalidRequest)


# -- log-probabilities -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_the_model_s_own(dtype: torch.dtype) -> None:
    row = row_of(4, dtype=dtype)
    expected = row.double().log_softmax(-1)
    found = one(row, params(temperature=2.0, top_k=50, logit_bias=((3, 5.0),), logprobs=5))
    assert found.logprobs is not None
    assert found.logprobs.chosen == pytest.approx(float(expected[found.token]), abs=1e-5)
    assert [p for _, p in found.logprobs.top] == pytest.approx(expected.topk(5).values.tolist(), abs=1e-5)
    assert all(float(expected[i]) == pytest.approx(p, abs=1e-5) for i, p in found.logprobs.top)


def test_logprobs_of_zero_are_the_chosen_one_s_alone() -> None:
    found = one(row_of(4), params(temperature=0, logprobs=0))
    assert found.logprobs is not None
    assert found.logprobs.top == ()
    assert one(row_of(4), params(temperature=0)).logprobs is None


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("s", [params(temperature=0), params(), params(top_p=0.5, logprobs=2, repetition_penalty=1.1)])
def test_a_poisoned_row_fails_alone(s: SamplingParams, poison: float) -> None:
    rows = torch.stack([row_of(i) for i in range(3)])
    rows[1, 200] = poison
    found = SAMPLER.sample([step(s, name=f"r{i}") for i in range(3)], rows)
    assert isinstance(found[1].error, EngineFault)
    assert found[1].token is None
    assert [f.error for f in (found[0], found[2])] == [None, None]
    assert found[0] == SAMPLER.sample([step(s, name="r0")], rows[:1])[0]

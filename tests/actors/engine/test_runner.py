"""The runner against transformers' generate: any cut into chunks, any mix of requests, any blocks, give the stock model's tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from actors.engine.plan import Sampled, StepPlan
from actors.models.resolve import resolve
from cpd_ray.errors import EngineFault
from cpd_ray.types import SamplingParams
from tests.actors.engine.torch_rig import BACKENDS, Bench, Oracle, Text, step_of

BLOCK = 16
ANSWER = 8


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve("tiny", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny)


def prompt_of(seed: int, length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(bench: Bench, text: Text, count: int = ANSWER, chunk: int = 10_000) -> list[int]:
    """Run one request alone until it has `count` tokens of answer."""
    while len(text.answer) < count:
        bench.step([(text, min(chunk, len(text.tokens) - text.computed))])
    return text.answer


@pytest.mark.parametrize("backend", BACKENDS)
def test_lengths_around_block_borders(tiny: Path, oracle: Oracle, backend: str) -> None:
    bench = Bench(tiny, backend=backend, block_size=BLOCK)
    for length in (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1, 5 * BLOCK):
        prompt = prompt_of(length, length)
        assert finish(bench, bench.text(f"r{length}", prompt, room=ANSWER)) == oracle.greedy(prompt, ANSWER), length


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixed_batch_equals_each_alone(tiny: Path, oracle: Oracle, backend: str) -> None:
    """A seeded walk: requests come and go, prompts are cut at random, some are preempted and start again in other blocks."""
    rng = random.Random(backend)
    bench = Bench(tiny, backend=backend, block_size=BLOCK, blocks=200)
    waiting = [bench.text(f"r{i}", prompt_of(100 + i, rng.choice([1, 15, 16, 17, 31, 33, 64, 90])), room=16) for i in range(12)]
    running: list[Text] = []
    done: list[Text] = []
    preempted = 0
    while waiting or running:
        while waiting and len(running) < 5 and rng.random() < 0.6:
            running.append(waiting.pop())
        if running and rng.random() < 0.1:
            victim = rng.choice(running)
            bench.free[:0] = victim.table
            victim.table = [int(bench.free.pop()) for _ in victim.table]
            victim.computed = 0
            preempted += 1
        decodes = [(t, 1) for t in running if len(t.tokens) - t.computed == 1 and t.computed]
        chunks = [
            (t, rng.randint(1, len(t.tokens) - t.computed)) for t in running if len(t.tokens) - t.computed > 1 or not t.computed
        ]
        if not decodes and not chunks:
            continue
        assert all(s.error is None for s in bench.step(decodes + chunks))
        for text in [t for t in running if len(t.answer) >= ANSWER]:
            running.remove(text)
            done.append(text)
            bench.free[:0] = text.table
    assert preempted > 0
    for text in done:
        assert text.answer[:ANSWER] == oracle.greedy(text.tokens[: text.prompt], ANSWER), text.name


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cached_prefix_is_used_as_it_lies(tiny: Path, oracle: Oracle, backend: str) -> None:
    bench = Bench(tiny, backend=backend, block_size=BLOCK)
    shared = prompt_of(1, 4 * BLOCK)
    first = bench.text("first", [*shared, 5, 6, 7])
    finish(bench, first)
    for name, prompt, cached in (
        ("longer", [*shared, 9, 9, 9, 9], 4 * BLOCK),
        ("whole prompt cached", shared, 4 * BLOCK - 1),
        ("half", [*shared[: 2 * BLOCK], 1, 2, 3], 2 * BLOCK),
    ):
        text = bench.text(name, prompt)
        text.table[: cached // BLOCK] = first.table[: cached // BLOCK]
        if cached % BLOCK:
            # the last token is computed anew: in a copy of its block, for committed blocks are not written
            bench.memory.tensor[text.table[cached // BLOCK]] = bench.memory.tensor[first.table[cached // BLOCK]]
        text.computed = cached
        assert finish(bench, text) == oracle.greedy(prompt, ANSWER), name


def test_a_wrong_byte_of_kv_changes_the_answer(tiny: Path, oracle: Oracle) -> None:
    """The oracle is worth something: the test model's answer depends on every block."""
    bench = Bench(tiny, block_size=BLOCK)
    prompt = prompt_of(3, 20 * BLOCK)
    for block in (0, 7, 19):
        text = bench.text("r", prompt)
        bench.step([(text, len(prompt) - 1)])
        bench.memory.tensor[text.table[block]] = -bench.memory.tensor[text.table[block]]
        assert finish(bench, text) != oracle.greedy(prompt, ANSWER), block
        bench.free += text.table


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_stays_near_the_stock_model(tiny: Path, backend: str) -> None:
    """Stated tolerance: 3 % of the logits' spread, largest difference 15 %."""
    prompt = prompt_of(4, 100)
    expected = Oracle(tiny, torch.bfloat16).logits(prompt).float()
    exact = Oracle(tiny).logits(prompt)
    bench = Bench(tiny, backend=backend, block_size=BLOCK, dtype="bfloat16")
    table = list(range(8))
    found = torch.cat(
        [bench.runner.logits(StepPlan((step_of("r", prompt[: i + 1], i, i + 1, table),))).float() for i in range(len(prompt))]
    )
    spread = exact.std()
    assert (found - exact).square().mean().sqrt() < 1.5 * (expected - exact).square().mean().sqrt() + 0.001 * spread
    assert (found - expected).square().mean().sqrt() < 0.03 * spread
    assert (found - expected).abs().max() < 0.15 * spread


# -- what is sampled -------------------------------------------------------------------------------------------------


def test_only_sampled_sequences_have_results(tiny: Path) -> None:
    bench = Bench(tiny, block_size=BLOCK)
    prompt = prompt_of(5, 40)
    steps = [
        step_of("decode-like", prompt[:1], 0, 1, [0]),
        step_of("part", prompt, 0, 20, [1, 2, 3], sample=False),
        step_of("whole", prompt, 0, 40, [4, 5, 6]),
    ]
    result = bench.runner.run(StepPlan(tuple(steps)))
    assert [s.request_id for s in result.sampled] == ["decode-like", "whole"]
    assert result.seconds > 0
    rest = bench.runner.run(StepPlan((step_of("part", prompt, 20, 40, [1, 2, 3]),)))
    assert rest.sampled[0].token == result.sampled[1].token


def test_kv_alone_may_be_computed(tiny: Path, oracle: Oracle) -> None:
    bench = Bench(tiny, block_size=BLOCK)
    prompt = prompt_of(6, 50)
    assert bench.runner.run(StepPlan((step_of("warm", prompt, 0, 48, [0, 1, 2, 3], sample=False),))).sampled == ()
    after = bench.runner.run(StepPlan((step_of("warm", prompt, 48, 50, [0, 1, 2, 3]),)))
    assert [after.sampled[0].token] == oracle.greedy(prompt, 1)


def test_an_empty_plan_is_an_empty_result(tiny: Path) -> None:
    assert Bench(tiny).runner.run(StepPlan(())).sampled == ()


def test_sampling_in_the_runner_resumes_alike(tiny: Path) -> None:
    """Answer 6 tokens; or answer 3, then go on elsewhere from prompt + 3: the same 6."""
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=99, max_tokens=100)
    bench = Bench(tiny, block_size=BLOCK)

    def answer(tokens: list[int], prompt: int, count: int, table: list[int]) -> list[int]:
        start = 0
        for _ in range(count):
            step = step_of("r", tokens, start, len(tokens), table, sampling=sampling)
            sampled = bench.runner.run(StepPlan((replace(step, output_index=len(tokens) - prompt, prompt_tokens=prompt),))).sampled[
                0
            ]
            assert sampled.token is not None
            start = len(tokens)
            tokens = [*tokens, sampled.token]
        return tokens

    prompt = prompt_of(7, 30)
    whole = answer(prompt, 30, 6, [0, 1, 2])
    half = answer(prompt, 30, 3, [3, 4, 5])
    assert answer(half, 30, 3, [6, 7, 8]) == whole


# -- faults ----------------------------------------------------------------------------------------------------------


def by_name(sampled: tuple[Sampled, ...]) -> dict[str, Sampled]:
    return {s.request_id: s for s in sampled}


@pytest.mark.parametrize("backend", BACKENDS)
def test_poisoned_kv_fails_one_request(tiny: Path, oracle: Oracle, backend: str) -> None:
    bench = Bench(tiny, backend=backend, block_size=BLOCK)
    texts = [bench.text(f"r{i}", prompt_of(20 + i, 30)) for i in range(3)]
    for text in texts:
        bench.step([(text, 29)])
    bench.memory.tensor[texts[1].table[0], 0, 1, 1, 3] = math.nan
    found = by_name(tuple(bench.step([(t, 1) for t in texts])))
    assert isinstance(found["r1"].error, EngineFault)
    assert found["r1"].token is None
    for i in (0, 2):
        assert [found[f"r{i}"].token] == oracle.greedy(prompt_of(20 + i, 30), 1)


def test_ids_outside_the_vocabulary_fail_one_request(tiny: Path, oracle: Oracle) -> None:
    bench = Bench(tiny, block_size=BLOCK)
    good, bad = prompt_of(30, 20), [*prompt_of(31, 20), 2**32 - 1, 5]
    found = by_name(bench.runner.run(StepPlan((step_of("bad", bad, 0, 22, [0, 1]), step_of("good", good, 0, 20, [2, 3])))).sampled)
    assert isinstance(found["bad"].error, EngineFault)
    assert "outside the vocabulary of 260" in found["bad"].error.message
    assert [found["good"].token] == oracle.greedy(good, 1)
    # also when the id came in an earlier chunk, and when it is the one token of a step
    bench.runner.run(StepPlan((step_of("bad", bad, 0, 21, [0, 1], sample=False),)))
    assert isinstance(bench.runner.run(StepPlan((step_of("bad", [*bad, 7], 21, 23, [0, 1]),))).sampled[0].error, EngineFault)
    assert isinstance(bench.runner.run(StepPlan((step_of("bad", bad[:21], 20, 21, [0, 1]),))).sampled[0].error, EngineFault)


@pytest.mark.model
@pytest.mark.slow
def test_smollm2_equals_generate_over_chunked_prompts() -> None:
    folder = resolve("smollm2")
    bench, oracle = Bench(folder, backend="auto", block_size=64, blocks=12), Oracle(folder)
    for length in (1, 64, 200):
        prompt = torch.randint(0, 40_000, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        assert finish(bench, bench.text(f"r{length}", prompt), chunk=96) == oracle.greedy(prompt, ANSWER), length

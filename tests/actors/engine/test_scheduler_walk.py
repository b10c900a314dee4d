"""Seeded random walks through everything at once: tight pools, shared prefixes, fetches that miss, stall or poison, aborts at any
moment, faults, held blocks. `check()` after each step; at the end every answer is the oracle's and no block is missing."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from actors.engine.fakes import oracle
from actors.engine.interface import EngineRequest, FetchPlan
from actors.engine.plan import SequenceStep, StepPlan
from cpd_ray.config import EngineConfig
from cpd_ray.errors import EngineFault
from cpd_ray.ids import BlockId, RequestId
from cpd_ray.tokens import unpack
from cpd_ray.types import SamplingParams
from tests.actors.engine.rig import VOCAB, Rig


class Walk:
    """One engine and a random world around it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        size = self.rng.choice([1, 3, 4, 8])
        self.rig = Rig(
            blocks=self.rng.choice([14, 30, 80]),
            block_size=size,
            config=EngineConfig(
                step_tokens=self.rng.choice([16, 64]),
                chunk_tokens=self.rng.choice([size, 16]),
                max_running=self.rng.choice([2, 5, 20]),
                order=self.rng.choice(["shortest", "fcfs"]),
                aging_s=self.rng.choice([0.5, 10.0]),
            ),
        )
        self.rig.fetch_at_once = False
        self.rig.port.landing = self.landing
        self.rig.runner.fault = self.fault
        self.stems = [[self.rng.randrange(VOCAB) for _ in range(60)] for _ in range(3)]
        self.requests: dict[RequestId, EngineRequest] = {}
        self.aborted: set[RequestId] = set()
        self.moving: list[tuple[BlockId, ...]] = []
        self.serial = 0

    def landing(self, plan: FetchPlan) -> tuple[int | None, tuple[BlockId, ...]]:
        mine = [*plan.blocks, *([] if plan.tail_block is None else [plan.tail_block])]
        poisoned = tuple(b for b in mine if self.rng.random() < 0.3) if self.rng.random() < 0.3 else ()
        return self.rng.choice([None, None, 0, 1, 2]), poisoned

    def fault(self, step: SequenceStep) -> EngineFault | None:
        return EngineFault("NaN") if self.rng.random() < 0.01 else None

    def add(self) -> None:
        rng, rig = self.rng, self.rig
        self.serial += 1
        name = RequestId(f"r{self.serial}")
        new = rng.choice([1, 2, 5, 20] if rig.blocks * rig.block_size > 20 else [1, 2, 5])
        longest = min(60, rig.blocks * rig.block_size + 1 - new)
        tokens = rng.choice(self.stems)[: rng.randint(1, longest)]
        tokens = [*tokens[:-1], rng.randrange(VOCAB)] if rng.random() < 0.5 else tokens
        sampling = SamplingParams(max_tokens=new, temperature=0, seed=rng.randrange(3))
        more = {"sampling": sampling, "may_fetch_blocks": rng.choice([0, 3, 99]), "hold": rng.random() < 0.2}
        more["priority"] = rng.choice([0, 0, 1])
        more["sample"] = rng.random() < 0.9
        if rng.random() < 0.2 and len(tokens) > 1:
            more |= {"fetch_tail": True, "prompt_tokens": len(tokens) - 1}
            rig.port.tails[name] = self.true_tail(tokens)
        self.requests[name] = rig.add(name, tokens, new, **more)

    def true_tail(self, tokens: Sequence[int]) -> list[int | None]:
        """What a prefill worker's last block would hold."""
        size = self.rig.block_size
        other = Rig(blocks=200, block_size=size)
        other.add("it", tokens[:-1], 1, hold=True)
        other.run()
        return other.runner.memory[other.last("it").held_blocks[-1]]

    def abort(self) -> None:
        name = self.rng.choice(self.rig.scheduler.live)
        output = self.rig.scheduler.abort(name)
        assert output is not None
        self.aborted.add(name)
        self.rig.outputs[name].append(output)
        self.rig.scheduler.check()

    def land(self) -> None:
        plan = self.rng.choice(self.rig.fetches)
        self.rig.fetches.remove(plan)
        result = self.rig.port.deliver(plan)
        blocks = result.poisoned
        self.moving.append(blocks)
        self.rig.pool.quarantine(blocks, lambda: blocks not in self.moving)
        self.rig.scheduler.fetched(plan, result)
        self.rig.scheduler.check()

    def settle(self) -> None:
        blocks = self.moving.pop(self.rng.randrange(len(self.moving)))
        for block in blocks:
            self.rig.runner.memory[block] = [self.rng.randrange(VOCAB) for _ in range(self.rig.block_size)]

    def step(self) -> None:
        plan = self.rig.schedule()
        if plan is None:
            self.rig.clock.advance(0.01)
            return
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            self.disturb()
        if self.rng.random() < 0.01:
            self.crash(plan)
        else:
            self.rig.finish(plan)

    def crash(self, plan: StepPlan) -> None:
        for output in self.rig.scheduler.fail(plan, EngineFault("step")):
            self.rig.outputs[output.request_id].append(output)
        self.rig.scheduler.check()

    def disturb(self) -> None:
        """Something that may happen while a step is running."""
        if self.rng.random() < 0.5:
            self.add()
        if self.rng.random() < 0.15 and self.rig.scheduler.live:
            self.abort()
        if self.rng.random() < 0.5 and self.rig.fetches:
            self.land()
        if self.rng.random() < 0.7:
            self.rig.fetches += self.rig.scheduler.fetch_beside()
            self.rig.scheduler.check()

    def run(self, steps: int) -> None:
        for _ in range(steps):
            if len(self.rig.scheduler.live) < 12:
                self.disturb()
            elif self.rig.fetches:
                self.land()
            if self.moving and self.rng.random() < 0.3:
                self.settle()
            self.step()
            self.take_ends()
        for _ in range(5000):
            while self.rig.fetches:
                self.land()
            while self.moving:
                self.settle()
            if self.rig.scheduler.idle:
                return
            if plan := self.rig.schedule():
                self.rig.finish(plan)
            self.take_ends()
        raise AssertionError(f"requests that never end: {self.rig.scheduler.live}")

    def take_ends(self) -> None:
        """Judge what has ended, and give its held blocks back."""
        for name in [name for name in self.rig.outputs if self.ended(name)]:
            blocks = self.rig.outputs[name][-1].held_blocks
            if blocks:
                self.check_held(name, blocks)
                self.rig.pool.release(blocks)
            self.judge(name)
            del self.rig.outputs[name]

    def ended(self, name: RequestId) -> bool:
        return any(o.finish_reason is not None or o.error is not None for o in self.rig.outputs[name])

    def check_held(self, name: RequestId, blocks: tuple[BlockId, ...]) -> None:
        request = self.requests[name]
        answered = sum(len(output.tokens) for output in self.rig.outputs[name])
        self.rig.runner.entries(blocks, len(unpack(request.tokens)) + max(0, answered - 1))

    def judge(self, name: RequestId) -> None:
        """It ended once, and with the right tokens."""
        outputs = self.rig.outputs[name]
        ends = [o for o in outputs if o.finish_reason is not None or o.error is not None]
        assert ends == [outputs[-1]], "exactly one end"
        request = self.requests[name]
        tokens = list(unpack(request.tokens))
        answer = [token for output in outputs for token in output.tokens]
        wanted = oracle(
            tokens,
            request.max_new_tokens,
            VOCAB,
            seed=request.sampling.seed or 0,
            answered=len(tokens) - request.prompt_tokens,
        )
        whole = outputs[-1].error is None and name not in self.aborted
        assert answer == (wanted[: len(answer)] if not whole else wanted if request.sample else [])
        counted = [o.cached for o in outputs if o.cached is not None]
        assert len(counted) == 1, "cached tokens are told exactly once"
        assert counted[0].total < len(tokens)
        if whole:
            assert outputs[-1].computed_tokens >= len(tokens) - counted[0].total


@pytest.mark.parametrize("seed", range(40))
def test_a_random_walk_ends_with_right_answers_and_every_block_back(seed: int) -> None:
    walk = Walk(seed)
    walk.run(120)
    assert walk.serial > 20
    walk.rig.assert_nothing_held()
    walk.rig.pool.sweep()
    assert walk.rig.pool.counts().quarantined == 0
    walk.rig.pool.clear()
    assert walk.rig.pool.counts().free == walk.rig.blocks

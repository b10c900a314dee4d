"""A scheduler, a fake model and a fake slab driven step by step under a manual clock: the engine without its event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.fakes import FAKE_COST, FakePort, FakeRunner, oracle
from actors.engine.interface import EngineOutput, EngineRequest, FetchPlan, FetchResult
from actors.engine.plan import StepPlan
from actors.engine.scheduler import Scheduler
from actors.engine.validation import EngineShape
from cpd_ray.clock import ManualClock
from cpd_ray.config import EngineConfig
from cpd_ray.ids import BlockKey, RequestId
from cpd_ray.messages import StepCost
from cpd_ray.tokens import pack
from cpd_ray.types import SamplingParams
from kv.keys import block_keys, root_key
from kv.pool import BlockPool

VOCAB = 1000
TOKEN_BOUND = StepCost(base_s=1e-4, per_token_s=1e-4, per_attention_s=1e-9, per_sequence_s=1e-5)
"""A machine on which a chunk's tokens cost far more than the step around them, as on a CPU."""
ROOT = root_key(model="fake", revision=None, dtype="none", block_size=4)


@dataclass(frozen=True, slots=True)
class KnownCost:
    """A cost model that has nothing to learn."""

    cost: StepCost

    def observe(self, new_tokens: int, attention: float, sequences: int, seconds: float) -> None:
        assert seconds > 0


@dataclass
class Rig:
    """`take` a request, `step` until done. Every step checks all invariants."""

    blocks: int = 64
    block_size: int = 4
    config: EngineConfig = field(default_factory=lambda: EngineConfig(step_tokens=64, chunk_tokens=16))
    eos: frozenset[int] = frozenset()
    max_model_len: int = 4096
    cost: StepCost = FAKE_COST
    checks: bool = True

    def __post_init__(self) -> None:
        self.clock = ManualClock()
        self.pool = BlockPool(self.blocks, clock=self.clock)
        self.runner = FakeRunner(self.blocks, self.block_size, VOCAB, clock=self.clock, cost=self.cost)
        self.port = FakePort(self.runner)
        shape = EngineShape(self.block_size, VOCAB, self.max_model_len, self.eos)
        self.scheduler = Scheduler(self.pool, shape, self.config, self.clock, KnownCost(self.cost), self.port.committed)
        self.outputs: dict[RequestId, list[EngineOutput]] = {}
        self.fetches: list[FetchPlan] = []
        self.plans: list[StepPlan] = []
        self.fetch_at_once = True

    def check(self) -> None:
        if self.checks:
            self.scheduler.check()

    def request(self, name: str, tokens: Sequence[int], new_tokens: int = 4, **more: object) -> EngineRequest:
        packed = pack(tokens)
        sampling = more.pop("sampling", SamplingParams(max_tokens=max(new_tokens, 1), temperature=0))
        arguments: dict[str, object] = {
            "request_id": RequestId(name),
            "tokens": packed,
            "prompt_tokens": len(tokens),
            "root": ROOT,
            "keys": tuple(block_keys(ROOT, packed, self.block_size)),
            "sampling": sampling,
            "max_new_tokens": new_tokens,
        }
        return EngineRequest(**(arguments | more))  # type: ignore[arg-type]

    def add(self, name: str, tokens: Sequence[int], new_tokens: int = 4, **more: object) -> EngineRequest:
        request = self.request(name, tokens, new_tokens, **more)
        self.scheduler.add(request)
        self.outputs[request.request_id] = []
        self.check()
        return request

    def schedule(self) -> StepPlan | None:
        scheduled = self.scheduler.schedule()
        self.fetches += scheduled.fetches
        self.check()
        return scheduled.step

    def finish(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        for output in self.scheduler.complete(plan, self.runner.run(plan)):
            self.outputs[output.request_id].append(output)
        self.check()

    def land(self, plan: FetchPlan) -> FetchResult:
        self.fetches.remove(plan)
        result = self.port.deliver(plan)
        if result.poisoned:
            self.pool.quarantine(result.poisoned, lambda: False)
        self.scheduler.fetched(plan, result)
        self.check()
        return result

    def step(self) -> StepPlan | None:
        """One pass: land the fetches begun before, schedule, run."""
        if self.fetch_at_once:
            for plan in list(self.fetches):
                self.land(plan)
        plan = self.schedule()
        if plan is not None:
            self.finish(plan)
        elif not self.fetches:
            self.clock.advance(0.01)
        return plan

    def run(self, until: Callable[[], bool] | None = None, most: int = 10_000) -> None:
        """Step until nothing lives, or `until` holds."""
        for _ in range(most):
            if self.scheduler.idle if until is None else until():
                return
            self.step()
        raise AssertionError(f"not done after {most} steps: {self.scheduler.live} live")

    def answer(self, name: str) -> list[int]:
        return [token for output in self.outputs[RequestId(name)] for token in output.tokens]

    def last(self, name: str) -> EngineOutput:
        return self.outputs[RequestId(name)][-1]

    def first(self, name: str) -> EngineOutput:
        return self.outputs[RequestId(name)][0]

    def expect(self, tokens: Sequence[int], new_tokens: int, **more: int) -> list[int]:
        return oracle(tokens, new_tokens, VOCAB, **more)

    def keys(self, tokens: Sequence[int]) -> list[BlockKey]:
        return block_keys(ROOT, pack(tokens), self.block_size)

    def assert_nothing_held(self) -> None:
        counts = self.pool.counts()
        assert counts.active == counts.leased == 0, counts
        assert self.scheduler.idle

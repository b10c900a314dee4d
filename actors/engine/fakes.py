"""A model and a lower tier that keep no tensors, for tests, the contract suites and the engine's own benchmark.

They stand for `StepRunner` and `KvPort` and keep their promises. Invariant: `FakeRunner`'s next token depends on every KV entry that
its block table leads to, so an answer equals `oracle` exactly when each step read the right KV, wherever it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.engine.interface import FetchPlan, FetchResult
from actors.engine.plan import Sampled, SequenceStep, StepPlan, StepResult
from cpd_ray.clock import ManualClock
from cpd_ray.errors import EngineFault
from cpd_ray.ids import BlockId, BlockKey
from cpd_ray.messages import StepCost
from cpd_ray.types import Tier

FAKE_COST = StepCost(base_s=1e-3, per_token_s=1e-5, per_attention_s=1e-9, per_sequence_s=1e-5)
_PRIME = (1 << 61) - 1


def _entry(before: int, token: int) -> int:
    """The KV of `token` after a prefix whose last KV is `before`."""
    return (before * 6364136223846793005 + token * 1442695040888963407 + 1013904223) % _PRIME


def _choose(entries: Sequence[int], seed: int, output_index: int, vocab_size: int) -> int:
    """A token from all KV before it, the seed and the position."""
    digest = sum(entry * (place + 1) for place, entry in enumerate(entries))
    return _entry(_entry(digest, seed), output_index) % vocab_size


def oracle(prompt: Sequence[int], new_tokens: int, vocab_size: int, *, seed: int = 0, answered: int = 0) -> list[int]:
    """The answer of a `FakeRunner` that computes everything in one piece; the last `answered` tokens of `prompt` are answer already."""
    entries: list[int] = []
    for token in prompt:
        entries.append(_entry(entries[-1] if entries else 0, token))
    answer: list[int] = []
    for index in range(answered, answered + new_tokens):
        answer.append(_choose(entries, seed, index, vocab_size))
        entries.append(_entry(entries[-1], answer[-1]))
    return answer


@dataclass(slots=True)
class FakeRunner:
    """A pool of KV entries, one a token place. `clock` advances by what `cost` predicts for each step. `fault(step)` may return an
    error for one sequence; `crash(plan)` may raise for the whole step."""

    total_blocks: int
    block_size: int
    vocab_size: int
    clock: ManualClock | None = None
    cost: StepCost = FAKE_COST
    fault: Callable[[SequenceStep], EngineFault | None] = lambda step: None
    crash: Callable[[StepPlan], None] = lambda plan: None
    memory: list[list[int | None]] = field(init=False)

    def __post_init__(self) -> None:
        self.memory = [[None] * self.block_size for _ in range(self.total_blocks)]

    def run(self, plan: StepPlan) -> StepResult:
        self.crash(plan)
        self._check(plan)
        for step in plan.sequences:
            self._write(step)
        sampled = tuple(self._sample(step) for step in plan.sequences if step.sample)
        seconds = self.cost.predict_s(plan.new_tokens, plan.attention, len(plan.sequences))
        if self.clock is not None:
            self.clock.advance(seconds)
        return StepResult(sampled, seconds)

    def entries(self, block_table: Sequence[BlockId], stop: int) -> list[int]:
        """The KV of tokens [0, stop); asserts that all of it was written."""
        found = []
        for place in range(stop):
            entry = self.memory[block_table[place // self.block_size]][place % self.block_size]
            assert entry is not None, f"token {place}'s KV is read and was never written"
            found.append(entry)
        return found

    def _check(self, plan: StepPlan) -> None:
        assert plan.sequences, "an empty step"
        decodes = [len(step.tokens) == 1 and step.start + 1 == len(step.history) for step in plan.sequences]
        assert decodes == sorted(decodes, reverse=True), "decodes do not come first"
        written = [(step.block_table[t // self.block_size], t % self.block_size) for step in plan.sequences for t in _places(step)]
        assert len(written) == len(set(written)), "two sequences write to one place"

    def _write(self, step: SequenceStep) -> None:
        assert step.tokens, f"{step.request_id} computes nothing"
        assert list(step.history[step.start : step.start + len(step.tokens)]) == list(step.tokens), "tokens and history disagree"
        before = self.entries(step.block_table, step.start)[-1] if step.start else 0
        for place, token in zip(_places(step), step.tokens, strict=True):
            before = _entry(before, token)
            self.memory[step.block_table[place // self.block_size]][place % self.block_size] = before

    def _sample(self, step: SequenceStep) -> Sampled:
        if error := self.fault(step):
            return Sampled(step.request_id, None, error=error)
        entries = self.entries(step.block_table, len(step.history))
        return Sampled(step.request_id, _choose(entries, step.sampling.seed or 0, step.output_index, self.vocab_size))


def _places(step: SequenceStep) -> range:
    return range(step.start, step.start + len(step.tokens))


@dataclass(slots=True)
class FakePort:
    """A slab without limits beside a `FakeRunner`'s pool. `landing(plan)` says how a fetch ends: how many leading blocks it may bring at most
    (None: all that are stored) and which of its blocks stay poisoned. `before` is awaited first: the transfer's time."""

    runner: FakeRunner
    tier: Tier = Tier.NODE
    landing: Callable[[FetchPlan], tuple[int | None, tuple[BlockId, ...]]] = lambda plan: (None, ())
    stored: dict[BlockKey, list[int | None]] = field(default_factory=dict)
    parents: dict[BlockKey, BlockKey | None] = field(default_factory=dict)
    tails: dict[str, list[int | None]] = field(default_factory=dict)

    async def fetch(self, plan: FetchPlan) -> FetchResult:
        return self.deliver(plan)

    def deliver(self, plan: FetchPlan) -> FetchResult:
        """What `fetch` does, at once; the caller quarantines what is poisoned, as the engine's port does before it returns."""
        most, poisoned = self.landing(plan)
        landed = 0
        for block, key in zip(plan.blocks, plan.keys, strict=True):
            if key not in self.stored or block in poisoned or (most is not None and landed >= most):
                break
            self.runner.memory[block] = list(self.stored[key])
            landed += 1
        tail = plan.request_id in self.tails and plan.tail_block is not None and plan.tail_block not in poisoned
        if tail and plan.tail_block is not None:
            self.runner.memory[plan.tail_block] = list(self.tails[plan.request_id])
        return FetchResult((self.tier.value,) * landed, tail and landed == len(plan.blocks), poisoned)

    def committed(self, parent: BlockKey | None, keys: Sequence[BlockKey], blocks: Sequence[BlockId]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            entries = list(self.runner.memory[block])
            assert None not in entries, "a block is committed that was not written whole"
            assert self.stored.setdefault(key, entries) == entries, "one key, two contents"
            self.parents[key] = parent
            parent = key

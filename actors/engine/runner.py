"""Runs a step plan on the model: tokens in, sampled tokens out, KV written to the pool on the way.

Owns the step's execution; decides nothing about who runs. Invariant: one sequence's fault is that sequence's error alone.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from actors.engine.attention.base import AttentionBackend
from actors.engine.batch import build_batch
from actors.engine.kv_memory import KvMemory
from actors.engine.loading import BACKEND_ARGUMENT, LoadedModel
from actors.engine.plan import Sampled, SequenceStep, StepPlan, StepResult
from actors.engine.sampler import Sampler
from cpd_ray.errors import EngineFault


class TorchRunner:
    """Implements `actors.engine.plan.StepRunner`."""

    def __init__(self, loaded: LoadedModel, memory: KvMemory, backend: AttentionBackend, sampler: Sampler) -> None:
        self._loaded = loaded
        self._memory = memory
        self._backend = backend
        self._sampler = sampler
        self._vocab_size = loaded.facts.vocab_size

    def run(self, plan: StepPlan) -> StepResult:
        """See `StepRunner`. An empty plan is an empty result."""
        began = time.perf_counter()
        if not plan.sequences:
            return StepResult((), 0.0)
        with torch.inference_mode():
            logits = self.logits(plan)
            sampled = self._sample([s for s in plan.sequences if s.sample], logits)
        return StepResult(sampled, time.perf_counter() - began)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's KV; returns `[sampled sequences, vocabulary]` in the model's dtype."""
        self._check(plan)
        batch = build_batch(plan, self._memory.shape.block_size, self._loaded.device)
        tokens = batch.tokens.clamp(max=self._vocab_size - 1)
        self._backend.prepare(batch)
        model = self._loaded.model
        hidden = model.model(
            input_ids=tokens[None], position_ids=batch.positions[None], use_cache=False, **{BACKEND_ARGUMENT: self._backend}
        ).last_hidden_state
        return model.lm_head(hidden[0, batch.sample_rows])

    def _check(self, plan: StepPlan) -> None:
        """A plan that breaks its contract is our bug: it would write into other requests' blocks."""
        block_size, blocks = self._memory.shape.block_size, self._memory.blocks
        for s in plan.sequences:
            end = s.start + len(s.tokens)
            assert len(s.tokens) and len(s.block_table) * block_size >= end, f"{s.request_id}: block table ends before token {end}"
            assert min(s.block_table) >= 0 and max(s.block_table) < blocks, f"{s.request_id}: block outside the pool"

    def _sample(self, sequences: list[SequenceStep], logits: torch.Tensor) -> tuple[Sampled, ...]:
        if not sequences:
            return ()
        drawn = self._sampler.sample(sequences, logits)
        return tuple(self._checked(s, d) for s, d in zip(sequences, drawn, strict=True))

    def _checked(self, step: SequenceStep, drawn: Sampled) -> Sampled:
        known = step.tokens if len(step.tokens) == 1 and step.start else step.history
        if int(np.frombuffer(known, np.uint32).max()) >= self._vocab_size:
            error = EngineFault(f"the prompt holds a token id outside the vocabulary of {self._vocab_size}")
            return Sampled(step.request_id, None, error=error)
        return drawn

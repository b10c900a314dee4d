"""Runs a step plan on the model: tokens in, sampled tokens out, KV written to the pool on the way.

Owns the step's execution; decides nothing about who runs. Invariant: one sequence's fault is that sequence's error alone.
"""

from __future__ import annotations

import time

import numpy as np
import torch

from actors.engine.attention.base import AttentionBackend
from actors.engine.batch import build_batch
from actors.engine.decoder import Decoder
from actors.engine.kv_memory import KvMemory
from actors.engine.plan import Sampled, SequenceStep, StepPlan, StepResult
from actors.engine.sampler import Sampler
from cpd_ray.errors import EngineFault


class TorchRunner:
    """Implements `actors.engine.plan.StepRunner`."""

    def __init__(self, decoder: Decoder, memory: KvMemory, backend: AttentionBackend, sampler: Sampler) -> None:
        self._decoder = decoder
        self._memory = memory
        self._backend = backend
        self._sampler = sampler

    def run(self, plan: StepPlan) -> StepResult:
        """See `StepRunner`. An empty plan is an empty result."""
        began = time.perf_counter()
        if not plan.sequences:
            return StepResult((), 0.0)
        with torch.inference_mode():
            sampled = self._sample([s for s in plan.sequences if s.sample], self.logits(plan))
        return StepResult(sampled, time.perf_counter() - began)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Compute the plan's KV; returns `[sampled sequences, vocabulary]` in the model's dtype."""
        batch = build_batch(plan, self._memory, vocab_size=self._sampler.vocab_size)
        self._backend.prepare(batch)
        return self._decoder.logits(batch, self._backend)

    def _sample(self, sequences: list[SequenceStep], logits: torch.Tensor) -> tuple[Sampled, ...]:
        if not sequences:
            return ()
        drawn = self._sampler.sample(sequences, logits)
        return tuple(self._checked(s, d) for s, d in zip(sequences, drawn, strict=True))

    def _checked(self, step: SequenceStep, drawn: Sampled) -> Sampled:
        known = step.tokens if len(step.tokens) == 1 and step.start else step.history
        if int(np.frombuffer(known, np.uint32).max()) >= self._sampler.vocab_size:
            error = EngineFault(f"the prompt holds a token id outside the vocabulary of {self._sampler.vocab_size}")
            return Sampled(step.request_id, None, error=error)
        return drawn

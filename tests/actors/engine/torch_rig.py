"""What the tests of the torch half share: plans built by hand, a driver that runs prompts through a runner, the stock model as oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from actors.engine.attention.choose import choose_backend
from actors.engine.decoder import Decoder, LayerOps, LeanDecoder
from actors.engine.kv_memory import KvMemory
from actors.engine.loading import LoadedModel, load_model
from actors.engine.plan import Sampled, SequenceStep, StepPlan
from actors.engine.runner import TorchRunner
from actors.engine.sampler import Sampler
from actors.models.store import default_cache_dir
from cpd_ray.ids import BlockId, RequestId
from cpd_ray.types import SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=1000)
KERNELS = default_cache_dir(os.environ)
BACKENDS = ("sdpa", "cpu_paged")


def ids_view(ids: Sequence[int]) -> memoryview:
    return memoryview(np.array(ids, dtype=np.uint32))


def step_of(
    name: str,
    tokens: Sequence[int],
    start: int,
    end: int,
    table: Sequence[int],
    *,
    sample: bool = True,
    sampling: SamplingParams = GREEDY,
) -> SequenceStep:
    """Compute `tokens[start:end]`; all of `tokens` are the prompt."""
    history = ids_view(tokens)
    blocks = [BlockId(b) for b in table]
    return SequenceStep(RequestId(name), start, history[start:end], blocks, sample, sampling, 0, history, len(tokens))


@dataclass
class Text:
    """One request: its tokens so far, how many of them have KV, and where."""

    name: str
    tokens: list[int]
    table: list[int]
    computed: int = 0
    prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt :]


class Bench:
    """A model, a pool full of NaN, and a runner over them."""

    def __init__(
        self,
        folder: Path,
        *,
        backend: str = "sdpa",
        block_size: int = 16,
        blocks: int = 128,
        dtype: str = "float32",
        decoder: Callable[[LoadedModel, LayerOps], Decoder] = LeanDecoder,
    ) -> None:
        self.loaded = load_model(folder, dtype=dtype)
        self.memory = KvMemory(self.loaded.kv_shape(block_size), blocks)
        self.memory.tensor.fill_(float("nan"))
        attention, ops = choose_backend(backend, self.memory, self.loaded.facts.query_heads, KERNELS)
        sampler = Sampler(self.loaded.facts.vocab_size, self.loaded.facts.eos_token_ids)
        self.runner = TorchRunner(decoder(self.loaded, ops), self.memory, attention, sampler)
        self.block_size = block_size
        self.free = list(np.random.default_rng(7).permutation(blocks))

    def text(self, name: str, tokens: Sequence[int], room: int = 32) -> Text:
        """A request with blocks for its prompt and `room` more tokens."""
        return Text(name, list(tokens), [int(self.free.pop()) for _ in range(-(-(len(tokens) + room) // self.block_size))])

    def step(self, parts: Sequence[tuple[Text, int]]) -> list[Sampled]:
        """Compute so many more tokens of each; whoever has all computed gets a token. Decodes must come first."""
        steps = []
        for text, count in parts:
            history = ids_view(text.tokens)
            end = text.computed + count
            steps.append(
                SequenceStep(
                    RequestId(text.name), text.computed, history[text.computed : end], [BlockId(b) for b in text.table],
                    end == len(text.tokens), GREEDY, len(text.answer), history, text.prompt,
                )
            )  # fmt: skip
        sampled = list(self.runner.run(StepPlan(tuple(steps))).sampled)
        answers = iter(sampled)
        for text, count in parts:
            text.computed += count
            if text.computed == len(text.tokens):
                answer = next(answers)
                assert answer.request_id == text.name
                if answer.token is not None:
                    text.tokens.append(answer.token)
        return sampled


class Oracle:
    """The stock model, one request at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Exactly `count` greedy tokens, end tokens included."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=None, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """`[tokens, vocabulary]`."""
        with torch.inference_mode():
            return self.model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0]

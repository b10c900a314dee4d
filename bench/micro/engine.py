"""How fast the engine is beside the stock model: prefill, decode, the price of everything around the model.

Run it as a program for a table and one JSON line, or call `measure`. SmolLM2 in bf16, two threads, a fixed seed; what is compared takes
turns, so that a busy machine slows both. Invariant: each figure is measured on the production classes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# an idle OpenMP thread that spins takes the core from the one it waits for; read when torch is loaded
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList

from actors.engine.assemble import TorchParts
from actors.engine.attention.choose import choose_backend
from actors.engine.decoder import LeanDecoder
from actors.engine.kv_memory import KvMemory
from actors.engine.loading import load_model
from actors.engine.plan import SequenceStep, StepPlan
from actors.engine.runner import TorchRunner
from actors.engine.sampler import Sampler
from actors.models.resolve import resolve
from actors.models.store import default_cache_dir
from bench.micro import engine_loop
from cpd_ray import tokens as token_buffers
from cpd_ray.ids import BlockId, RequestId
from cpd_ray.types import SamplingParams

SEED = 20
DTYPE, THREADS, BLOCK = "bfloat16", 2, 64
CONTEXT = 512
CHUNK = 512
BATCHES = (1, 4, 8, 16)
POOL_TOKENS = 24 * 1024
GREEDY = SamplingParams(temperature=0, max_tokens=1000)


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure (a path into the result), the most (or, with `least`, the least) it may be."""

    path: tuple[str, ...]
    limit: float
    least: bool = False

    def line(self, figures: dict[str, Any]) -> str:
        figure: Any = figures
        for key in self.path:
            figure = figure[key]
        met = figure >= self.limit if self.least else figure <= self.limit
        return f"{' '.join(self.path):<32}{figure:>10.3f}  {'>=' if self.least else '<='} {self.limit:>6.2f}   {'ok' if met else 'MISSED'}"


LIMITS = (
    Limit(("prefill_vs_transformers_2048",), 0.97, least=True),
    Limit(("prefill_vs_transformers_4096",), 0.97, least=True),
    Limit(("decode_ms", "16"), 80.0),
    Limit(("decode_vs_generate", "1"), 1.5, least=True),
    Limit(("decode_vs_generate", "16"), 2.0, least=True),
    Limit(("decode_16_over_1",), 2.2),
    Limit(("warm_over_decode_step",), 3.0),
    Limit(("step_overhead_share",), 0.10),
    Limit(("step_overhead_share_greedy",), 0.05),
    Limit(("warm_wait_chunks",), 1.2),
    Limit(("ttft_prediction_error",), 0.20),
)


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Wall time; or, for a machine that others keep busy, this process's CPU time (then with one thread)."""

    now_s: Callable[[], float] = time.perf_counter

    def seconds(self, call: Callable[[], object]) -> float:
        began_s = self.now_s()
        call()
        return self.now_s() - began_s


def random_tokens(count: int, seed: int) -> memoryview:
    return token_buffers.unpack(token_buffers.pack(np.random.default_rng(seed).integers(3, 250, count).tolist()))


def decode_plan(batch: int, context: int) -> StepPlan:
    """`batch` sequences with `context` tokens of KV, one new token each."""
    history = random_tokens(context + 1, SEED)
    each = -(-(context + 1) // BLOCK)
    return StepPlan(
        tuple(
            SequenceStep(
                RequestId(f"r{i}"), context, history[context:], [BlockId(b) for b in range(i * each, (i + 1) * each)], True, GREEDY, 0,
                history, context,
            )
            for i in range(batch)
        )
    )  # fmt: skip


def prefill(parts: TorchParts, tokens: memoryview) -> None:
    """The prompt in chunks, and its first token."""
    table = [BlockId(b) for b in range(-(-len(tokens) // BLOCK))]
    for start in range(0, len(tokens), CHUNK):
        end = min(start + CHUNK, len(tokens))
        step = SequenceStep(RequestId("p"), start, tokens[start:end], table, end == len(tokens), GREEDY, 0, tokens, len(tokens))
        parts.runner.run(StepPlan((step,)))


def measure_prefill(watch: Stopwatch, parts: TorchParts, stock: Any, length: int, repeats: int) -> float:
    """Our speed over that of one whole forward of the stock model: median of ratios, turn by turn."""
    tokens = random_tokens(length, SEED)
    ids = torch.from_numpy(np.frombuffer(tokens, np.uint32).astype(np.int64))[None]

    @torch.inference_mode()
    def whole() -> None:
        stock(input_ids=ids, use_cache=False, logits_to_keep=1)

    prefill(parts, tokens)
    return statistics.median(watch.seconds(whole) / watch.seconds(lambda: prefill(parts, tokens)) for _ in range(repeats))


def measure_decode(watch: Stopwatch, parts: TorchParts, repeats: int) -> dict[int, float]:
    """Median seconds of a greedy step for each batch size, the sizes taking turns."""
    plans = {batch: decode_plan(batch, CONTEXT) for batch in BATCHES}
    durations: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for turn in range(repeats + 2):
        for batch, plan in plans.items():
            seconds = watch.seconds(lambda plan=plan: parts.runner.run(plan))  # type: ignore[misc]
            if turn >= 2:
                durations[batch].append(seconds)
    return {batch: statistics.median(of) for batch, of in durations.items()}


class Turns(StoppingCriteria):
    """Asked by `generate` after each of its steps: notes how long that took, then lets ours have a turn."""

    def __init__(self, watch: Stopwatch, ours: Callable[[], object]) -> None:
        self._watch = watch
        self._ours = ours
        self._resumed_s: float | None = None
        self.ratios: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        now_s = self._watch.now_s()
        ours_s = self._watch.seconds(self._ours)
        if self._resumed_s is not None:
            self.ratios.append((now_s - self._resumed_s) / ours_s)
        self._resumed_s = self._watch.now_s()
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def measure_against_generate(watch: Stopwatch, parts: TorchParts, stock: Any, batch: int, tokens: int) -> float:
    """Our decode speed over `generate`'s, both with CONTEXT tokens of context, step by step in turns."""
    ids = torch.from_numpy(np.frombuffer(random_tokens(CONTEXT, SEED), np.uint32).astype(np.int64)).repeat(batch, 1)
    plan = decode_plan(batch, CONTEXT)
    parts.runner.run(plan)
    turns = Turns(watch, lambda: parts.runner.run(plan))
    with torch.inference_mode():
        stock.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([turns]),
        )  # fmt: skip
    return statistics.median(turns.ratios[1:])


def timed_parts(folder: Path, threads: int) -> tuple[TorchParts, engine_loop.TimedDecoder]:
    """What `assemble` puts together, with a decoder that keeps its times."""
    torch.set_num_threads(threads)
    loaded = load_model(folder, dtype=DTYPE)
    memory = KvMemory(loaded.kv_shape(BLOCK), POOL_TOKENS // BLOCK)
    backend, ops = choose_backend("auto", memory, loaded.facts.query_heads, default_cache_dir(os.environ))
    decoder = engine_loop.TimedDecoder(LeanDecoder(loaded, ops))
    sampler = Sampler(loaded.facts.vocab_size, loaded.facts.eos_token_ids)
    return TorchParts(TorchRunner(decoder, memory, backend, sampler), memory, loaded.facts), decoder


def measure(model: str = "smollm2", *, repeats: int = 15, threads: int = THREADS, watch: Stopwatch | None = None) -> dict[str, Any]:
    """The figures of `LIMITS`, but for the loop's when `watch` is not the wall clock. `repeats`: turns of a decode measurement; prefills
    take fewer."""
    folder, watch = resolve(model), watch or Stopwatch()
    parts, decoder = timed_parts(folder, threads)
    parts.memory.tensor.normal_()
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, DTYPE), attn_implementation="sdpa").eval()
    decode_s = measure_decode(watch, parts, repeats)
    figures: dict[str, Any] = {
        "prefill_vs_transformers_2048": measure_prefill(watch, parts, stock, 2048, max(2, repeats // 4)),
        "prefill_vs_transformers_4096": measure_prefill(watch, parts, stock, 4096, max(2, repeats // 5)),
        "decode_ms": {str(batch): 1e3 * seconds for batch, seconds in decode_s.items()},
        "decode_vs_generate": {str(batch): measure_against_generate(watch, parts, stock, batch, repeats) for batch in (1, 4, 16)},
        "decode_16_over_1": decode_s[16] / decode_s[1],
    }
    del stock
    if watch != Stopwatch():
        return figures
    return figures | asyncio.run(engine_loop.measure(parts, decoder, BLOCK, answer_tokens=4 * repeats))


def environment() -> dict[str, str | int]:
    """What a figure depends on besides the code."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {
        "seed": SEED,
        "commit": commit.stdout.strip() or "unknown",
        "dtype": DTYPE,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }


def rounded(value: Any) -> Any:
    return {k: rounded(v) for k, v in value.items()} if isinstance(value, dict) else round(value, 4)


def main() -> None:
    """Print a table, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeats", type=int, default=15, help="turns of a decode measurement")
    parser.add_argument("--cpu-time", action="store_true", help="one thread, its CPU time: ratios that a busy machine leaves alone")
    options = parser.parse_args()
    if options.cpu_time:
        figures = measure(repeats=options.repeats, threads=1, watch=Stopwatch(time.process_time))
    else:
        figures = measure(repeats=options.repeats)
    for limit in LIMITS:
        if limit.path[0] in figures:
            print(limit.line(figures))
    threads = 1 if options.cpu_time else THREADS
    print(json.dumps({"engine": rounded(figures), "threads": threads, "cpu_time": options.cpu_time, **environment()}))


if __name__ == "__main__":
    main()

"""One contract for every attention backend, checked against attention worked out row by row in float64."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from actors.engine.attention.base import AttentionBackend
from actors.engine.attention.choose import BACKENDS as NAMES
from actors.engine.attention.choose import choose_backend
from actors.engine.attention.cpu_paged import CpuPagedBackend
from actors.engine.attention.flash import (
    FLASH_NAMES,
    FlashBackend,
    PagedLengths,
    fa4_kernel,
    flash_attn_kernel,
    paged_lengths,
    varlen_attn_kernel,
)
from actors.engine.attention.sdpa import SdpaBackend
from actors.engine.batch import StepBatch, build_batch
from actors.engine.decoder import TorchOps
from actors.engine.kv_memory import KvMemory, KvShape
from actors.engine.native.build import NativeUnavailable, load_library
from actors.engine.native.ops import NativeOps, PagedKernels
from actors.engine.plan import SequenceStep, StepPlan
from cpd_ray.errors import ConfigError
from tests.actors.engine.torch_rig import BACKENDS as CPU_BACKENDS
from tests.actors.engine.torch_rig import KERNELS, step_of

BACKENDS = (*CPU_BACKENDS, "flash")

BLOCKS = 192
SCALE = 0.3
HEADS = ((4, 2, 16), (9, 3, 64), (8, 1, 128), (6, 6, 24), (12, 1, 80), (2, 2, 10))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def twin(query: Any, keys: Any, values: Any, lengths: PagedLengths, *, scale: float, window: int | None) -> torch.Tensor:
    """What a paged GPU kernel computes, in plain torch, from exactly what it is told."""
    result, block_size = torch.empty_like(query), keys.shape[1]
    for i, context in enumerate(lengths.contexts.tolist()):
        rows = slice(int(lengths.starts[i]), int(lengths.starts[i + 1]))
        blocks = lengths.tables[i, : -(-context // block_size)].long()
        seen_keys, seen_values = (x[blocks].flatten(0, 1)[:context].transpose(0, 1)[None] for x in (keys, values))
        at = torch.arange(context - (rows.stop - rows.start), context)[:, None]
        slots = torch.arange(context)[None]
        mask = slots <= at if window is None else (slots <= at) & (slots > at - window)
        attended = torch.nn.functional.scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None], seen_keys, seen_values, attn_mask=mask, scale=scale, enable_gqa=True
        )
        result[rows] = attended[0].transpose(0, 1)
    assert int(lengths.context_starts[-1]) == int(lengths.contexts.sum())
    assert lengths.longest_context == int(lengths.contexts.max())
    assert lengths.longest_query == int(lengths.starts.diff().max())
    return result


def build(name: str, memory: KvMemory, query_heads: int) -> AttentionBackend:
    if name == "flash":
        return FlashBackend("flash", memory, twin)
    return choose_backend(name, memory, query_heads, KERNELS)[0]


class Case:
    """A random batch over a pool whose unused slots are NaN."""

    def __init__(self, seed: int, heads: tuple[int, int, int], dtype: torch.dtype, block_size: int) -> None:
        self.query_heads, self.kv_heads, self.dim = heads
        self.dtype, self.block_size = dtype, block_size
        self.random = np.random.default_rng(seed)
        self.steps = self._steps()
        torch.manual_seed(seed)
        shape = KvShape(self.kv_heads, 2, block_size, self.dim, dtype)
        self.filled = torch.randn((BLOCKS, self.kv_heads, 2, 2, block_size, self.dim)).to(dtype)
        used = torch.zeros(BLOCKS, block_size, dtype=torch.bool)
        for step in self.steps:
            for t in range(step.start):
                used[step.block_table[t // block_size], t % block_size] = True
        self.filled.permute(0, 4, 1, 2, 3, 5)[~used] = math.nan
        self.shape = shape
        rows = sum(len(s.tokens) for s in self.steps)
        self.query = torch.randn(rows, self.query_heads, self.dim).to(dtype)
        self.key = torch.randn(rows, self.kv_heads, self.dim).to(dtype)
        self.value = torch.randn(rows, self.kv_heads, self.dim).to(dtype)

    def _steps(self) -> list[SequenceStep]:
        free = list(self.random.permutation(BLOCKS))
        most = BLOCKS * self.block_size // 16
        decodes = [(int(self.random.integers(0, most)), 1) for _ in range(int(self.random.integers(0, 4)))]
        chunks = [
            (int(self.random.choice([0, 1, self.block_size - 1, self.block_size, int(self.random.integers(0, most))])),
             int(self.random.integers(2, 90)))
            for _ in range(int(self.random.integers(0 if decodes else 1, 3)))
        ]  # fmt: skip
        steps = []
        for i, (start, count) in enumerate(decodes + chunks):
            count = min(count, max(1, most + 90 - start))
            table = [int(free.pop()) for _ in range(-(-(start + count) // self.block_size))]
            steps.append(step_of(f"r{i}", [0] * (start + count), start, start + count, table))
        return steps

    def memory(self) -> KvMemory:
        memory = KvMemory(self.shape, BLOCKS)
        memory.tensor.copy_(self.filled)
        return memory

    def batch(self, memory: KvMemory) -> StepBatch:
        return build_batch(StepPlan(tuple(self.steps)), memory, vocab_size=10)

    def attend(self, backend: AttentionBackend, batch: StepBatch, window: int | None) -> torch.Tensor:
        backend.prepare(batch)
        return backend.attend(1, self.query, self.key, self.value, scale=SCALE, window=window)

    def truth(self, window: int | None) -> torch.Tensor:
        """Row by row, in float64, from the sequence's own keys and values in order."""
        group, row = self.query_heads // self.kv_heads, 0
        result = torch.zeros(self.query.shape, dtype=torch.float64)
        for step in self.steps:
            stored = [self.filled[step.block_table[t // self.block_size], :, 1, :, t % self.block_size] for t in range(step.start)]
            past = torch.stack(stored) if stored else torch.zeros(0, self.kv_heads, 2, self.dim)
            rows = slice(row, row + len(step.tokens))
            keys = torch.cat([past[:, :, 0], self.key[rows]]).double().repeat_interleave(group, 1)
            values = torch.cat([past[:, :, 1], self.value[rows]]).double().repeat_interleave(group, 1)
            for i in range(len(step.tokens)):
                end = step.start + i + 1
                seen = slice(0 if window is None else max(0, end - window), end)
                scores = torch.einsum("hd,thd->ht", self.query[row + i].double(), keys[seen]) * SCALE
                result[row + i] = torch.einsum("ht,thd->hd", scores.softmax(-1), values[seen])
            row += len(step.tokens)
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", BACKENDS)
def test_attention_is_attention(name: str, heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    for seed in range(4):
        case = Case(seed, heads, dtype, block_size=(16, 5, 64, 1)[seed])
        window = (None, 7, None, 40)[seed]
        memory = case.memory()
        found = case.attend(build(name, memory, case.query_heads), case.batch(memory), window)
        assert found.dtype == dtype
        torch.testing.assert_close(found.double(), case.truth(window), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", BACKENDS)
def test_new_keys_and_values_land_in_their_slots_and_nowhere_else(name: str) -> None:
    case = Case(11, (4, 2, 16), torch.float32, block_size=8)
    memory = case.memory()
    case.attend(build(name, memory, 4), case.batch(memory), None)
    expected, row = case.filled.clone(), 0
    for step in case.steps:
        for i in range(len(step.tokens)):
            block, offset = step.block_table[(step.start + i) // 8], (step.start + i) % 8
            expected[block, :, 1, 0, offset], expected[block, :, 1, 1, offset] = case.key[row], case.value[row]
            row += 1
    assert torch.equal(memory.tensor.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


@pytest.mark.parametrize("name", BACKENDS)
def test_strided_heads_are_taken_as_they_come(name: str) -> None:
    case = Case(3, (4, 2, 16), torch.float32, block_size=16)
    fused = torch.cat([case.query, case.key, case.value], 1)
    one, other = case.memory(), case.memory()
    plain = case.attend(build(name, one, 4), case.batch(one), None)
    case.query, case.key, case.value = fused[:, :4], fused[:, 4:6], fused[:, 6:]
    torch.testing.assert_close(case.attend(build(name, other, 4), case.batch(other), None), plain, rtol=0, atol=0)
    # heads-major, as transformers hands them over
    case.query = case.query.transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(case.attend(build(name, other, 4), case.batch(other), None), plain, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_give_a_row_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    case = Case(5, (9, 3, 64), dtype, block_size=16)
    memory = case.memory()
    together = case.attend(build("cpu_paged", memory, 9), case.batch(memory), None)
    row = 0
    for step in case.steps:
        memory = case.memory()
        rows = slice(row, row + len(step.tokens))
        batch = build_batch(StepPlan((step,)), memory, vocab_size=10)
        backend = build("cpu_paged", memory, 9)
        backend.prepare(batch)
        alone = backend.attend(1, case.query[rows], case.key[rows], case.value[rows], scale=SCALE, window=None)
        assert torch.equal(alone, together[rows])
        row += len(step.tokens)


def test_kernels_do_not_depend_on_how_a_prompt_is_cut() -> None:
    torch.manual_seed(0)
    tokens = 300
    query, key, value = torch.randn(tokens, 4, 16), torch.randn(tokens, 2, 16), torch.randn(tokens, 2, 16)
    table = list(range(20))

    def run(cuts: list[int]) -> torch.Tensor:
        memory = KvMemory(KvShape(2, 1, 16, 16, torch.float32), 32)
        backend = build("cpu_paged", memory, 4)
        results = []
        for a, b in zip([0, *cuts], [*cuts, tokens], strict=True):
            backend.prepare(build_batch(StepPlan((step_of("r", [0] * tokens, a, b, table),)), memory, vocab_size=10))
            results.append(backend.attend(0, query[a:b], key[a:b], value[a:b], scale=SCALE, window=None))
        return torch.cat(results)

    assert torch.equal(run([]), run([64, 100, 103, 250]))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_nan_stays_with_its_sequence(name: str) -> None:
    memory = KvMemory(KvShape(2, 2, 16, 16, torch.float32), 16)
    steps = [
        step_of("bad", [0] * 20, 19, 20, [3, 4]),
        step_of("good", [0] * 30, 29, 30, [5, 6]),
        step_of("chunk", [0] * 40, 8, 40, [7, 8, 9]),
    ]
    memory.tensor.normal_()
    memory.tensor[3, :, :, :, 2] = math.nan
    backend = build(name, memory, 4)
    batch = build_batch(StepPlan(tuple(steps)), memory, vocab_size=10)
    backend.prepare(batch)
    out = backend.attend(1, torch.randn(34, 4, 16), torch.randn(34, 2, 16), torch.randn(34, 2, 16), scale=1.0, window=None)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 24, 576, 7])
def test_native_operations_equal_torch_s(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    native, plain = NativeOps(dtype, KERNELS), TorchOps()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    x, delta, weight = (
        (torch.randn(9, width).to(dtype) for _ in range(2)),
        torch.randn(9, width).to(dtype),
        torch.rand(width).to(dtype),
    )
    one, _ = x
    other = one.clone()
    torch.testing.assert_close(
        native.add_rms_norm(one, delta, weight, 1e-5), plain.add_rms_norm(other, delta, weight, 1e-5), **close
    )
    assert torch.equal(one, other)
    torch.testing.assert_close(native.add_rms_norm(one, None, weight, 1e-5), plain.add_rms_norm(other, None, weight, 1e-5), **close)
    gate = torch.cat([torch.randn(4, width) * 30, torch.tensor([-200.0, 200.0, 0.0, -88.0, 88.0]).repeat(4, 1)], 1).to(dtype)
    up = torch.randn_like(gate)
    torch.testing.assert_close(native.gated_silu(gate, up), plain.gated_silu(gate, up), **close)
    assert native.gated_silu(torch.full((1, 16), math.nan, dtype=dtype), torch.ones(1, 16, dtype=dtype)).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("dim", "rotary"), [(64, 64), (16, 16), (96, 48), (10, 6)])
def test_native_rotation_equals_torch_s(dim: int, rotary: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dim)
    heads = torch.randn(5, 3, dim).to(dtype)
    angles = torch.rand(5, rotary) * 6
    cosine, sine = angles.cos().to(dtype), angles.sin().to(dtype)
    one, other = heads.clone(), heads.clone()
    NativeOps(dtype, KERNELS).rotate(one, cosine, sine)
    TorchOps().rotate(other, cosine, sine)
    tolerance = 1e-6 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    assert torch.equal(one[..., rotary:], heads[..., rotary:])


def test_a_plan_that_breaks_its_contract_stops_before_it_writes() -> None:
    memory = KvMemory(KvShape(2, 1, 16, 16, torch.float32), 4)
    for table, says in (([0], "1 blocks, 2 needed"), ([0, 4], "outside the pool"), ([0, -1], "outside the pool")):
        with pytest.raises(AssertionError, match=says):
            build_batch(StepPlan((step_of("r", [1] * 20, 0, 20, table),)), memory, vocab_size=10)
    with pytest.raises(AssertionError, match="nothing to compute"):
        build_batch(StepPlan((step_of("r", [1] * 20, 5, 5, [0, 1]),)), memory, vocab_size=10)


# -- the choice ------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> KvMemory:
    return KvMemory(KvShape(2, 1, 16, 16, torch.float32), 4)


def test_auto_takes_the_kernels_where_they_run(pool: KvMemory) -> None:
    assert isinstance(build("auto", pool, 4), CpuPagedBackend)
    half = KvMemory(KvShape(2, 1, 16, 16, torch.float16), 4)
    assert isinstance(build("auto", half, 4), SdpaBackend)
    with pytest.raises(ConfigError, match="float32 and bfloat16"):
        build("cpu_paged", half, 4)


def test_an_unknown_backend_is_refused(pool: KvMemory) -> None:
    with pytest.raises(ConfigError, match=f"use one of {', '.join(NAMES)}"):
        build("flash_attention_7", pool, 4)


@pytest.mark.parametrize("name", FLASH_NAMES)
def test_gpu_backends_are_refused_on_cpu(pool: KvMemory, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a GPU"):
        build(name, pool, 4)


def test_each_library_is_called_with_parameters_that_it_has() -> None:
    """The call as spelt here, against the signature that the library declares (flash-attn's are written out: it needs a GPU to import)."""
    from torch.nn.attention.varlen import varlen_attn

    def flash_attn_2(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, max_seqlen_q: int, max_seqlen_k: int, dropout_p: float = 0.0,
        softmax_scale: Any = None, causal: bool = False, window_size: Any = (-1, -1), softcap: float = 0.0, alibi_slopes: Any = None,
        deterministic: bool = False, return_attn_probs: bool = False, block_table: Any = None,
    ) -> Any: ...  # fmt: skip

    def flash_attn_4(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any = None, cu_seqlens_k: Any = None, seqused_q: Any = None, seqused_k: Any = None,
        page_table: Any = None, softmax_scale: Any = None, causal: bool = False, window_size: Any = (None, None),
    ) -> Any: ...  # fmt: skip

    lengths = paged_lengths(
        build_batch(
            StepPlan((step_of("r", [1] * 20, 4, 20, [0, 1]),)), KvMemory(KvShape(1, 1, 16, 8, torch.float32), 2), vocab_size=9
        )
    )
    for spell, declared in ((flash_attn_kernel, flash_attn_2), (varlen_attn_kernel, varlen_attn), (fa4_kernel, flash_attn_4)):
        calls: list[inspect.BoundArguments] = []

        def note(*args: Any, declared: Any = declared, calls: Any = calls, **kwargs: Any) -> Any:
            calls.append(inspect.signature(declared).bind(*args, **kwargs))
            return args[0]

        for window, left in ((None, {-1, None}), (8, {7})):
            query = torch.zeros(16, 1, 8)
            assert spell(note)(query, query, query, lengths, scale=0.5, window=window) is query
            bound = calls[-1].arguments
            assert bound["window_size"][0] in left
            assert bound.get("causal", True) is True
            assert bound.get("softmax_scale", bound.get("scale")) == 0.5


def test_without_a_compiler_auto_falls_back_and_a_name_is_refused(
    pool: KvMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    backend, ops = choose_backend("auto", pool, 4, tmp_path)
    assert isinstance(backend, SdpaBackend)
    assert isinstance(ops, TorchOps)
    assert "no C++ compiler" in caplog.text
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler"):
        choose_backend("cpu_paged", pool, 4, tmp_path)


def test_a_compiler_that_fails_is_a_reason_not_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho no such flag >&2\n[ "$1" = --version ]\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(NativeUnavailable, match="CalledProcessError"):
        load_library(tmp_path / "cache")
    assert not list((tmp_path / "cache" / "native").glob("*.so"))


def test_head_dims_that_the_kernels_do_not_take_are_refused() -> None:
    odd = KvMemory(KvShape(1, 1, 4, 9, torch.float32), 2)
    with pytest.raises(NativeUnavailable, match="even head_dim"):
        PagedKernels(NativeOps(torch.float32, KERNELS), odd, 1)


# -- the pool's bytes ------------------------------------------------------------------------------------------------


def test_a_block_is_one_slot_of_memory() -> None:
    memory = KvMemory(KvShape(3, 5, 8, 4, torch.bfloat16), 7)
    slots = memory.slotted()
    assert (slots.slots, slots.slot_bytes, slots.nbytes) == (7, 3 * 5 * 2 * 8 * 4 * 2, memory.nbytes)
    assert list(slots.addresses([0, 6])) == [memory.tensor[0].data_ptr(), memory.tensor[6].data_ptr()]
    assert slots.extents[0].keep is memory.tensor
    assert memory.keys(2).data_ptr() == memory.tensor[0, 0, 2, 0].data_ptr()
    assert memory.values(2).data_ptr() == memory.tensor[0, 0, 2, 1].data_ptr()
    with pytest.raises(ConfigError, match="at least one block"):
        KvMemory(memory.shape, 0)

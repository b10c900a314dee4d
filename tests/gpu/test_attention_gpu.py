"""The GPU backends against the reference backend, on the same pool in GPU memory."""

from __future__ import annotations

import math

import pytest
import torch

from actors.engine.attention.flash import FLASH_NAMES, flash_backend
from actors.engine.attention.sdpa import SdpaBackend
from actors.engine.batch import build_batch
from actors.engine.kv_memory import KvMemory, KvShape
from actors.engine.plan import StepPlan
from cpd_ray.errors import ConfigError
from tests.actors.engine.torch_rig import step_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("name", FLASH_NAMES)
def test_a_mixed_batch_equals_the_reference(name: str, window: int | None) -> None:
    shape = KvShape(2, 2, 256, 128, torch.bfloat16)
    memory, other = KvMemory(shape, 16, device="cuda"), KvMemory(shape, 16, device="cuda")
    try:
        backend = flash_backend(name, memory)
    except ConfigError as error:
        pytest.skip(error.message)
    torch.manual_seed(0)
    memory.tensor.normal_()
    memory.tensor[5:] = math.nan
    other.tensor.copy_(memory.tensor)
    steps = (
        step_of("decode", [0] * 600, 599, 600, [0, 1, 2]),
        step_of("first", [0] * 1, 0, 1, [9]),
        step_of("chunk", [0] * 500, 300, 500, [3, 4]),
        step_of("new", [0] * 300, 0, 300, [7, 8]),
    )
    batch = build_batch(StepPlan(steps), memory, vocab_size=9)
    query, key, value = (torch.randn(502, heads, 128, dtype=torch.bfloat16, device="cuda") for heads in (8, 2, 2))
    reference = SdpaBackend(other)
    for each in (backend, reference):
        each.prepare(batch)
    found, expected = (b.attend(1, query, key, value, scale=0.1, window=window) for b in (backend, reference))
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(memory.tensor.nan_to_num(), other.tensor.nan_to_num())

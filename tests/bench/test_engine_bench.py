"""The engine's benchmark runs to its end and gives every figure that it promises (on the test model, where they mean nothing)."""

from __future__ import annotations

import math

import pytest

from bench.micro import engine


@pytest.mark.slow
def test_every_figure_is_there() -> None:
    figures = engine.rounded(engine.measure("tiny", repeats=20))
    assert set(figures["decode_ms"]) == {"1", "4", "8", "16"}
    assert set(figures["decode_vs_generate"]) == {"1", "4", "16"}
    for limit in engine.LIMITS:
        line = limit.line(figures)
        assert line.endswith(("ok", "MISSED"))
        assert math.isfinite(float(line.split()[len(limit.path)]))

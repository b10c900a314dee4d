"""From a run's document to the page: what was measured appears in it, and a missing document is said so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import report
from bench.sim import __main__ as command
from bench.sim.campaign import Plan, run_campaign
from bench.sim.run import Window


@pytest.mark.slow
def test_a_tiny_campaign_becomes_a_page_with_its_figures(tmp_path: Path) -> None:
    plan = Plan((1,), 1.0, Window(2.0, 6.0, 2.0), curve_qps=(1.0,), spills=(0.5,), jobs=2)
    document = run_campaign(plan)
    results, page = tmp_path / "sim.json", tmp_path / "docs" / "RESULTS.md"
    results.write_text(json.dumps(document))
    assert report.main(["--results", str(results), "--out", str(page)]) == 0
    text = page.read_text()
    for workload, systems in document["sustainable_qps"].items():
        assert workload in text
        for name, rate in systems.items():
            assert f"{rate:.2f}" in text
            assert report.NAMES[name] in text
    assert (
        set(document["warm_ttft_s"]) == set(document["cold_ttft_p99_s"]) == set(document["warm_on_prefill_share"]) == {"1.2", "2.0"}
    )
    for plot in page.parent.glob("plots/*.svg"):
        assert plot.name in text
    assert len(list(page.parent.glob("plots/*.svg"))) == 6


def test_no_document_and_no_trace_are_errors_with_a_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(["--results", str(tmp_path / "none.json"), "--out", str(tmp_path / "x.md")]) == 2
    assert "bench.sim --out" in capsys.readouterr().err
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 5, "input_length": 10, "output_length": 1, "hash_ids": [1]}\nnot json\n')
    assert command.main(["--trace", str(bad)]) == 2
    assert "line 2" in capsys.readouterr().err
    assert command.main(["--trace", str(tmp_path / "absent")]) == 2
    assert command.main(["--jobs", "0"]) == 2

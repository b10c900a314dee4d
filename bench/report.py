"""`python -m bench.report`: from the simulator's document to `docs/RESULTS.md` and its plots.

Owns wording and pictures; computes nothing that the document doesn't hold. Invariant: every table names the command, commit, seeds and
window behind it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Document = dict[str, Any]
NAMES = {
    "pd_round_robin": "P/D round robin, local caches",
    "pd_affinity": "P/D affinity, local caches",
    "pd_shared": "P/D shared cache",
    "pd_best": "P/D affinity + shared + shortest remaining",
    "cpd_threshold": "CPD, the paper's threshold",
    "cpd_cost": "CPD, cost policy (ours)",
}
TARGETS = {"agent_25_6": 1.6, "agent_10_12": 1.4, "agent_50_6": 1.8, "trace": 1.6}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report")
    parser.add_argument("--results", type=Path, default=Path("bench/results/sim.json"))
    parser.add_argument("--out", type=Path, default=Path("docs/RESULTS.md"))
    args = parser.parse_args(argv)
    try:
        document: Document = json.loads(args.results.read_text())
    except (OSError, ValueError) as error:
        print(f"bench.report: {args.results}: {error}; run `python -m bench.sim --out {args.results}` first", file=sys.stderr)
        return 2
    args.out.parent.mkdir(parents=True, exist_ok=True)
    folder = args.out.parent / "plots"
    folder.mkdir(exist_ok=True)
    plots = draw(document, folder)
    args.out.write_text(write(document, [f"plots/{name}" for name in plots]))
    print(f"{args.out} and {len(plots)} plots written")
    return 0


# -- text ------------------------------------------------------------------------------------------------------------


def write(document: Document, plots: list[str]) -> str:
    """The whole page."""
    parts = [_head(document), _sustainable(document), _isolation(document), _extras(document)]
    if plots:
        parts.append("## Curves\n\n" + "\n\n".join(f"![{Path(p).stem}]({p})" for p in plots) + "\n")
    parts.append(_reading())
    return "\n".join(parts)


def _head(document: Document) -> str:
    meta = document["meta"]
    low, measured = meta["window_s"]
    trace = f", trace {meta['trace']}" if meta["trace"] else ""
    return f"""# Results in simulation

The simulator runs the production routing, admission, scheduling, block pools, slabs, eviction and directory in virtual time; only steps and
transfers are formulas (`bench/sim/hardware.py`: peaks, efficiencies and their sources). Objective: time to first token p50 <= 1 s, p90 <= 8 s;
a request that is never served counts as a miss.

Command: `make bench-sim FULL=1 TRACE=<file> && make bench-report`. Commit {meta["commit"]}, {meta["model"]} on four {meta["node"]} nodes
(2P2D or CPD-2D), {meta["block_tokens"]}-token blocks, seeds {meta["seeds"]}, {low:.0f} s warm-up and {measured:.0f} s measured a run{trace}.
Intervals: 95 %, Student, over paired seeds (with one seed there is none).
"""


def _sustainable(document: Document) -> str:
    rates = document["sustainable_qps"]
    lines = [f"## Sustainable requests per second (bisection to {document['meta']['tolerance_qps']})\n"]
    lines.append("| system | " + " | ".join(rates) + " |")
    lines.append("|---|" + "---|" * len(rates))
    for name, label in NAMES.items():
        lines.append(f"| {label} | " + " | ".join(f"{rates[w][name]:.2f}" for w in rates) + " |")
    lines.append("\n| ratio (95 % interval) | " + " | ".join(rates) + " |")
    lines.append("|---|" + "---|" * len(rates))
    for key, label, target in (
        ("cpd_cost_vs_best_plain", "ours / best plain P/D", TARGETS.get),
        ("cpd_cost_vs_pd_best", "ours / honest best P/D", lambda _: 1.0),
        ("cpd_threshold_vs_pd_shared", "paper's threshold / shared-cache P/D", lambda _: None),
    ):
        lines.append(f"| {label} | " + " | ".join(_ratio(document["ratios"][w][key], target(w)) for w in rates) + " |")
    return "\n".join(lines) + "\n"


def _ratio(found: dict[str, float], target: float | None) -> str:
    aim = "" if target is None else f", aim {target}"
    return f"{found['mean']:.2f} ({found['low']:.2f}-{found['high']:.2f}{aim})"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _isolation(document: Document) -> str:
    lines = ["## Isolation on agent_10_12\n"]
    lines.append("| offered QPS | system | warm p50 | warm p90 | cold p99 | p99 of all | warm on the prefill pool |")
    lines.append("|---|---|---|---|---|---|---|")
    for qps, systems in document["warm_ttft_s"].items():
        for name, warm in systems.items():
            share = document["warm_on_prefill_share"][qps] if name == "cpd_cost" else None
            cells = [warm["p50"], warm["p90"], document["cold_ttft_p99_s"][qps][name], document["all_ttft_p99_s"][qps][name]]
            shown = "" if share is None else f"{100 * share:.1f} %"
            lines.append(f"| {qps} | {NAMES[name]} | " + " | ".join(_seconds(c) for c in cells) + f" | {shown} |")
    return "\n".join(lines) + "\n"


def _extras(document: Document) -> str:
    parts = []
    for key, title, label in (
        ("ablations", "Ablations (agent_10_12)", lambda p: p["ablation"]),
        ("adversarial", "Adversarial mixes at 0.6 QPS", lambda p: f"{p['workload']}: {NAMES[p['system']]}"),
    ):
        if not document[key]:
            continue
        lines = [
            f"## {title}\n",
            "| | QPS | p50 | p90 | p99 | warm p50 | warm p90 | unserved |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for point in document[key]:
            ttft, warm = point["ttft_s"], point["warm_ttft_s"]
            cells = [ttft["p50"], ttft["p90"], ttft["p99"], warm["p50"], warm["p90"]]
            lines.append(f"| {label(point)} | {point['qps']} | " + " | ".join(map(_seconds, cells)) + f" | {point['unserved']} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _reading() -> str:
    return """## How to read this

- **QPS per GPU.** The paper plots throughput "per GPU" against offered QPS. We read its axis as the offered rate of the whole deployment, and
  divide tokens per second by all GPUs of the deployment (prefill and decode nodes alike), so that systems of unequal size compare.
- **Prefill throughput** counts whole prompts served, cached tokens included; what was computed is less.
- **Plain P/D** is the best of round robin, affinity and shared cache, all first come first served with chunks of 16,384 tokens (SGLang's
  default on B200). The honest best P/D adds shortest-remaining scheduling and routing by predicted time to first token. Our policy takes
  shorter chunks, and brings contexts back between turns; the ablations say what either is worth.
- **Cold and warm** are told apart by the paper's rule at the moment of routing (less than a tenth cached and at least 2,500 tokens not).
- **The trace** is the conversation trace of the Mooncake paper, from the repository kvcache-ai/Mooncake, folder FAST25-release/traces.
"""


# -- pictures --------------------------------------------------------------------------------------------------------


def draw(document: Document, folder: Path) -> list[str]:
    """Plots of what the document holds; their file names."""
    drawn = []
    curves = document["curves"]
    for name, title, value in (
        ("ttft_p50", "time to first token p50 (s)", lambda p: p["ttft_s"]["p50"]),
        ("ttft_p90", "time to first token p90 (s)", lambda p: p["ttft_s"]["p90"]),
        ("prefill_throughput", "prompt tokens/s per GPU", lambda p: p["prefill_tokens_per_s_per_gpu"]),
        ("generation_throughput", "generated tokens/s per GPU", lambda p: p["generated_tokens_per_s_per_gpu"]),
    ):
        if curves:
            drawn.append(_curve(curves, title, value, folder / f"{name}.svg", logarithmic=name.startswith("ttft")))
    if document["pareto"]:
        drawn.append(_pareto(document["pareto"], folder / "pareto.svg"))
    drawn.append(_bars(document["sustainable_qps"], folder / "sustainable_qps.svg"))
    return drawn


def _curve(
    points: list[dict[str, Any]], title: str, value: Callable[[dict[str, Any]], float | None], path: Path, *, logarithmic: bool
) -> str:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    for system in dict.fromkeys(p["system"] for p in points):
        mine = sorted((p["qps"], v) for p in points if p["system"] == system and (v := value(p)) is not None)
        axes.plot([q for q, _ in mine], [v for _, v in mine], marker="o", label=system, linestyle="-" if "cost" in system else "--")
    if logarithmic:
        axes.set_yscale("log")
    axes.set_xlabel("offered requests/s (agent_10_12)")
    axes.set_ylabel(title)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)
    return _save(figure, path)


def _pareto(points: list[dict[str, Any]], path: Path) -> str:
    figure, axes = plt.subplots(figsize=(7, 4.5))
    rates = sorted({p["qps"] for p in points})
    isolated = {p["spill_after_s"]: p["warm_ttft_s"]["p50"] for p in points if p["qps"] == rates[0]}
    loaded = {p["spill_after_s"]: p["ttft_s"]["p90"] for p in points if p["qps"] == rates[-1]}
    for spill, warm in isolated.items():
        p90 = loaded.get(spill)
        if warm is None or p90 is None:
            continue
        axes.scatter(p90, warm)
        axes.annotate("never" if spill is None else f"{spill:g} s", (p90, warm), fontsize=8)
    axes.set_xlabel(f"p90 of all at {rates[-1]} requests/s (s): capacity")
    axes.set_ylabel(f"warm p50 at {rates[0]} requests/s (s): isolation")
    axes.set_title("spill_after_s")
    axes.grid(alpha=0.3)
    return _save(figure, path)


def _bars(rates: dict[str, dict[str, float]], path: Path) -> str:
    figure, axes = plt.subplots(figsize=(8, 4.5))
    width = 0.8 / len(NAMES)
    for i, (name, label) in enumerate(NAMES.items()):
        axes.bar([x + i * width for x in range(len(rates))], [rates[w][name] for w in rates], width, label=label)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(rates))], list(rates))
    axes.set_ylabel("sustainable requests/s")
    axes.legend(fontsize=7)
    return _save(figure, path)


def _save(figure: Any, path: Path) -> str:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    return path.name


if __name__ == "__main__":
    sys.exit(main())

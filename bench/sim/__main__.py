"""`python -m bench.sim`: run the comparison; the last line on stdout is its summary as JSON.

Owns the command line only. Invariant: an input that can't be used ends with one line that says why, and exit status 2.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from bench.sim.campaign import full, run_campaign, short
from bench.workload.trace import TraceError, measure

SUMMARY = ("sustainable_qps", "warm_ttft_s", "cold_ttft_p99_s", "all_ttft_p99_s", "warm_on_prefill_share", "ratios", "meta")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sim", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--full", action="store_true", help="ten seeds to 0.02 QPS, curves, Pareto front, ablations (hours)")
    parser.add_argument("--seeds", type=int, help="with --full: how many paired seeds")
    parser.add_argument("--trace", type=Path, help="a trace in the Mooncake format, plain or gzip")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--out", type=Path, help="write the whole document here as well")
    args = parser.parse_args(argv)
    try:
        if args.jobs < 1 or (args.seeds is not None and args.seeds < 1):
            raise ValueError("--jobs and --seeds must be at least 1")
        if args.trace is not None:
            measure(args.trace)
    except (TraceError, ValueError, OSError) as error:
        print(f"bench.sim: {error}", file=sys.stderr)
        return 2
    plan = full(args.trace, args.jobs, args.seeds or 10) if args.full else short(args.trace, args.jobs)
    document = run_campaign(plan, say=lambda line: print(line, file=sys.stderr, flush=True))
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps({key: document[key] for key in SUMMARY}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

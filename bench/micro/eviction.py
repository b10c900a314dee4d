"""Which blocks to drop: every eviction policy over one trace, beside the best that could be done knowing the future.

`python -m bench.micro.eviction --trace FILE` takes a trace in the Mooncake format (see `bench.workload.trace`). Every block of every
prompt is asked for in order; a hit is a block of the leading run that is there. Invariant: the policies are the production classes,
driven as the slab drives them.

The bound drops the block whose next use is farthest and never takes in one that is not used again before those it holds (Belady 1966,
with bypass). A prefix is used whenever its extensions are, so no order of dropping that respects prefixes does better.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.workload.agent import AGENT_MIXES, AgentMix
from bench.workload.trace import read_trace
from cpd_ray.ids import KEY_BYTES, BlockKey
from kv.eviction import DEFAULT_POLICY, POLICIES, new_policy
from kv.eviction.base import EvictionPolicy

NEVER = float("inf")
SEED = 1
SECONDS_A_TOKEN = 0.02
MIXES = AGENT_MIXES


@dataclass(frozen=True, slots=True)
class Trace:
    """Prompts as keys of their blocks."""

    prompts: tuple[tuple[BlockKey, ...], ...]

    @property
    def blocks(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def unique(self) -> int:
        return len({key for prompt in self.prompts for key in prompt})


def load(path: Path) -> Trace:
    """Raises TraceError."""
    return Trace(tuple(tuple(BlockKey(i.to_bytes(KEY_BYTES, "big")) for i in line.hash_ids) for line in read_trace(path)))


def play(mix: AgentMix, qps: float, prompts: int, block_tokens: int) -> Trace:
    """The coding agent's prompts in the order in which they would come if answers took `SECONDS_A_TOKEN` and nothing ever queued."""
    asked: list[tuple[float, tuple[BlockKey, ...]]] = []
    for session in mix.sessions(qps, SEED, block_tokens):
        now_s = session.arrival_s
        if now_s > prompts / qps:
            break
        for i, turn in enumerate(session.turns):
            now_s += turn.think_s
            asked.append((now_s, session.turn_keys(i)))
            now_s += turn.output_tokens * SECONDS_A_TOKEN
    asked.sort(key=lambda one: one[0])
    return Trace(tuple(keys for _, keys in asked))


def leading(prompt: Sequence[BlockKey], present: set[BlockKey]) -> int:
    count = 0
    while count < len(prompt) and prompt[count] in present:
        count += 1
    return count


def replay(trace: Trace, policy: EvictionPolicy, capacity: int) -> float:
    """The share of blocks found in a cache of `capacity` blocks."""
    present: set[BlockKey] = set()
    found = 0
    for prompt in trace.prompts:
        hits = leading(prompt, present)
        found += hits
        policy.hit(prompt[:hits])
        new = [key for key in dict.fromkeys(prompt[hits:]) if key not in present]
        over = len(present) + len(new) - capacity
        if over > 0:
            present.difference_update(policy.victims(over, set(prompt).__contains__))
        room = capacity - len(present)
        parents = dict(zip(prompt[1:], prompt, strict=False))
        for key in new[:room]:
            policy.insert(key, parents.get(key))
            present.add(key)
    return found / trace.blocks


def bound(trace: Trace, capacity: int) -> float:
    """The same for a cache that knows the future."""
    following: list[dict[BlockKey, float]] = []
    next_use: dict[BlockKey, float] = {}
    for at in range(len(trace.prompts) - 1, -1, -1):
        prompt = trace.prompts[at]
        following.append({key: next_use.get(key, NEVER) for key in prompt})
        next_use.update(dict.fromkeys(prompt, float(at)))
    following.reverse()
    present: dict[BlockKey, float] = {}
    heap: list[tuple[float, int, BlockKey]] = []
    found = 0
    for prompt, after in zip(trace.prompts, following, strict=True):
        found += leading(prompt, set(present) & set(prompt))
        for depth, key in enumerate(prompt):
            if after[key] == NEVER:
                present.pop(key, None)
            else:
                present[key] = after[key]
                heapq.heappush(heap, (-after[key], -depth, key))
        while len(present) > capacity:
            farthest, _, key = heapq.heappop(heap)
            if present.get(key) == -farthest:
                del present[key]
    return found / trace.blocks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace in the Mooncake format, plain or gzip")
    source.add_argument("--mix", choices=sorted(MIXES), help="the coding agent's prompts instead, at --qps")
    parser.add_argument("--qps", type=float, default=2.0)
    parser.add_argument("--prompts", type=int, default=4000)
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument(
        "--percent", type=int, nargs="+", default=[3, 10, 20], help="capacities, in percent of the trace's unique blocks"
    )
    parser.add_argument("--policy", nargs="+", default=sorted(POLICIES), choices=sorted(POLICIES))
    options = parser.parse_args()
    trace = load(options.trace) if options.trace else play(MIXES[options.mix], options.qps, options.prompts, options.block_tokens)
    unique = trace.unique
    print(
        f"{len(trace.prompts)} prompts, {trace.blocks} blocks, {unique} of them different: at most {1 - unique / trace.blocks:.1%} can be found"
    )
    rates: dict[str, dict[str, float]] = {}
    for name in options.policy:
        begun_s = time.process_time()
        rates[name] = {}
        for percent in options.percent:
            capacity = max(1, unique * percent // 100)
            rates[name][str(percent)] = round(100 * replay(trace, new_policy(name, capacity), capacity), 2)
        spent_us = (time.process_time() - begun_s) / len(options.percent) / trace.blocks * 1e6
        print(
            f"{name:>14}  "
            + "  ".join(f"{p:>3} %: {rate:6.2f}" for p, rate in rates[name].items())
            + f"   {spent_us:.2f} us a block"
        )
    best = {str(percent): round(100 * bound(trace, max(1, unique * percent // 100)), 2) for percent in options.percent}
    print(f"{'bound':>14}  " + "  ".join(f"{p:>3} %: {rate:6.2f}" for p, rate in best.items()))
    print(
        json.dumps(
            {
                "default": DEFAULT_POLICY,
                "hit_rate": rates.get(DEFAULT_POLICY),
                "lru_hit_rate": rates.get("lru"),
                "bound": best,
                "policies": rates,
            }
        )
    )


if __name__ == "__main__":
    main()

"""How fast the router finds out what is cached: keys, longest match, what sources tell, memory.

Run it as a program for a table and one JSON line, or call `measure`. One core, no I/O, a fixed seed. Invariant: each figure is
measured on the production classes, and what they return is checked.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import subprocess
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from cpd_ray.clock import SystemClock
from cpd_ray.ids import KEY_BYTES, NodeId, SourceId, split_keys
from cpd_ray.messages import KvEvents
from cpd_ray.tokens import pack
from kv.directory import Applied, Directory
from kv.keys import block_keys, root_key

SEED = 20
TOKENS = 100_000
BLOCK_SIZE = 64
CHAIN_BLOCKS = 1_600
CHAINS = 625
SOURCES = 64
SLAB_SHARE = 0.5
"""So many chains are told of a second time, by a slab."""
CACHE_BYTES = 128 << 20
"""What is written between two cache-cold matches: several times the last-level cache."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A figure, the most (or, with `least`, the least) it may be, and how to print both."""

    name: str
    limit: float
    unit: str
    least: bool = False

    def line(self, figure: float) -> str:
        met = figure >= self.limit if self.least else figure <= self.limit
        relation = ">=" if self.least else "<="
        return f"{self.name:<22}{figure:>14,.3f} {self.unit:<7} {relation} {self.limit:>11,.1f}   {'ok' if met else 'MISSED'}"


LIMITS = (
    Limit("keys_100k_ms", 2.5, "ms"),
    Limit("match_1600_of_1m_ms", 0.5, "ms"),
    Limit("apply_keys_per_s", 1e6, "keys/s", least=True),
    Limit("bytes_per_key", 150, "bytes"),
)


def median_s(call: Callable[[], object], repeats: int) -> float:
    """The median duration of `call`, after one that does not count."""
    call()
    durations = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations)


def measure_keys(rng: random.Random) -> float:
    """Seconds to name the blocks of a long prompt from its token buffer."""
    tokens = pack(rng.randrange(50_000) for _ in range(TOKENS))
    root = root_key(model="bench", revision=None, dtype="bfloat16", block_size=BLOCK_SIZE)
    assert len(block_keys(root, tokens, BLOCK_SIZE)) == TOKENS // BLOCK_SIZE
    return median_s(lambda: block_keys(root, tokens, BLOCK_SIZE), 50)


def make_batches(rng: random.Random, chains: list[bytes]) -> list[KvEvents]:
    """Each chain as one pool's batch, and half of them as a slab's too."""
    pools = [SourceId(f"pool:{i}") for i in range(SOURCES)]
    slabs = [SourceId(f"slab:{i}") for i in range(SOURCES // 4)]
    sequences = dict.fromkeys(pools + slabs, 0)
    batches = []
    for chain in chains:
        tellers = [rng.choice(pools)] + ([rng.choice(slabs)] if rng.random() < SLAB_SHARE else [])
        for source in tellers:
            sequences[source] += 1
            batches.append(KvEvents(source, NodeId("node"), 1, sequences[source], stored=chain))
    return batches


def filled(batches: Iterable[KvEvents]) -> Directory:
    """A directory that was told all of it."""
    directory = Directory(clock=SystemClock())
    for batch in batches:
        assert directory.apply(batch) is Applied.APPLIED
    assert len(directory) == CHAINS * CHAIN_BLOCKS
    return directory


def measure_bytes(batches: list[KvEvents]) -> float:
    """Bytes that a filled directory holds, the latest batches kept for its followers among them."""
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    directory = filled(replace(batch, stored=bytes(bytearray(batch.stored))) for batch in batches)  # as if read from a socket
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    return held / len(directory)


def measure_match(directory: Directory, chains: list[bytes]) -> tuple[float, float]:
    """Seconds to match a whole chain that no cache holds (only the code is warm: another chain was matched just before), and again."""
    evict = np.zeros(CACHE_BYTES // 8)
    cold: list[float] = []
    warm: list[float] = []
    for one, other in zip(chains[::8], chains[1::8], strict=False):
        keys, others = split_keys(one), split_keys(other)
        np.add(evict, 1, out=evict)
        directory.match(others)
        for durations in (cold, warm):
            start = time.perf_counter()
            match = directory.match(keys)
            durations.append(time.perf_counter() - start)
            assert max(match.blocks.values()) == CHAIN_BLOCKS
    return statistics.median(cold), statistics.median(warm)


def measure() -> dict[str, float]:
    """The figures of `LIMITS`, and `match_1600_warm_ms`, `apply_batch_of_8_us`, `forget_ms` for information."""
    rng = random.Random(SEED)
    chains = [rng.randbytes(CHAIN_BLOCKS * KEY_BYTES) for _ in range(CHAINS)]
    batches = make_batches(rng, chains)
    told_keys = sum(len(batch.stored) for batch in batches) // KEY_BYTES
    directory = filled(batches)
    cold_s, warm_s = measure_match(directory, chains)
    return {
        "keys_100k_ms": 1e3 * measure_keys(rng),
        "match_1600_of_1m_ms": 1e3 * cold_s,
        "apply_keys_per_s": told_keys / median_s(lambda: filled(batches), 5),
        "bytes_per_key": measure_bytes(batches),
        "match_1600_warm_ms": 1e3 * warm_s,
        "apply_batch_of_8_us": 1e6 * measure_small_batches(directory, rng),
        "forget_ms": 1e3 * measure_forget(directory),
    }


def measure_small_batches(directory: Directory, rng: random.Random) -> float:
    """Seconds for a batch of eight new keys."""
    source, node = SourceId("pool:small"), NodeId("node")
    batches = iter([KvEvents(source, node, 1, i, stored=rng.randbytes(8 * KEY_BYTES)) for i in range(1, 502)])
    return median_s(lambda: directory.apply(next(batches)), 500)


def measure_forget(directory: Directory) -> float:
    """Seconds until a source is out of every answer."""
    gone = iter([state.source for state in directory.sources()])
    return median_s(lambda: directory.forget(next(gone)), 40)


def environment() -> dict[str, str | int]:
    """What a figure depends on besides the code."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return {
        "seed": SEED,
        "commit": commit.stdout.strip() or "unknown",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
    }


def main() -> None:
    """Print a table, then one JSON line."""
    figures = measure()
    for limit in LIMITS:
        print(limit.line(figures[limit.name]))
    for name in figures.keys() - {limit.name for limit in LIMITS}:
        print(f"{name:<22}{figures[name]:>14,.3f}")
    print(json.dumps({**{name: round(figure, 4) for name, figure in figures.items()}, **environment()}))


if __name__ == "__main__":
    main()

"""Replay of public traces in the Mooncake format: one JSON object a line with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids` (one id a 512-token block of the prompt; equal ids at the front mean an equal prefix).

The traces are published in the repository kvcache-ai/Mooncake, folder FAST25-release/traces. Owns parsing and time scaling. Invariant:
one line is held at a time, however long the file; every refusal names the line.
"""

from __future__ import annotations

import gzip
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from bench.workload.types import Session, Turn, check_rate
from cpd_ray.ids import KEY_BYTES, BlockKey

TRACE_BLOCK_TOKENS = 512


class TraceError(ValueError):
    """The trace can't be replayed; the message names file and line."""


class TraceLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def open_text(path: Path) -> IO[bytes]:
    """Plain or gzip, by content."""
    with path.open("rb") as probe:
        zipped = probe.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if zipped else path.open("rb")  # type: ignore[return-value]


def read_trace(path: Path) -> Iterator[TraceLine]:
    """The lines of a trace, checked; raises TraceError."""
    decoder = msgspec.json.Decoder(TraceLine)
    before = float("-inf")
    with open_text(path) as lines:
        try:
            for number, raw in enumerate(lines, start=1):
                line = _checked(decoder, raw, f"{path.name}, line {number}", before)
                before = line.timestamp
                yield line
        except (EOFError, gzip.BadGzipFile, OSError) as error:
            raise TraceError(f"{path.name}: not readable to its end ({error})") from error


def _checked(decoder: msgspec.json.Decoder[TraceLine], raw: bytes, where: str, before: float) -> TraceLine:
    try:
        line = decoder.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}") from error
    if not 0 <= line.timestamp < float("inf"):
        raise TraceError(f"{where}: a timestamp of {line.timestamp} ms")
    if line.timestamp < before:
        raise TraceError(f"{where}: timestamp {line.timestamp} ms comes after {before} ms: the trace is not sorted")
    if line.input_length < 1 or line.output_length < 0:
        raise TraceError(f"{where}: {line.input_length} tokens in and {line.output_length} out can't be")
    need = -(-line.input_length // TRACE_BLOCK_TOKENS)
    if len(line.hash_ids) != need:
        raise TraceError(
            f"{where}: {len(line.hash_ids)} hash_ids for {line.input_length} tokens, which are {need} blocks of {TRACE_BLOCK_TOKENS}"
        )
    if any(not 0 <= i < 2**63 for i in line.hash_ids):
        raise TraceError(f"{where}: a hash id is negative or too large")
    return line


@dataclass(frozen=True, slots=True)
class TraceStats:
    requests: int
    span_s: float
    mean_input_tokens: float
    unique_blocks: int


def measure(path: Path) -> TraceStats:
    """One pass over the trace: its own rate and size. Raises TraceError when it is empty or lasts no time."""
    requests, tokens, first_ms, last_ms = 0, 0, 0.0, 0.0
    seen: set[int] = set()
    for line in read_trace(path):
        first_ms = line.timestamp if not requests else first_ms
        last_ms = line.timestamp
        requests += 1
        tokens += line.input_length
        seen.update(line.hash_ids)
    if requests < 2 or last_ms <= first_ms:
        raise TraceError(f"{path.name}: {requests} requests over {last_ms - first_ms} ms have no rate that could be scaled")
    return TraceStats(requests, (last_ms - first_ms) / 1000, tokens / requests, len(seen))


class TraceReplay:
    """Each line is a request of its own (the trace doesn't say which follow each other); time is scaled to the rate asked for. A seed
    other than 0 starts the replay somewhere in the first three tenths of the trace, so that seeds see different traffic."""

    requests_per_session = 1.0

    def __init__(self, path: Path, name: str = "trace") -> None:
        self.name = name
        self._path = path
        self.stats = measure(path)

    def sessions(self, qps: float, seed: int, block_tokens: int) -> Iterator[Session]:
        check_rate(qps)
        if block_tokens != TRACE_BLOCK_TOKENS:
            raise ValueError(
                f"the trace's ids are of {TRACE_BLOCK_TOKENS}-token blocks; {block_tokens}-token blocks can't be told from them"
            )
        skip = int(random.Random(seed).random() * self.stats.requests * 0.3) if seed else 0
        stretch = (self.stats.requests - 1) / self.stats.span_s / qps / 1000
        first_ms: float | None = None
        for number, line in enumerate(read_trace(self._path)):
            if number < skip:
                continue
            first_ms = line.timestamp if first_ms is None else first_ms
            full = line.input_length // TRACE_BLOCK_TOKENS
            keys = tuple(BlockKey(i.to_bytes(KEY_BYTES, "big")) for i in line.hash_ids[:full])
            turn = Turn(line.input_length, max(1, line.output_length))
            yield Session(f"{self.name}-{number}", (line.timestamp - first_ms) * stretch, (turn,), keys, block_tokens)

"""Workloads: what they promise of rates, prefixes and repeatability; and what a bad trace is answered with."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from bench.workload.adversarial import ADVERSARIAL
from bench.workload.agent import AGENT_MIXES, AgentMix
from bench.workload.trace import TraceError, TraceReplay, measure, read_trace
from bench.workload.types import Session, Workload, stream_key, stream_keys

ALL: dict[str, Workload] = {**AGENT_MIXES, **ADVERSARIAL}


@pytest.mark.parametrize("name", sorted(ALL))
def test_sessions_are_sorted_repeatable_and_only_stretched_by_the_rate(name: str) -> None:
    workload = ALL[name]
    slow = list(islice(workload.sessions(1.0, 7, 512), 60))
    again = list(islice(workload.sessions(1.0, 7, 512), 60))
    assert slow == again
    assert [s.arrival_s for s in slow] == sorted(s.arrival_s for s in slow)
    other = list(islice(workload.sessions(1.0, 8, 512), 60))
    assert other != slow
    if name != "alternating_bursts":  # its periods are fixed in time
        fast = list(islice(workload.sessions(2.0, 7, 512), 60))
        assert [s.turns for s in fast] == [s.turns for s in slow]
        assert [s.arrival_s for s in fast] == pytest.approx([s.arrival_s / 2 for s in slow])


@pytest.mark.parametrize("name", sorted(ALL))
def test_the_rate_of_requests_is_the_one_asked_for(name: str) -> None:
    sessions = list(islice(ALL[name].sessions(2.0, 1, 512), 1600))
    requests = sum(len(s.turns) for s in sessions)
    assert requests / sessions[-1].arrival_s == pytest.approx(2.0, rel=0.12)


@pytest.mark.parametrize("name", sorted(AGENT_MIXES))
def test_turns_extend_the_prompt_before_and_stay_in_their_ranges(name: str) -> None:
    mix = AGENT_MIXES[name]
    assert isinstance(mix, AgentMix)
    sessions = list(islice(mix.sessions(1.0, 3, 512), 300))
    one_off = [s for s in sessions if len(s.turns) == 1]
    assert len(one_off) / len(sessions) == pytest.approx(mix.one_off, abs=0.08)
    seen: set[bytes] = set()
    for session in sessions:
        _check_session(session, mix)
        private = session.keys[mix.shared_tokens // 512 :] if len(session.turns) > 1 else session.keys
        assert not seen & set(private), "sessions share nothing but the head"
        seen |= set(private)


def _check_session(session: Session, mix: AgentMix) -> None:
    before = None
    for number, turn in enumerate(session.turns):
        keys = session.turn_keys(number)
        assert len(keys) == turn.prompt_tokens // session.block_tokens
        assert turn.prompt_tokens + turn.output_tokens <= mix.max_context_tokens
        if before is not None:
            added = turn.prompt_tokens - before.prompt_tokens - before.output_tokens
            assert mix.added_tokens[0] <= added <= mix.added_tokens[1]
            assert mix.think_s[0] <= turn.think_s <= mix.think_s[1]
        before = turn


def test_agents_of_a_fan_out_share_their_context_and_only_that() -> None:
    sessions = list(islice(ADVERSARIAL["fan_out"].sessions(1.0, 1, 512), 32))
    blocks = 100_000 // 512
    assert len({s.keys[:blocks] for s in sessions[:16]}) == 1
    assert sessions[0].keys[:blocks] != sessions[16].keys[:blocks]
    assert len({s.arrival_s for s in sessions[:16]}) == 1


@pytest.mark.parametrize("qps", [0.0, -1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("name", sorted(ALL))
def test_impossible_rates_are_refused(name: str, qps: float) -> None:
    with pytest.raises(ValueError, match="can't be offered"):
        next(ALL[name].sessions(qps, 1, 512))


def test_keys_of_a_stream_are_unique_and_agree() -> None:
    assert stream_keys(3, 5, 2) == [stream_key(3, 5), stream_key(3, 6)]
    keys = {key for stream in range(20) for key in stream_keys(stream, 0, 50)}
    assert len(keys) == 1000


# -- traces ----------------------------------------------------------------------------------------------------------


def line(timestamp: float, tokens: int, ids: list[int], output: int = 10) -> str:
    return json.dumps({"timestamp": timestamp, "input_length": tokens, "output_length": output, "hash_ids": ids})


GOOD = [line(0, 1000, [1, 2]), line(500, 1024, [1, 3]), line(1000, 513, [4, 5])]


def write(folder: Path, lines: list[str], name: str = "trace.jsonl") -> Path:
    path = folder / name
    text = "\n".join(lines) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_trace_is_replayed_time_scaled(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, GOOD, name)
    stats = measure(path)
    assert (stats.requests, stats.span_s, stats.unique_blocks) == (3, 1.0, 5)
    sessions = list(TraceReplay(path).sessions(4.0, 0, 512))
    assert [s.arrival_s for s in sessions] == pytest.approx([0.0, 0.25, 0.5])
    assert [len(s.keys) for s in sessions] == [1, 2, 1]
    assert sessions[0].keys[0] == sessions[1].keys[0]
    assert sessions[0].turns[0].prompt_tokens == 1000


@pytest.mark.parametrize(
    ("number", "bad", "says"),
    [
        (2, "{not json", "malformed"),
        (2, '{"timestamp": 1}', "input_length"),
        (2, line(500, 1024, [1]), "1 hash_ids for 1024 tokens"),
        (2, line(500, 0, []), "0 tokens in"),
        (2, line(-5, 100, [1]), "timestamp of -5"),
        (2, line(500, 100, [-1]), "negative"),
        (3, line(499, 100, [1]), "not sorted"),
        (3, line(600, 100, [1], output=-3), "-3 out"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, number: int, bad: str, says: str) -> None:
    lines = [GOOD[0], line(500, 1024, [1, 3]), line(1000, 513, [4, 5])]
    lines[number - 1] = bad
    with pytest.raises(TraceError, match=f"line {number}: .*{says}"):
        list(read_trace(write(tmp_path, lines)))


def test_a_cut_off_archive_and_an_empty_trace_are_errors(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD, "trace.jsonl.gz")
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(TraceError, match="not readable to its end"):
        list(read_trace(path))
    for lines in ([], [GOOD[0]], [GOOD[0], GOOD[0]]):
        with pytest.raises(TraceError, match="no rate"):
            measure(write(tmp_path, [text for text in lines if text], "few.jsonl") if lines else _empty(tmp_path))


def _empty(folder: Path) -> Path:
    path = folder / "empty.jsonl"
    path.write_bytes(b"")
    return path


def test_the_replay_needs_the_traces_own_block_size(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="512-token"):
        next(TraceReplay(write(tmp_path, GOOD)).sessions(1.0, 0, 256))

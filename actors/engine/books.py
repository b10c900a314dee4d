"""What the live sequences amount to: the load that routers read, and the check that nothing is held twice or by nobody.

Owns the sums; changes nothing. Invariant: work that several requests wait for is counted once, in the share of the one that does it.
"""

from __future__ import annotations

from collections.abc import Iterable

from actors.engine.interface import EngineLoad
from actors.engine.ordering import Work
from actors.engine.sequence import Phase, Sequence
from actors.engine.tables import BlockTables
from cpd_ray.messages import StepCost
from kv.pool import BlockState


def load_of(sequences: Iterable[Sequence], tables: BlockTables, chunk_tokens: int, cost: StepCost, now_s: float) -> EngineLoad:
    """How much is running and waiting, and the seconds that computing the prompts accepted so far takes beside the present decodes."""
    running = waiting = tokens = 0
    decode_s = 0.0
    prompts: list[tuple[Work, float]] = []
    for s in sequences:
        waiting += s.phase is Phase.WAITING
        running += s.phase is not Phase.WAITING
        if s.phase is Phase.RUNNING and s.remaining == 1 and s.generated:
            decode_s += cost.per_token_s + cost.per_sequence_s + cost.per_attention_s * s.computed
            continue
        tokens += s.known - _in_pool(s, tables)
        prompts.append((_to_compute(s, tables), now_s - s.arrival_s))
    queue_s = tuple(w.predict_s(cost, chunk_tokens) + -(-(w.stop - w.start) // chunk_tokens) * decode_s for w, _ in prompts)
    return EngineLoad(running, waiting, tokens, sum(queue_s), cost, queue_s, tuple(age_s for _, age_s in prompts))


def _in_pool(sequence: Sequence, tables: BlockTables) -> int:
    return sequence.expected * tables.block_size if sequence.phase is Phase.WAITING else sequence.computed


def _to_compute(sequence: Sequence, tables: BlockTables) -> Work:
    start = _in_pool(sequence, tables)
    if sequence.phase is Phase.WAITING:
        start = max(start, sequence.joined * tables.block_size)
    if sequence.phase is not Phase.RUNNING:
        start = max(start, tables.may_fetch(sequence) * tables.block_size)
    return Work(start, sequence.known)


def check_tables(sequences: Iterable[Sequence], tables: BlockTables) -> None:
    """Assert that each held block is alive, and written to by one sequence at most; the pool's own invariants too."""
    pool = tables.pool
    pool.check()
    seen: set[int] = set()
    for s in sequences:
        s.check(tables.block_size)
        for place, block in enumerate(s.blocks):
            state, key = pool.state_of(block), pool.key_of(block)
            assert state in (BlockState.COMPUTING, BlockState.COMMITTED), f"{s.id} holds block {block}, which is {state.name}"
            assert (state is BlockState.COMMITTED) == (place < s.settled), f"{s.id}: block {place} is {state.name}"
            assert key is None or key == s.keys[place], f"{s.id}: block {place} has another content"
            assert block not in seen or state is BlockState.COMMITTED, f"block {block} is written by two sequences"
        seen.update(s.blocks)
    counts = pool.counts()
    assert len(seen) <= counts.active + counts.leased, "blocks held that the pool does not count"

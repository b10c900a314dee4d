"""Which reads from afar become copies: enough reads, not here yet, within the budget, heads first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cpd_ray.ids import BlockKey, NodeId
from placement.copies import CopyRun, RemoteRead, copies_to_make

A, B = NodeId("a"), NodeId("b")


def key(i: int) -> BlockKey:
    return BlockKey(i.to_bytes(16, "big"))


def run_of(reads: list[int], source: NodeId = A) -> list[RemoteRead]:
    return [RemoteRead(key(i), key(i - 1) if i else None, source, count) for i, count in enumerate(reads)]


def test_a_run_read_often_enough_is_one_copy() -> None:
    runs = copies_to_make(run_of([2, 2, 2]), after_reads=2, budget_blocks=9, here=lambda _: False)
    assert runs == (CopyRun(A, None, (key(0), key(1), key(2))),)


def test_gaps_split_runs_and_keep_their_parents() -> None:
    runs = copies_to_make(run_of([2, 1, 2, 2, 2]), after_reads=2, budget_blocks=9, here=lambda k: k == key(3))
    assert runs == (CopyRun(A, None, (key(0),)), CopyRun(A, key(1), (key(2),)), CopyRun(A, key(3), (key(4),)))


def test_no_budget_no_copies() -> None:
    for budget in (0, -3):
        assert copies_to_make(run_of([5, 5]), after_reads=2, budget_blocks=budget, here=lambda _: False) == ()


@given(
    st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.sampled_from([A, B])), max_size=20),
    st.integers(1, 4),
    st.integers(-2, 12),
)
def test_against_the_rule_block_by_block(blocks: list[tuple[int, bool, NodeId]], after: int, budget: int) -> None:
    reads = [RemoteRead(key(i), key(i - 1) if i else None, source, count) for i, (count, _, source) in enumerate(blocks)]
    here = {key(i) for i, (_, is_here, _) in enumerate(blocks) if is_here}
    runs = copies_to_make(reads, after_reads=after, budget_blocks=budget, here=here.__contains__)
    wanted = [(read.key, read.source) for read in reads if read.reads >= after and read.key not in here]
    assert [(k, run.source) for run in runs for k in run.keys] == wanted[: max(0, budget)]
    for run in runs:
        first = reads[[read.key for read in reads].index(run.keys[0])]
        assert run.parent == first.parent

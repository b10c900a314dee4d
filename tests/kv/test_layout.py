from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv.layout import BlockLayout, HeadRange, ShardCopy
from kv.transport.base import Span

SMOLLM2 = BlockLayout(layers=30, kv_heads=3, block_size=64, head_dim=64, dtype="bfloat16")
TINY = BlockLayout(layers=2, kv_heads=3, block_size=4, head_dim=2, dtype="float16")

layouts = st.builds(
    BlockLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 12),
    block_size=st.integers(1, 4),
    head_dim=st.integers(1, 3),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
)
ranks = st.integers(1, 8)


def test_sizes_of_a_known_model() -> None:
    assert SMOLLM2.bytes_per_token == 3 * 30 * 2 * 64 * 2 == 23_040
    assert SMOLLM2.block_bytes == 64 * 23_040
    assert SMOLLM2.head_bytes * 3 == SMOLLM2.block_bytes
    assert SMOLLM2.shape(5) == (5, 3, 30, 2, 64, 64)


@given(layouts, st.integers(1, 5))
def test_the_shape_has_as_many_bytes_as_the_blocks(layout: BlockLayout, blocks: int) -> None:
    assert np.prod(layout.shape(blocks)) * layout.dtype_bytes == blocks * layout.block_bytes
    assert layout.bytes_per_token * layout.block_size == layout.block_bytes


@pytest.mark.parametrize(
    ("field", "value"), [("layers", 0), ("kv_heads", 0), ("block_size", -1), ("head_dim", 0), ("dtype", "int3"), ("dtype", "")]
)
def test_what_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field if field != "dtype" else "dtype"):
        replace(TINY, **{field: value})  # type: ignore[arg-type]


# -- which heads are whose -------------------------------------------------------------------------------------------


@given(layouts, ranks)
def test_every_head_is_someones_and_every_rank_has_some(layout: BlockLayout, count: int) -> None:
    shares = [layout.heads(count, rank) for rank in range(count)]
    assert {head for share in shares for head in range(share.start, share.stop)} == set(range(layout.kv_heads))
    assert min(map(len, shares)) >= 1
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    if count <= layout.kv_heads:
        assert sum(map(len, shares)) == layout.kv_heads, "a head has two owners where none needs to"
    else:
        assert {len(share) for share in shares} == {1}


@pytest.mark.parametrize(
    ("kv_heads", "count", "expected"),
    [
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (2, 8, [(0, 1)] * 4 + [(1, 2)] * 4),
        (3, 2, [(0, 1), (1, 3)]),
        (3, 8, [(0, 1)] * 3 + [(1, 2)] * 3 + [(2, 3)] * 2),
        (1, 1, [(0, 1)]),
    ],
)
def test_known_shares(kv_heads: int, count: int, expected: list[tuple[int, int]]) -> None:
    layout = replace(TINY, kv_heads=kv_heads)
    assert [layout.heads(count, rank) for rank in range(count)] == [HeadRange(*share) for share in expected]


@pytest.mark.parametrize(("count", "rank"), [(2, 2), (2, -1), (0, 0)])
def test_a_rank_that_is_not_there(count: int, rank: int) -> None:
    with pytest.raises(ValueError, match="rank"):
        TINY.heads(count, rank)


# -- shards of one size from shards of another -----------------------------------------------------------------------


def cut(block: np.ndarray, span: Span) -> np.ndarray:
    return block[span.offset : span.offset + span.nbytes]


def shards_of(layout: BlockLayout, block: np.ndarray, count: int) -> list[np.ndarray]:
    """By the meaning of the layout: each rank's heads, copied out of an array of heads."""
    by_head = block.reshape(layout.kv_heads, layout.head_bytes)
    shares = [layout.heads(count, rank) for rank in range(count)]
    return [by_head[share.start : share.stop].reshape(-1).copy() for share in shares]


@given(layouts, ranks, ranks, st.integers(0, 2**32 - 1))
def test_shards_reassembled_from_other_shards_equal_the_source(layout: BlockLayout, a: int, b: int, seed: int) -> None:
    block = np.random.default_rng(seed).integers(0, 256, layout.block_bytes, dtype=np.uint8)
    sources, expected = shards_of(layout, block, a), shards_of(layout, block, b)
    for rank in range(b):
        shard = np.zeros(layout.shard(b, rank).block_bytes, dtype=np.uint8)
        written = np.zeros_like(shard)
        for copy in layout.spans(a, b, rank):
            assert copy.source.offset + copy.source.nbytes <= len(sources[copy.source_rank])
            cut(shard, copy.into)[:] = cut(sources[copy.source_rank], copy.source)
            cut(written, copy.into)[:] += 1
        assert (written == 1).all(), "a byte is copied twice, or never"
        assert np.array_equal(shard, expected[rank])


def test_all_pairs_up_to_eight_ranks() -> None:
    for kv_heads in (1, 2, 3, 4, 5, 8):
        layout = replace(TINY, kv_heads=kv_heads)
        block = np.arange(layout.block_bytes, dtype=np.uint16).astype(np.uint8)
        for a in range(1, 9):
            sources = shards_of(layout, block, a)
            for b in range(1, 9):
                for rank, expected in enumerate(shards_of(layout, block, b)):
                    pieces = [cut(sources[copy.source_rank], copy.source) for copy in layout.spans(a, b, rank)]
                    assert np.array_equal(np.concatenate(pieces), expected), (kv_heads, a, b, rank)


@given(layouts, ranks)
def test_the_block_of_all_heads_is_one_shard(layout: BlockLayout, count: int) -> None:
    for rank in range(count):
        (read,) = layout.spans(1, count, rank)
        assert read == ShardCopy(0, layout.span(count, rank), Span(0, layout.shard(count, rank).block_bytes))
    assert layout.spans(count, count, 0)[0].source == Span(0, layout.shard(count, 0).block_bytes)


@given(layouts, ranks)
def test_equal_sizes_copy_each_shard_in_one_piece(layout: BlockLayout, count: int) -> None:
    for rank in range(count):
        (copy,) = layout.spans(count, count, rank)
        assert layout.heads(count, copy.source_rank) == layout.heads(count, rank)


def test_readers_of_a_replicated_head_spread_over_its_owners() -> None:
    layout = replace(TINY, kv_heads=1)
    assert [layout.spans(4, 4, rank)[0].source_rank for rank in range(4)] == [0, 1, 2, 3]
    assert {layout.spans(4, 2, rank)[0].source_rank for rank in range(2)} == {0, 1}


@given(layouts, ranks, ranks)
def test_no_more_pieces_than_borders(layout: BlockLayout, a: int, b: int) -> None:
    for rank in range(b):
        mine = layout.heads(b, rank)
        borders = {layout.heads(a, r).start for r in range(a)} & set(range(mine.start + 1, mine.stop))
        assert len(layout.spans(a, b, rank)) == len(borders) + 1


# -- who may read whom -----------------------------------------------------------------------------------------------


def test_the_digest_tells_every_difference_apart() -> None:
    variants = [
        TINY.digest(model="m"),
        TINY.digest(model="m", revision=""),
        TINY.digest(model="m2"),
        *(replace(TINY, **{name: 7}).digest(model="m") for name in ("layers", "kv_heads", "block_size", "head_dim")),  # type: ignore[arg-type]
        replace(TINY, dtype="bfloat16").digest(model="m"),
    ]
    assert len(set(variants)) == len(variants)
    assert TINY.digest(model="m") == replace(TINY).digest(model="m", revision=None)

"""The order of bytes in a block, `[kv_heads, layers, 2 (K, V), block_size, head_dim]`, and which of them each rank owns.

Owns shapes, sizes, head ranges and the compatibility digest; knows no memory and moves nothing. A block is one contiguous
piece, and so is any run of its heads: a rank's shard of a block is one `Span` of it, and shards of one tensor-parallel size are
cut into those of another without touching an element. Invariant: at any tensor-parallel size every head is some rank's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kv.fingerprint import fingerprint
from kv.transport.base import Span

LAYOUT_VERSION = 1
"""Changes whenever the bytes of a block come to mean something else."""

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element sizes by torch's names."""


@dataclass(frozen=True, slots=True)
class HeadRange:
    """KV heads `[start, stop)`."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class ShardCopy:
    """One piece of one rank's shard of a block: bytes `source` of source rank `source_rank` become bytes `into` of the reader's."""

    source_rank: int
    source: Span
    into: Span


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What is in a block, all heads of it (or, made by `shard`, one rank's). `dtype` is torch's name. Raises ValueError for
    sizes or a dtype that can't be."""

    layers: int
    kv_heads: int
    block_size: int
    head_dim: int
    dtype: str

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "block_size", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV of dtype {self.dtype}: one of {', '.join(DTYPE_BYTES)} is stored")

    @property
    def dtype_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def head_bytes(self) -> int:
        """One head of one block: all its layers, K and V."""
        return self.layers * 2 * self.block_size * self.head_dim * self.dtype_bytes

    @property
    def block_bytes(self) -> int:
        return self.kv_heads * self.head_bytes

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    def shape(self, blocks: int) -> tuple[int, int, int, int, int, int]:
        """`[blocks, kv_heads, layers, 2, block_size, head_dim]`."""
        return (blocks, self.kv_heads, self.layers, 2, self.block_size, self.head_dim)

    def digest(self, *, model: str, revision: str | None = None) -> bytes:
        """What two processes must agree on before one reads the other's blocks. Taken of the layout of all heads, since shards
        of different tensor-parallel sizes are compatible."""
        return fingerprint(
            "cpd-ray block layout",
            {
                "version": LAYOUT_VERSION,
                "model": model,
                "revision": revision,
                "dtype": self.dtype,
                "layers": self.layers,
                "kv_heads": self.kv_heads,
                "block_size": self.block_size,
                "head_dim": self.head_dim,
            },
        )

    # -- tensor parallelism ------------------------------------------------------------------------------------------

    def heads(self, ranks: int, rank: int) -> HeadRange:
        """The heads of `rank`: even shares where that goes, else shares that differ by one; where ranks outnumber heads, one head
        each, neighbours sharing it."""
        if not 0 <= rank < ranks:
            raise ValueError(f"no rank {rank} among {ranks}")
        start = rank * self.kv_heads // ranks
        return HeadRange(start, max(start + 1, (rank + 1) * self.kv_heads // ranks))

    def shard(self, ranks: int, rank: int) -> BlockLayout:
        """The layout of a block in the pool of `rank`."""
        return replace(self, kv_heads=len(self.heads(ranks, rank)))

    def span(self, ranks: int, rank: int) -> Span:
        """Where the shard of `rank` lies in a block of all heads."""
        heads = self.heads(ranks, rank)
        return self._span(heads.start, len(heads))

    def spans(self, source_ranks: int, into_ranks: int, into_rank: int) -> tuple[ShardCopy, ...]:
        """The pieces of the sources' shards that make up the shard of `into_rank`: each of its bytes once, in order, in as few
        pieces as can be. Of sources that share a head, the readers take different ones. A block of all heads is the one shard of 1 rank."""
        mine = self.heads(into_ranks, into_rank)
        copies: list[ShardCopy] = []
        head = mine.start
        while head < mine.stop:
            source_rank = self._source_of(head, source_ranks, into_rank)
            theirs = self.heads(source_ranks, source_rank)
            stop = min(theirs.stop, mine.stop)
            source = self._span(head - theirs.start, stop - head)
            copies.append(ShardCopy(source_rank, source, self._span(head - mine.start, stop - head)))
            head = stop
        return tuple(copies)

    def _span(self, first_head: int, heads: int) -> Span:
        return Span(first_head * self.head_bytes, heads * self.head_bytes)

    def _source_of(self, head: int, ranks: int, reader: int) -> int:
        owners = [rank for rank in range(ranks) if self.heads(ranks, rank).start <= head < self.heads(ranks, rank).stop]
        return owners[reader % len(owners)]
